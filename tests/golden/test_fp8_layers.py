"""Compiled layers whose products are in FP8: the numbers of the eager layer, weights cast outside of the graph, and
each activation and gradient cast once."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import fp8 as text
from bench.lowered import kernels_of
from tests.support.tiny_models import config_of, template_of
from tests.support.traced_layers import FP32, ROWS, TRACED_FOR, greatest_difference, trace
from torch.fx import Node

from horizon_server.engine.compiled.build import build_missing
from horizon_server.engine.compiled.call_pattern import CallPattern
from horizon_server.engine.compiled.graphs import Graph, LayerGraphs
from horizon_server.engine.compiled.layers import CompiledCall, CompiledLayers, call_patterns
from horizon_server.engine.compiled.library import CodeLibrary, Target, layer_key
from horizon_server.recipe import Matmul

PRODUCT = torch.ops.horizon.scaled_product.default
FP8 = {torch.float8_e4m3fn, torch.float8_e5m2}
# Of a layer: queries, keys, values, output, gate, up and down.
NUM_WEIGHTS = 7
NUM_STEPS = 20


def traced(architecture: str, matmul: Matmul) -> LayerGraphs:
    template = template_of(config_of(architecture))
    pattern = call_patterns(template, FP32)[0]
    assert isinstance(pattern, CallPattern)
    return trace(template, 0, pattern, matmul=matmul)


def casts(graph: Graph) -> list[Node]:
    """The roundings to 8 bits."""
    return [node for node in graph.module.graph.nodes if node.op == "call_function" and is_cast(node)]


def is_cast(node: Node) -> bool:
    value = node.meta.get("val")
    source = node.args[0].meta.get("val") if node.args and isinstance(node.args[0], Node) else None
    is_rounded = isinstance(value, torch.Tensor) and value.dtype in FP8
    return is_rounded and isinstance(source, torch.Tensor) and source.dtype not in FP8


def products(graph: Graph) -> list[Node]:
    return list(graph.module.graph.find_nodes(op="call_function", target=PRODUCT))


@pytest.mark.parametrize("matmul", ["fp8", "fp8_full"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt_neox", "gemma2"])
def test_a_traced_layer_computes_what_the_eager_layer_computes(architecture: str, matmul: Matmul) -> None:
    template = template_of(config_of(architecture))
    for group, pattern in call_patterns(template, FP32).items():
        assert isinstance(pattern, CallPattern)
        graphs = trace(template, group, pattern, matmul=matmul)
        for graph in (graphs.forward, graphs.backward):
            least, most = graph.token_range(sum(TRACED_FOR))
            # Rows of any length, whole blocks of the units or not.
            assert least == 2 and most >= 1 << 17
        for lengths in ROWS:
            difference, worst = greatest_difference(template, group, pattern, graphs, lengths, matmul=matmul)
            assert difference <= 5e-6, (lengths, worst)


@pytest.mark.parametrize(("architecture", "num_weights"), [("llama", NUM_WEIGHTS), ("gpt_neox", 4)])
def test_weights_are_cast_outside_of_the_graphs(architecture: str, num_weights: int) -> None:
    graphs = traced(architecture, "fp8_full")
    for graph, num_ways in ((graphs.forward, 1), (graphs.backward, 2)):
        inputs = graph.module.graph.find_nodes(op="placeholder")
        rounded = [node for node in inputs if node.meta["val"].dtype in FP8]
        assert len(rounded) == num_ways * num_weights
        # What is cast inside depends on the tokens.
        for node in casts(graph):
            assert any(not isinstance(size, int) for size in node.meta["val"].shape), node.meta["val"].shape


@pytest.mark.parametrize(
    ("architecture", "matmul", "forward", "backward"),
    [
        # Inputs of: queries, keys and values; output; gate and up; down.
        # Recomputed without the last. And the gradient of each map's output.
        ("llama", "fp8", 4, 3 + 7),
        # The gradients by columns too, and all four inputs.
        ("llama", "fp8_full", 4, 3 + 7 + 7 + 4),
        # Attention and the feed-forward part are side by side, so that the gradients of both outputs are the layer's.
        ("gpt_neox", "fp8", 4, 2 + 3),
        ("gpt_neox", "fp8_full", 4, 2 + 3 + 3 + 4),
    ],
)
def test_each_tensor_is_cast_once(architecture: str, matmul: Matmul, forward: int, backward: int) -> None:
    graphs = traced(architecture, matmul)
    assert len(casts(graphs.forward)) == forward
    assert len(casts(graphs.backward)) == backward


def test_products_are_counted() -> None:
    counts = {}
    for matmul in ("bf16", "fp8", "fp8_full"):
        graphs = traced("llama", matmul)
        sums = graphs.backward.module.graph.find_nodes(op="call_function", target=torch.ops.horizon.add_product.default)
        counts[matmul] = len(products(graphs.forward)), len(products(graphs.backward)), len(list(sums))
    # Of backward: the recompute but for the last product, the gradients of inputs, those of weights.
    assert counts == {
        "bf16": (0, 0, NUM_WEIGHTS),
        "fp8": (NUM_WEIGHTS, 6 + NUM_WEIGHTS, NUM_WEIGHTS),
        "fp8_full": (NUM_WEIGHTS, 6 + NUM_WEIGHTS + NUM_WEIGHTS, 0),
    }


@pytest.mark.parametrize("matmul", ["fp8", "fp8_full"])
def test_the_kind_of_product_is_part_of_the_key(matmul: Matmul) -> None:
    template = template_of(config_of("llama"))
    keys = {layer_key(template, 0, target_of(kind)) for kind in ("bf16", matmul)}
    assert len(keys) == 2


def target_of(matmul: Any) -> Target:
    return Target(dtype=FP32, device=torch.device("cpu"), num_threads=1, num_tokens=48, matmul=matmul)


# The compiler uses parts of torch that are to be replaced.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_on_a_gpu_casts_are_parts_of_the_kernels_that_make_what_is_cast() -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "head_dim": 64}
    template = template_of(config_of("llama", **sizes))
    (forward, backward), (forward_fp8, backward_fp8) = (kernels_of(template, kind) for kind in ("bf16", "fp8"))

    # What attention puts out is cast by a kernel of its own; the other three casts of forward are in kernels that are
    # there anyway, and write half as many bytes.
    assert forward_fp8.count == forward.count + 1
    assert forward_fp8.hidden_sizes <= forward.hidden_sizes
    # Of the ten casts of backward, as many kernels of their own as there are gradients that products alone put out.
    assert backward_fp8.count <= backward.count + 4
    assert backward_fp8.hidden_sizes <= 1.3 * backward.hidden_sizes


# The compiler uses parts of torch that are to be replaced.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling layers takes g++")
def test_compiled_training_stays_near_that_of_the_compute_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = CodeLibrary(tmp_path / "compiled")
    scratch = library.make_scratch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(scratch))
    monkeypatch.setenv("TMPDIR", str(scratch))
    # Text, in rows of 256 tokens: random tokens would be learned by heart, where any rounding shows most.
    template, target = text.template(), dataclasses.replace(target_of("fp8_full"), num_tokens=text.ROW_TOKENS)
    assert build_missing(template, library, target, lambda line: None) == []
    layers = CompiledLayers.load(template, library, target)
    served: list[CompiledCall | None] = []
    serve: Callable[..., CompiledCall | None] = layers.serve

    def recorded(*of: Any) -> CompiledCall | None:
        served.append(serve(*of))
        return served[-1]

    monkeypatch.setattr(layers, "serve", recorded)
    held_out, *steps = text.steps_of(text.rows(), NUM_STEPS)

    compiled = text.losses_of("fp8_full", steps, held_out, FP32, compiled=layers)
    eager, full = (text.losses_of(matmul, steps, held_out, FP32) for matmul in ("fp8_full", "bf16"))

    assert served and None not in served
    assert full[-1] < 0.8 * full[0]
    assert compiled != full
    assert compiled == pytest.approx(eager, rel=1e-3)
    assert compiled == pytest.approx(full, rel=2e-3)

"""Sums of products in the graph of backward, as products that add to each other: which there are, and that their
numbers are no further from the exact ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.tiny_models import config_of, template_of
from tests.support.traced_layers import CPU, FP32, ROWS, TRACED_FOR, greatest_difference, trace
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from horizon_server.engine.compiled.call_pattern import CallPattern, LayerCase
from horizon_server.engine.compiled.graphs import LayerGraphs, trace_layer
from horizon_server.engine.compiled.layers import call_patterns
from horizon_server.engine.compiled.package import LayerCode, build_package
from horizon_server.engine.compiled.sums import sum_products
from horizon_server.engine.compiled.trial import try_layer
from horizon_server.planning.elementwise import copied_bytes
from horizon_server.planning.model_folder import ModelShape

# Gradients of gate and up, and of queries, keys and values.
SUMS = {
    "qwen2": [2, 3],
    "qwen3": [2, 3],
    "gemma2": [2, 3],
    # One map for all that read the same.
    "phi3": [],
    "gpt2": [],
    # Gate and up, queries, keys and values: all read the same norm.
    "gptj": [4],
    "starcoder2": [3],
}


def pattern_of(architecture: str, dtype: torch.dtype) -> tuple[LayerCase, CallPattern]:
    template = template_of(config_of(architecture))
    pattern = call_patterns(template, dtype)[0]
    assert isinstance(pattern, CallPattern)
    case = LayerCase(template=template, layer=0, pattern=pattern, lengths=TRACED_FOR, dtype=dtype, device=CPU)
    return case, pattern


@pytest.mark.parametrize("architecture", sorted(SUMS))
def test_the_gradients_of_a_layer_are_the_same_within_rounding(architecture: str) -> None:
    case, pattern = pattern_of(architecture, FP32)
    graphs = trace(case.template, 0, pattern)
    assert sum_products(graphs.backward.module) == SUMS[architecture]
    # There is nothing left to do.
    assert sum_products(graphs.backward.module) == []
    for lengths in ROWS:
        difference, worst = greatest_difference(case.template, 0, pattern, graphs, lengths)
        assert difference <= 5e-6, (lengths, worst)


def test_a_plan_counts_these_sums() -> None:
    """Each reads its products and writes one tensor as large."""
    shape = ModelShape.from_config(config_of("qwen2").to_dict())
    attention = 4 * (shape.num_attention_heads + 2 * shape.num_key_value_heads) * shape.head_dim
    assert copied_bytes(shape, 2)[2] - attention == sum(2 * (num + 1) * shape.hidden_size for num in SUMS["qwen2"])


def hidden_gradient(graphs: LayerGraphs, case: LayerCase, exact: LayerGraphs) -> tuple[Tensor, Tensor]:
    """The gradient of a layer's input by a graph in bf16, and by one in fp32 on the same numbers."""
    generator = torch.Generator().manual_seed(0)

    def random(tensor: Tensor) -> Tensor:
        if tensor.dtype is torch.bool:
            return torch.ones((), dtype=torch.bool)
        if not tensor.is_floating_point():
            return tensor
        scale = tensor.shape[-1] ** -0.5 if tensor.dim() == 2 else 1.0
        return (scale * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)

    places = case.template.places[1]
    parameters = [random(torch.empty(place.piece.shape, dtype=case.dtype)) for place in places]
    row = torch.empty(1, sum(case.lengths), case.template.hidden_size, dtype=case.dtype)
    hidden, gradient = random(row), random(row)
    tensors = case.pattern.tensors_of(case.call)
    assert tensors is not None

    def run(graphs: LayerGraphs, dtype: torch.dtype) -> Tensor:
        def given(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        targets: list[Tensor] = []
        for place in (place for place in places if place.is_matrix):
            targets += [torch.zeros(place.piece.shape), torch.ones((), dtype=torch.bool)]
        inputs = [given(tensor) for tensor in (*parameters, hidden, *tensors, gradient)]
        found: Tensor = graphs.backward.module(*inputs, *targets)[0]
        return found.double()

    with torch.no_grad():
        return run(graphs, case.dtype), run(exact, FP32)


def test_in_bf16_one_rounding_takes_the_place_of_several() -> None:
    case, _ = pattern_of("qwen2", torch.bfloat16)
    exact = trace_layer(pattern_of("qwen2", FP32)[0])
    graphs = trace_layer(case)
    usual, expected = hidden_gradient(graphs, case, exact)
    assert sum_products(graphs.backward.module) == [2, 3]
    found, _ = hidden_gradient(graphs, case, exact)
    assert float((found - expected).norm()) <= 1.02 * float((usual - expected).norm())


def test_the_operator_rounds_once() -> None:
    generator = torch.Generator().manual_seed(0)
    lefts = [torch.randn(64, 48, generator=generator).bfloat16() for _ in range(3)]
    rights = [torch.randn(48, 32, generator=generator).bfloat16() for _ in range(3)]
    exact = sum((a.double() @ b.double() for a, b in zip(lefts, rights, strict=True)), torch.zeros(()).double())
    apart = lefts[0].mm(rights[0]) + lefts[1].mm(rights[1]) + lefts[2].mm(rights[2])
    found = torch.ops.horizon.sum_of_products(lefts, rights)
    assert float((found.double() - exact).norm()) < float((apart.double() - exact).norm())


def test_what_something_else_reads_is_left_alone() -> None:
    def function(a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
        product = a.mm(b)
        return [product + c.mm(b), product * 2, a.mm(b) + c, torch.add(a.mm(b), c.mm(b), alpha=2)]

    square = torch.randn(4, 4)
    module: GraphModule = make_fx(function)(square, square, square)
    expected = module(square, square, square)
    assert sum_products(module) == []
    for one, other in zip(module(square, square, square), expected, strict=True):
        assert torch.equal(one, other)


# What loading the compiler warns of is not ours.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_compiled_code_calls_the_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    case, pattern = pattern_of("qwen2", FP32)
    graphs = trace(case.template, 0, pattern)
    assert sum_products(graphs.backward.module) == [2, 3]
    file = tmp_path / "layer.pt2"
    build_package(graphs, file)
    trial = try_layer(case, LayerCode(file), graphs.returned)
    assert trial.error <= 1e-5, trial.worst

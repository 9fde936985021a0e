"""Units and offsets from names and shapes, for the naming habits of many architectures."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horizon_server.errors import InvalidModel
from horizon_server.store.layout import (
    TENSOR_ALIGN_ELEMENTS,
    UNIT_ALIGN_ELEMENTS,
    DecayRule,
    StoreLayout,
    build_layout,
    parameter_shapes,
    plane_sizes,
    with_decay,
)
from horizon_server.store.safetensors_files import TensorHeader

LLAMA = {
    "model.embed_tokens.weight": (100, 16),
    "model.norm.weight": (16,),
    "lm_head.weight": (100, 16),
    **{f"model.layers.{i}.self_attn.q_proj.weight": (16, 16) for i in range(12)},
    **{f"model.layers.{i}.input_layernorm.weight": (16,) for i in range(12)},
    **{f"model.layers.{i}.self_attn.q_proj.bias": (16,) for i in range(12)},
}


def layout_of(shapes: dict[str, tuple[int, ...]], *, num_layers: int, tied: bool = False) -> dict[str, list[str]]:
    layout = build_layout(shapes, num_layers=num_layers, tied=tied)
    return {unit.name: [tensor.name for tensor in unit.tensors] for unit in layout.units}


def test_embedding_first_layers_in_order_head_last() -> None:
    layout = build_layout(LLAMA, num_layers=12, tied=False)
    assert [unit.name for unit in layout.units] == ["embedding", *(f"layers.{i}" for i in range(12)), "head"]
    assert [unit.index for unit in layout.units] == list(range(14))
    assert {tensor.name for tensor in layout.units[11].tensors} == {
        n for n in LLAMA if n.startswith("model.layers.10.")
    }
    assert {tensor.name for tensor in layout.units[-1].tensors} == {"lm_head.weight", "model.norm.weight"}
    assert layout.num_parameters == sum(math.prod(shape) for shape in LLAMA.values())


def test_a_tied_projection_is_stored_once() -> None:
    layout = build_layout(LLAMA, num_layers=12, tied=True)
    assert [tensor.name for tensor in layout.units[-1].tensors] == ["model.norm.weight"]
    assert layout.num_parameters == sum(math.prod(shape) for shape in LLAMA.values()) - 1600
    assert layout.tied


@pytest.mark.parametrize(
    ("rule", "spared"),
    [
        ("trainer", lambda name: "norm" in name or "bias" in name),
        ("matrices", lambda name: "norm" in name or "bias" in name or "embed" in name),
        ("all", lambda name: False),
    ],
)
def test_the_rule_decides_what_weight_decay_spares(rule: DecayRule, spared: Callable[[str], bool]) -> None:
    layout = with_decay(build_layout(LLAMA, num_layers=12, tied=False), rule)
    assert {tensor.name for _, tensor in layout.tensors() if not tensor.decay} == set(filter(spared, LLAMA))


def test_the_rule_of_the_trainer_is_the_default() -> None:
    layout = build_layout(LLAMA, num_layers=12, tied=False)
    assert layout == with_decay(layout, "trainer")


@pytest.mark.parametrize(
    ("table", "beside", "block"),
    [
        ("wte.weight", "wpe.weight", "h.{}.attn.c_attn.weight"),
        ("gpt_neox.embed_in.weight", None, "gpt_neox.layers.{}.attention.dense.weight"),
        (
            "transformer.word_embeddings.weight",
            "transformer.word_embeddings_layernorm.weight",
            "transformer.h.{}.mlp.weight",
        ),
        (
            "model.decoder.embed_tokens.weight",
            "model.decoder.embed_positions.weight",
            "model.decoder.layers.{}.fc1.weight",
        ),
    ],
)
def test_other_naming_habits(table: str, beside: str | None, block: str) -> None:
    shapes: dict[str, tuple[int, ...]] = {block.format(i): (8, 8) for i in range(2)}
    shapes |= {table: (10, 8), "transformer.ln_f.weight": (8,)} | ({beside: (4, 8)} if beside else {})
    units = layout_of(shapes, num_layers=2, tied=True)
    assert units["embedding"] == sorted(name for name in (table, beside) if name)
    assert units["layers.1"] == [block.format(1)]
    assert units["head"] == ["transformer.ln_f.weight"]


def test_experts_are_no_layers_even_when_there_are_as_many() -> None:
    shapes: dict[str, tuple[int, ...]] = {
        f"model.layers.{i}.mlp.experts.{e}.up.weight": (8, 8) for i in range(4) for e in range(4)
    }
    shapes |= {"model.embed_tokens.weight": (10, 8), "model.norm.weight": (8,)}
    units = layout_of(shapes, num_layers=4, tied=True)
    assert units["layers.2"] == [f"model.layers.2.mlp.experts.{e}.up.weight" for e in range(4)]


def test_a_layer_count_that_the_tensors_do_not_have_is_refused_with_what_was_found() -> None:
    with pytest.raises(InvalidModel, match=r"num_hidden_layers = 13.*model\.layers\.0 to model\.layers\.11"):
        build_layout(LLAMA, num_layers=13, tied=False)


def test_a_model_without_an_input_embedding_is_refused() -> None:
    shapes = {name: shape for name, shape in LLAMA.items() if "embed" not in name}
    with pytest.raises(InvalidModel, match=r"no input embedding.*embed_tokens\.weight"):
        build_layout(shapes, num_layers=12, tied=False)


@given(
    sizes=st.lists(st.lists(st.integers(1, 5000), min_size=1, max_size=4), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
)
@settings(max_examples=50)
def test_tensors_never_overlap_and_order_of_names_does_not_matter(sizes: list[list[int]], seed: int) -> None:
    shapes: dict[str, tuple[int, ...]] = {
        f"layers.{i}.t{j}.weight": (size, 2) for i, unit in enumerate(sizes) for j, size in enumerate(unit)
    }
    shapes |= {"embed_tokens.weight": (7, 3), "norm.weight": (3,)}
    layout = build_layout(shapes, num_layers=len(sizes), tied=True)
    shuffled = list(shapes.items())
    random.Random(seed).shuffle(shuffled)
    assert build_layout(dict(shuffled), num_layers=len(sizes), tied=True) == layout
    assert_sound(layout)


def assert_sound(layout: StoreLayout) -> None:
    position = 0
    for unit in layout.units:
        assert unit.offset == position and unit.offset % UNIT_ALIGN_ELEMENTS == 0
        inner = 0
        for tensor in unit.tensors:
            assert tensor.offset >= inner and tensor.offset % TENSOR_ALIGN_ELEMENTS == 0
            assert tensor.num_elements == math.prod(tensor.shape)
            assert layout.find(tensor.name) == (unit, tensor)
            inner = tensor.offset + tensor.num_elements
        assert inner <= unit.num_elements
        position += unit.num_elements
    assert position == layout.num_elements


def test_plane_sizes_are_twelve_bytes_a_parameter_and_the_gradient() -> None:
    layout = build_layout(LLAMA, num_layers=12, tied=True)
    n = layout.num_elements
    assert plane_sizes(layout, grad_dtype_bytes=2) == {
        "hi": 2 * n,
        "lo": 2 * n,
        "exp_avg": 4 * n,
        "exp_avg_sq": 4 * n,
        "grad": 2 * n,
    }
    assert "grad" not in plane_sizes(layout, grad_dtype_bytes=0)


def test_no_gradient_is_stored_for_a_table_that_is_only_looked_up() -> None:
    layout = build_layout(LLAMA, num_layers=12, tied=False)
    table, *others = layout.units
    assert layout.has_row_gradients
    assert plane_sizes(layout, grad_dtype_bytes=2)["grad"] == 2 * (layout.num_elements - table.num_elements)
    assert [layout.offset_in("grad", unit) for unit in others] == [unit.offset - table.num_elements for unit in others]
    assert [layout.offset_in("hi", unit) for unit in layout.units] == [unit.offset for unit in layout.units]
    with_positions = {**LLAMA, "model.embed_positions.weight": (4, 4)}
    assert not build_layout(with_positions, num_layers=12, tied=False).has_row_gradients


def test_tables_that_can_be_computed_are_no_parameters() -> None:
    def header(name: str, dtype: str) -> TensorHeader:
        return TensorHeader(name=name, shape=(4,), dtype=dtype, file=Path("f"), start=0, end=0)

    headers = {
        name: header(name, dtype)
        for name, dtype in [
            ("model.layers.0.self_attn.rotary_emb.inv_freq", "F32"),
            ("h.0.attn.bias", "BOOL"),
            ("h.0.attn.masked_bias", "F32"),
            ("h.0.ln_1.bias", "F16"),
        ]
    }
    assert parameter_shapes(headers) == {"h.0.ln_1.bias": (4,)}


def test_what_the_daemon_imports_of_store_and_planning_loads_no_torch() -> None:
    of_store = ("layout", "manifest", "model_files", "planes", "cpus", "native")
    of_planning = (
        "ledger",
        "model_folder",
        "bandwidth",
        "machine",
        "planner",
        "rates",
        "gpus",
        "flops",
        "step_work",
        "step_time",
    )
    modules = [f"horizon_server.store.{m}" for m in of_store] + [f"horizon_server.planning.{m}" for m in of_planning]
    script = f"import sys; import {', '.join(modules)}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "False"


def test_experts_lie_in_counting_order_with_equal_shapes_side_by_side() -> None:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (10, 8), "model.norm.weight": (8,)}
    for expert in range(11):
        prefix = f"model.layers.0.mlp.experts.{expert}."
        shapes |= {f"{prefix}{name}.weight": (16, 8) for name in ("w1", "w3")} | {f"{prefix}w2.weight": (8, 16)}
    layout = build_layout(shapes, num_layers=1, tied=True)
    tensors = layout.units[1].tensors
    order = [tensor.name.split("experts.")[1].removesuffix(".weight") for tensor in tensors]

    assert order == [f"{expert}.{name}" for expert in range(11) for name in ("w2", "w1", "w3")]
    starts = [tensor.offset for tensor in tensors if "w1" in tensor.name]
    assert {second - first for first, second in pairwise(starts)} == {3 * 16 * 8}

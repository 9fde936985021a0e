"""Frozen weights in 8 and 4 bits: what they are unpacked to, how far that is from the original, what they take."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from horizon_server.store import packing
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import (
    BLOCKS_PER_GROUP,
    NF4_BLOCK,
    PackedPart,
    Packing,
    TensorLayout,
    UnitLayout,
    build_layout,
    plane_sizes,
    with_trained,
)
from horizon_server.store.model_load import load_model
from horizon_server.store.packed_pieces import arrived_bytes, packed_pieces
from horizon_server.store.packing import NF4_LEVELS, pack, piece_elements, unpack

SHAPES = [(1, 32), (8, 64), (96, 48), (5, 40), (3, 32, 64), (300, 128)]


def placed(shape: tuple[int, ...], kind: Packing) -> tuple[TensorLayout, torch.Tensor, PackedPart]:
    """A unit of one packed tensor: its place, its empty block, where it is in it."""
    place = TensorLayout(
        name="w",
        shape=shape,
        offset=0,
        num_elements=math.prod(shape),
        decay=False,
        trained=False,
        exact=False,
        packing=kind,
    )
    unit = UnitLayout(
        name="layers.0", kind="layer", index=1, offset=0, num_elements=place.num_elements, tensors=(place,)
    )
    return place, torch.zeros(unit.packed_bytes, dtype=torch.uint8), unit.packed_parts["w"]


def values_of(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape)))


def there_and_back(values: torch.Tensor, kind: Packing, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    place, block, part = placed(tuple(values.shape), kind)
    pack(values.view(-1), place, block, part)
    out = torch.full((place.num_elements,), torch.nan, dtype=dtype)
    unpack(place, block, part, out)
    return out.view(values.shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_int8_is_a_code_times_the_scale_of_its_row(shape: tuple[int, ...]) -> None:
    values = values_of(shape)
    rows = values.view(-1, shape[-1])
    scales = (rows.abs().amax(1) / 127).bfloat16().float()[:, None]
    expected = (rows / scales).round().clamp(-127, 127) * scales
    assert torch.equal(there_and_back(values, "int8"), expected.view(shape))
    assert ((there_and_back(values, "int8").view(rows.shape) - rows).abs() <= scales * 0.51 + rows.abs() * 2**-8).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nf4_is_the_nearest_level_of_its_block(shape: tuple[int, ...]) -> None:
    flat = values_of(shape).view(-1)
    found = there_and_back(flat.view(shape), "nf4").view(-1)
    levels = torch.tensor(NF4_LEVELS)
    for block, back in zip(torch.split(flat, NF4_BLOCK), torch.split(found, NF4_BLOCK), strict=True):
        most = block.abs().max()
        scale = back.abs().max() if most else torch.tensor(0.0)
        # The block's largest element is at an outermost level, within the 8 bits of the scale.
        assert most <= scale * 1.0001 and scale <= most + flat.abs().max() / 255 * 1.01
        distances = (block[:, None] - levels * scale).abs()
        assert ((block - back).abs() <= distances.amin(1) + 1e-6 * scale).all()


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_zeros_stay_zeros_and_bf16_is_the_fp32_value_rounded(shape: tuple[int, ...], kind: Packing) -> None:
    assert torch.equal(there_and_back(torch.zeros(shape), kind), torch.zeros(shape))
    values = values_of(shape)
    assert torch.equal(there_and_back(values, kind, torch.bfloat16), there_and_back(values, kind).bfloat16())


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_pieces_give_the_same_bytes_as_the_whole(kind: Packing, monkeypatch: pytest.MonkeyPatch) -> None:
    values = values_of((300, 128)).view(-1)
    place, whole, part = placed((300, 128), kind)
    pack(values, place, whole, part)
    step = piece_elements(place, 1000)
    assert step == {"int8": 7 * 128, "nf4": NF4_BLOCK * BLOCKS_PER_GROUP}[kind]
    pieces = torch.zeros_like(whole)
    for start in range(0, len(values), step):
        pack(values[start : start + step], place, pieces, part, start=start)
    assert torch.equal(pieces, whole)
    expected, found = torch.empty(len(values)), torch.empty(len(values))
    unpack(place, whole, part, expected)
    monkeypatch.setattr(packing, "PACKED_PIECE_ELEMENTS", 1000)
    pack(values, place, pieces.zero_(), part)
    assert torch.equal(pieces, whole)
    monkeypatch.setattr(packing, "PACKED_PIECE_ELEMENTS", step)
    unpack(place, whole, part, found)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("shape", [*SHAPES, (3, 11)], ids=str)
def test_the_gpu_s_kernels_give_the_bits_of_the_cpu(
    shape: tuple[int, ...], kind: Packing, triton_interpreter: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    triton_interpreter("horizon_server.store.packing_triton")
    expected = there_and_back(values_of(shape), kind)
    monkeypatch.setattr(packing, "runs_triton", lambda device: True)
    assert torch.equal(there_and_back(values_of(shape), kind), expected)


def test_levels_are_those_of_bitsandbytes() -> None:
    """Quantiles of the normal distribution, 8 above zero and 7 below, from the offset that its authors chose."""
    offset = 0.9677083
    positive = torch.special.ndtri(torch.linspace(offset, 0.5, 9)[:-1].double())
    negative = -torch.special.ndtri(torch.linspace(offset, 0.5, 8)[:-1].double())
    levels = torch.cat([positive, torch.zeros(1), negative]).sort().values
    assert torch.allclose(levels / levels.max(), torch.tensor(NF4_LEVELS, dtype=torch.float64), atol=1e-6)


@pytest.mark.parametrize(("kind", "bytes_per_parameter", "most_overhead"), [("int8", 1.0, 0.001), ("nf4", 0.5, 0.032)])
def test_bytes_a_frozen_parameter_takes(kind: Packing, bytes_per_parameter: float, most_overhead: float) -> None:
    hidden, inner = 4096, 14336
    shapes = {
        "model.embed_tokens.weight": (128, hidden),
        **{f"model.layers.0.{name}.weight": (hidden, hidden) for name in "qkvo"},
        "model.layers.0.up.weight": (inner, hidden),
        "model.layers.0.down.weight": (hidden, inner),
        "model.norm.weight": (hidden,),
    }
    layout = with_trained(
        build_layout(shapes, num_layers=1, tied=True),
        lambda name: name == "model.norm.weight",
        is_bfloat16=lambda _: True,
        packing_of=lambda name: kind if ".layers." in name else "none",
    )
    packed = sum(tensor.num_elements for _, tensor in layout.tensors() if tensor.packing == kind)
    assert packed == 4 * hidden * hidden + 2 * hidden * inner
    taken = plane_sizes(layout, grad_dtype_bytes=4)["packed"]
    assert bytes_per_parameter <= taken / packed <= bytes_per_parameter * (1 + most_overhead)
    assert plane_sizes(layout, grad_dtype_bytes=4)["hi"] == 2 * sum(unit.unpacked_elements for unit in layout.units)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_folder_is_packed_while_it_is_loaded(tmp_path: Path, kind: Packing, dtype: torch.dtype) -> None:
    tensors = {
        name: values_of(shape).to(dtype)
        for name, shape in {
            "model.embed_tokens.weight": (50, 32),
            "model.layers.0.a.weight": (300, 128),
            "model.layers.0.b.weight": (16, 32),
            "model.layers.0.norm.weight": (32,),
            "model.norm.weight": (32,),
        }.items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    layout = with_trained(
        build_layout({name: tuple(tensor.shape) for name, tensor in tensors.items()}, num_layers=1, tied=True),
        lambda name: "norm" in name,
        is_bfloat16=lambda _: dtype is torch.bfloat16,
        packing_of=lambda name: kind if name.endswith((".a.weight", ".b.weight")) else "none",
    )
    store = HostStore.allocate(layout)
    load_model(store, tmp_path)
    for unit in layout.units:
        flat = torch.full((unit.num_elements,), torch.nan)
        store.merge_master(unit.index, flat)
        for place in unit.tensors:
            found = flat[place.offset : place.offset + place.num_elements].view(place.shape)
            expected = tensors[place.name].float()
            assert torch.equal(found, expected if place.packing == "none" else there_and_back(expected, kind)), (
                place.name
            )
    block = store.unit(1, "packed").clone()
    store.unit(1, "packed").zero_()
    store.write_master("model.layers.0.a.weight", tensors["model.layers.0.a.weight"])
    store.write_master("model.layers.0.b.weight", tensors["model.layers.0.b.weight"])
    assert torch.equal(store.unit(1, "packed"), block)
    store.close()


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_pieces_are_unpacked_to_the_values_of_the_whole(
    kind: Packing, by_kernel: bool, triton_interpreter: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of 384 elements each, which end within groups of blocks.
    place, block, part = placed((60, 3, 128), kind)
    pack(values_of((60, 3, 128)).view(-1), place, block, part)
    unit = UnitLayout(name="", kind="layer", index=0, offset=0, num_elements=place.num_elements, tensors=(place,))
    whole = torch.empty(place.num_elements)
    unpack(place, block, part, whole)
    spans = [(384 * number, 384 * (number + size)) for number, size in ((0, 1), (42, 2), (43, 1), (50, 10))]
    pieces = packed_pieces(unit, spans)
    arrived = torch.full((arrived_bytes(pieces),), 255, dtype=torch.uint8)
    for piece in pieces:
        for name in ("codes", "scales", "group_scales"):
            arrived[getattr(piece.arrived, name)] = block[getattr(piece.source, name)]
    if by_kernel:
        triton_interpreter("horizon_server.store.packing_triton")
        monkeypatch.setattr(packing, "runs_triton", lambda device: True)
    for piece, (start, stop) in zip(pieces, spans, strict=True):
        assert (piece.start, piece.num_elements) == (start, stop - start)
        for memory, of_piece in ((block, piece.source), (arrived, piece.arrived)):
            found = torch.empty(stop - start)
            unpack(place, memory, of_piece, found, first_block=piece.first_block)
            assert torch.equal(found, whole[start:stop])
    # Of 384 elements, 43 begin in the first group of 256 blocks.
    assert [piece.first_block for piece in pieces] == ([0, 252, 2, 44] if kind == "nf4" else [0] * 4)

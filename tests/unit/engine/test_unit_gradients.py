"""Gradients that add up in memory that nobody zeroed."""

from __future__ import annotations

import torch
from torch import Tensor

from horizon_server.engine.binding import Joined, Piece, Place, Strided
from horizon_server.engine.linear import add_product
from horizon_server.engine.unit_gradients import UnitGradients
from horizon_server.store.layout import TensorLayout, UnitLayout

OFFSETS = {"matrix": 0, "first": 32, "second": 64, "norm": 96, "unused": 128}
SHAPES = {"matrix": (3, 5), "first": (2, 4), "second": (3, 4), "norm": (7,), "unused": (4, 8)}


def unit() -> UnitLayout:
    tensors = (
        TensorLayout(name=name, shape=shape, offset=OFFSETS[name], num_elements=num_elements_of(shape), decay=True)
        for name, shape in SHAPES.items()
    )
    return UnitLayout(name="layers.0", kind="layer", index=1, offset=0, num_elements=200, tensors=tuple(tensors))


def num_elements_of(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def piece(name: str) -> Strided:
    return Strided.contiguous(OFFSETS[name], SHAPES[name])


def places() -> dict[str, Place]:
    joined = Joined(parts=(piece("first"), piece("second")), dim=0)
    pieces: dict[str, tuple[Piece, tuple[str, ...]]] = {
        # Seen transposed, as some classes store a projection.
        "matrix": (piece("matrix").transposed(0, 1), ("matrix",)),
        "joined": (joined, ("first", "second")),
        "norm": (piece("norm"), ("norm",)),
        "unused": (piece("unused"), ("unused",)),
    }
    return {
        name: Place(name=name, unit_index=1, piece=place, stored_names=stored, is_parameter=True, has_gradient=True)
        for name, (place, stored) in pieces.items()
    }


def test_what_comes_first_overwrites_and_what_nothing_reached_is_zero() -> None:
    flat, reached, by_name = torch.full((220,), torch.nan), set[str](), places()
    gradients = UnitGradients(list(by_name.values()), flat, unit(), reached=reached)
    wanted: dict[str, Tensor] = {}

    assert set(gradients.accumulators) == {"matrix", "unused"}
    for _ in range(3):
        a, b = torch.randn(5, 6), torch.randn(6, 3)
        accumulator = gradients.accumulators["matrix"]
        add_product(accumulator.out, a, b, accumulator.first)
        # By the product and by autograd: another use of the same weight.
        other = torch.randn(5, 3)
        gradients.add(by_name["matrix"], other)
        wanted["matrix"] = wanted.get("matrix", 0) + a @ b + other
        for name in ("joined", "norm"):
            values = torch.randn(by_name[name].piece.shape)
            gradients.add(by_name[name], values)
            wanted[name] = wanted.get(name, 0) + values
    gradients.finish()

    assert reached == {"matrix", "first", "second", "norm"}
    for name, values in wanted.items():
        assert torch.allclose(by_name[name].piece.read(flat), values, atol=1e-6), name
    covered = torch.zeros(220, dtype=torch.bool)
    for name in SHAPES:
        piece(name).read(covered).fill_(name != "unused")
    assert not flat[:200][~covered[:200]].any()
    # What is after the unit is another's.
    assert bool(flat[200:].isnan().all())


def test_a_place_that_starts_from_zero_may_be_written_to_directly() -> None:
    flat, by_name = torch.full((220,), torch.nan), places()
    gradients = UnitGradients(list(by_name.values()), flat, unit(), reached=set())

    for name in ("norm", "joined"):
        gradients.start_from_zero(by_name[name])
        assert not by_name[name].piece.read(flat).any()
    by_name["norm"].piece.read(flat).add_(2.0)
    gradients.finish()

    assert by_name["norm"].piece.read(flat).tolist() == [2.0] * 7

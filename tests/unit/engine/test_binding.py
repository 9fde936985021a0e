"""Places in a buffer against the same operations on tensors."""

from __future__ import annotations

import math

import pytest
import torch

from horizon_server.engine.binding import Joined, Piece, Strided, concatenate, stack

FLAT = torch.arange(200.0)


def laid_out(*shapes: tuple[int, ...], gap: int = 0, start: int = 3) -> list[Strided]:
    pieces = []
    for shape in shapes:
        pieces.append(Strided.contiguous(start, shape))
        start += math.prod(shape) + gap
    return pieces


def read(pieces: list[Strided]) -> list[torch.Tensor]:
    return [piece.read(FLAT) for piece in pieces]


def assert_is(piece: Piece, wanted: torch.Tensor, *, view: bool) -> None:
    assert isinstance(piece, Strided) == view
    assert piece.shape == tuple(wanted.shape)
    assert torch.equal(piece.read(FLAT), wanted)
    flat, values = torch.zeros(200), torch.rand(wanted.shape)
    piece.add(flat, values)
    piece.add(flat, values)
    assert torch.equal(piece.read(flat), 2 * values)
    assert int(flat.count_nonzero()) == wanted.numel()


def test_a_contiguous_piece_is_the_tensor_at_its_offset() -> None:
    assert_is(Strided.contiguous(5, (3, 4)), FLAT[5:17].view(3, 4), view=True)
    assert_is(Strided.contiguous(5, ()), FLAT[5], view=True)


@pytest.mark.parametrize("gap", [0, 5])
def test_equal_distances_stack_to_a_view(gap: int) -> None:
    pieces = laid_out((2, 3), (2, 3), (2, 3), gap=gap)
    assert_is(stack(pieces, 0), torch.stack(read(pieces)), view=True)
    assert_is(stack(pieces[:1], 0), read(pieces)[0][None], view=True)


def test_unequal_distances_and_wrong_order_are_joined() -> None:
    first, second, third = laid_out((2, 3), (2, 3), (2, 3))
    for pieces in ([first, third, second], [third, second, first]):
        assert_is(stack(pieces, 0), torch.stack(read(pieces)), view=False)


def test_neighbours_concatenate_to_a_view_along_the_first_dimension_only() -> None:
    pieces = laid_out((2, 3), (4, 3))
    assert_is(concatenate(pieces, 0), torch.cat(read(pieces)), view=True)
    square = laid_out((2, 3), (2, 3))
    assert_is(concatenate(square, 1), torch.cat(read(square), 1), view=False)


def test_pairs_that_lie_side_by_side_fuse_to_one_view() -> None:
    tiles = laid_out(*[(4, 3), (4, 3), (3, 4)] * 5)
    gate, up, down = stack(tiles[0::3], 0), stack(tiles[1::3], 0), stack(tiles[2::3], 0)
    wanted = torch.cat([gate.read(FLAT), up.read(FLAT)], dim=1)
    assert_is(concatenate([gate, up], 1), wanted, view=True)
    assert_is(concatenate([up, gate], 1), torch.cat([up.read(FLAT), gate.read(FLAT)], dim=1), view=False)
    assert_is(down, torch.stack(read(tiles[2::3])), view=True)


def test_transposed_narrowed_and_shifted_pieces() -> None:
    (tile,) = laid_out((4, 3, 2))
    whole = tile.read(FLAT)
    assert_is(tile.transposed(0, 2), whole.transpose(0, 2), view=True)
    assert_is(tile.narrowed(1, 1, 2), whole.narrow(1, 1, 2), view=True)
    assert_is(tile.shifted(7), FLAT[10:34].view(4, 3, 2), view=True)

    odd = laid_out((2, 3), (2, 3), (2, 3))
    joined = concatenate([odd[2], odd[0], odd[1]], 0)
    assert isinstance(joined, Joined)
    assert_is(joined.transposed(0, 1), joined.read(FLAT).T, view=False)
    assert_is(joined.narrowed(0, 1, 4), joined.read(FLAT)[1:5], view=False)
    assert_is(joined.narrowed(1, 1, 1), joined.read(FLAT)[:, 1:2], view=False)
    assert_is(joined.narrowed(0, 0, 2), joined.read(FLAT)[:2], view=True)
    assert_is(
        joined.shifted(2), torch.cat([piece.shifted(2).read(FLAT) for piece in (odd[2], odd[0], odd[1])]), view=False
    )

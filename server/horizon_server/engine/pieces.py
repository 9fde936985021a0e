"""Where a parameter is in a flat buffer: a strided view where the tensors it is made of allow it, else views to be joined.

Owns the arithmetic of stacking, concatenating, transposing and cutting such places without touching a weight.

Units: elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Strided:
    """A view into the buffer."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def contiguous(cls, offset: int, shape: Sequence[int]) -> Strided:
        """A contiguous tensor."""
        strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        return cls(offset=offset, shape=tuple(shape), strides=strides)

    def read(self, flat: Tensor) -> Tensor:
        """The view. Shapes: `flat` is one-dimensional and contiguous."""
        return flat.as_strided(self.shape, self.strides, flat.storage_offset() + self.offset)

    def add(self, flat: Tensor, values: Tensor) -> None:
        """Add to the values there."""
        self.read(flat).add_(values)

    def shifted(self, elements: int) -> Strided:
        """The same, further on in the buffer."""
        return Strided(offset=self.offset + elements, shape=self.shape, strides=self.strides)

    def transposed(self, dim0: int, dim1: int) -> Strided:
        """With two dimensions swapped."""
        return Strided(
            offset=self.offset, shape=_swapped(self.shape, dim0, dim1), strides=_swapped(self.strides, dim0, dim1)
        )

    def narrowed(self, dim: int, start: int, length: int) -> Strided:
        """Part of it along a dimension."""
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return Strided(offset=self.offset + start * self.strides[dim], shape=shape, strides=self.strides)


@dataclass(frozen=True, kw_only=True)
class Joined:
    """Parts that are joined along a dimension when they are read, because they are not one view."""

    parts: tuple[Piece, ...]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        first = self.parts[0].shape
        return (*first[: self.dim], sum(part.shape[self.dim] for part in self.parts), *first[self.dim + 1 :])

    def read(self, flat: Tensor) -> Tensor:
        """A copy of the parts, joined."""
        return torch.cat([part.read(flat) for part in self.parts], dim=self.dim)

    def add(self, flat: Tensor, values: Tensor) -> None:
        """Add to each part."""
        sizes = [part.shape[self.dim] for part in self.parts]
        for part, share in zip(self.parts, torch.split(values, sizes, dim=self.dim), strict=True):
            part.add(flat, share)

    def shifted(self, elements: int) -> Joined:
        """The same, further on in the buffer."""
        return Joined(parts=tuple(part.shifted(elements) for part in self.parts), dim=self.dim)

    def transposed(self, dim0: int, dim1: int) -> Joined:
        """With two dimensions swapped."""
        dim = {dim0: dim1, dim1: dim0}.get(self.dim, self.dim)
        return Joined(parts=tuple(part.transposed(dim0, dim1) for part in self.parts), dim=dim)

    def narrowed(self, dim: int, start: int, length: int) -> Piece:
        """Part of it along a dimension."""
        if dim != self.dim:
            return Joined(parts=tuple(part.narrowed(dim, start, length) for part in self.parts), dim=self.dim)
        kept: list[Piece] = []
        position = 0
        for part in self.parts:
            first, last = max(start, position), min(start + length, position + part.shape[dim])
            if first < last:
                kept.append(part.narrowed(dim, first - position, last - first))
            position += part.shape[dim]
        return concatenate(kept, dim)


Piece = Strided | Joined


def stack(pieces: Sequence[Piece], dim: int) -> Piece:
    """Pieces of one shape, one after the other along a new dimension."""
    first = pieces[0]
    distance = math.prod(first.shape)
    if len(pieces) > 1 and isinstance(first, Strided) and isinstance(pieces[1], Strided):
        distance = max(distance, pieces[1].offset - first.offset)
    return concatenate([_unsqueezed(piece, dim, distance) for piece in pieces], dim)


def concatenate(pieces: Sequence[Piece], dim: int) -> Piece:
    """Pieces one after the other along a dimension they have."""
    first, last = pieces[0], pieces[0]
    if len(pieces) == 1:
        return first
    for piece in pieces[1:]:
        if not _follows(last, piece, dim):
            return Joined(parts=tuple(pieces), dim=dim)
        last = piece
    assert isinstance(first, Strided)
    total = sum(piece.shape[dim] for piece in pieces)
    return Strided(
        offset=first.offset, shape=(*first.shape[:dim], total, *first.shape[dim + 1 :]), strides=first.strides
    )


def _follows(one: Piece, other: Piece, dim: int) -> bool:
    if not isinstance(one, Strided) or not isinstance(other, Strided) or one.strides != other.strides:
        return False
    step = one.shape[dim] * one.strides[dim]
    return step > 0 and other.offset - one.offset == step


def _unsqueezed(piece: Piece, dim: int, stride: int) -> Piece:
    if isinstance(piece, Joined):
        inner = piece.dim + (piece.dim >= dim)
        return Joined(parts=tuple(_unsqueezed(part, dim, stride) for part in piece.parts), dim=inner)
    return Strided(
        offset=piece.offset,
        shape=(*piece.shape[:dim], 1, *piece.shape[dim:]),
        strides=(*piece.strides[:dim], stride, *piece.strides[dim:]),
    )


def _swapped(values: tuple[int, ...], dim0: int, dim1: int) -> tuple[int, ...]:
    swapped = list(values)
    swapped[dim0], swapped[dim1] = swapped[dim1], swapped[dim0]
    return tuple(swapped)

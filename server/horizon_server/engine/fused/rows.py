"""Tensors of any strides as rows that a kernel can find."""

from __future__ import annotations

from torch import Tensor


def as_rows(tensor: Tensor) -> Tensor:
    """A tensor as [outer, inner, D], the elements of a row next to each other: a view where its strides allow."""
    if tensor.stride(-1) != 1:
        tensor = tensor.contiguous()
    size = tensor.shape[-1]
    return tensor.reshape(-1, tensor.shape[-2] if tensor.dim() > 1 else 1, size)


def num_warps_for(tile: int) -> int:
    """The warps of a program for that many elements, a power of two."""
    return min(16, max(4, tile // 512))

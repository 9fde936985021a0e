"""Rotary positions as operators that torch can trace, forward and backward, with the rounding of the code they replace.

The two halves of a head's first R elements are the coordinates that are turned; the elements after them stay.

Shapes: B = rows, T = tokens of a row, E = size of a head, R = size of the tables.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from horizon_server.store.triton_kernels import runs_triton


def turn(values: Tensor, cos_BTR: Tensor, sin_BTR: Tensor) -> Tensor:
    """Turn [B, heads, T, E] by the angles of the tables, which have no gradient.

    Each product and the sum are rounded to the wider dtype of values and tables, the result to that of the values.
    """
    output: Tensor = _Rotary.apply(values, cos_BTR, sin_BTR)  # type: ignore[no-untyped-call]
    return output


@torch.library.custom_op("horizon::rotary", mutates_args=())
def rotary(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The turned values, with a token's heads next to each other."""
    return _turned(values, cos, sin, is_backward=False)


@torch.library.custom_op("horizon::rotary_backward", mutates_args=())
def rotary_backward(gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of the values, with a token's heads next to each other."""
    return _turned(gradient, cos, sin, is_backward=True)


@rotary.register_fake
def _(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _like(values)


@rotary_backward.register_fake
def _(gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _like(gradient)


def _turned(values: Tensor, cos: Tensor, sin: Tensor, *, is_backward: bool) -> Tensor:
    output = _like(values)
    if runs_triton(values.device):
        from horizon_server.engine.fused.rotary_triton import turn_into

        turn_into(output, values, cos, sin, is_backward=is_backward)
        return output
    size = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    turned = values[..., :size]
    if is_backward:
        first, second = (turned * sin).chunk(2, -1)
        other = torch.cat([second, -first], -1)
    else:
        first, second = turned.chunk(2, -1)
        other = torch.cat([-second, first], -1) * sin
    output[..., :size] = turned * cos + other
    output[..., size:] = values[..., size:]
    return output


def _like(values: Tensor) -> Tensor:
    rows, heads, tokens, size = values.shape
    return values.new_empty(rows, tokens, heads, size).transpose(1, 2)


class _Rotary(torch.autograd.Function):
    """Differentiates the operator. Not by `register_autograd`, which torch.func.vjp does not go through."""

    @staticmethod
    def forward(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        found: Tensor = rotary(values, cos, sin)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return rotary_backward(gradient, *ctx.saved_tensors), None, None

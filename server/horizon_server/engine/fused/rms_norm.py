"""RMSNorm as operators that torch can trace, forward and backward, with the rounding of the code they replace.

Two of them add as well: forward the residual before the norm, backward the gradient that the residual passes on.

Shapes: D = size of the last dimension, which is normalised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from horizon_server.store.triton_kernels import runs_triton


@dataclass(frozen=True, kw_only=True)
class NormRule:
    """How a module normalises: `x * rsqrt(mean(x^2) + eps)` in fp32, times `offset + weight`.

    With `rounds_first` the normalised values are rounded to the dtype of the input before they meet the weight, as in
    Llama.
    """

    eps: float
    offset: float
    rounds_first: bool


def normalise(values: Tensor, weight_D: Tensor, rule: NormRule) -> Tensor:
    """RMSNorm over the last dimension, differentiable. Both tensors have the same dtype, which the result has too."""
    output: Tensor = _RmsNorm.apply(values, weight_D, rule.eps, rule.offset, rule.rounds_first)  # type: ignore[no-untyped-call]
    return output


@torch.library.custom_op("horizon::rms_norm", mutates_args=())
def rms_norm(values: Tensor, weight: Tensor, eps: float, offset: float, rounds_first: bool) -> Tensor:
    """The normalised values times the weight, contiguous."""
    if runs_triton(values.device):
        from horizon_server.engine.fused.rms_norm_triton import forward

        return forward(values, weight, eps, offset, rounds_first)
    wide = values.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if rounds_first:
        normed = normed.to(values.dtype)
    return (normed * (weight.float() + offset)).to(values.dtype).contiguous()


@rms_norm.register_fake
def _(values: Tensor, weight: Tensor, eps: float, offset: float, rounds_first: bool) -> Tensor:
    return values.new_empty(values.shape)


@torch.library.custom_op("horizon::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    gradient: Tensor, values: Tensor, weight: Tensor, eps: float, offset: float, rounds_first: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of the values and of the weight, contiguous. What forward computed is computed again: it is read
    anyway."""
    if runs_triton(values.device):
        from horizon_server.engine.fused.rms_norm_triton import backward

        return backward(gradient, values, weight, eps, offset, rounds_first)
    wide, wide_gradient = values.float(), gradient.float()
    factor = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed = wide * factor
    scaled = wide_gradient * (weight.float() + offset)
    for_values = (scaled - normed * (scaled * normed).mean(-1, keepdim=True)) * factor
    if rounds_first:
        normed = normed.to(values.dtype).float()
    for_weight = (wide_gradient * normed).reshape(-1, values.shape[-1]).sum(0)
    return for_values.to(values.dtype).contiguous(), for_weight.to(weight.dtype)


@rms_norm_backward.register_fake
def _(
    gradient: Tensor, values: Tensor, weight: Tensor, eps: float, offset: float, rounds_first: bool
) -> tuple[Tensor, Tensor]:
    return values.new_empty(values.shape), weight.new_empty(weight.shape)


@torch.library.custom_op("horizon::rms_norm_of_sum", mutates_args=())
def rms_norm_of_sum(
    one: Tensor, other: Tensor, weight: Tensor, eps: float, offset: float, rounds_first: bool
) -> tuple[Tensor, Tensor]:
    """The sum of two tensors of one shape and dtype, and the normalised sum times the weight, contiguous."""
    if runs_triton(one.device):
        from horizon_server.engine.fused.rms_norm_triton import forward_of_sum

        return forward_of_sum(one, other, weight, eps, offset, rounds_first)
    values = (one + other).contiguous()
    return values, rms_norm(values, weight, eps, offset, rounds_first)


@rms_norm_of_sum.register_fake
def _(
    one: Tensor, other: Tensor, weight: Tensor, eps: float, offset: float, rounds_first: bool
) -> tuple[Tensor, Tensor]:
    return one.new_empty(one.shape), one.new_empty(one.shape)


@torch.library.custom_op("horizon::rms_norm_backward_added", mutates_args=())
def rms_norm_backward_added(
    added: Tensor, gradient: Tensor, values: Tensor, weight: Tensor, eps: float, offset: float, rounds_first: bool
) -> tuple[Tensor, Tensor]:
    """As `rms_norm_backward`, `added` being another gradient of the values, which is in the first result too."""
    if runs_triton(values.device):
        from horizon_server.engine.fused.rms_norm_triton import backward

        return backward(gradient, values, weight, eps, offset, rounds_first, added=added)
    for_values, for_weight = rms_norm_backward(gradient, values, weight, eps, offset, rounds_first)
    return (for_values + added).contiguous(), for_weight


@rms_norm_backward_added.register_fake
def _(
    added: Tensor, gradient: Tensor, values: Tensor, weight: Tensor, eps: float, offset: float, rounds_first: bool
) -> tuple[Tensor, Tensor]:
    return values.new_empty(values.shape), weight.new_empty(weight.shape)


class _RmsNorm(torch.autograd.Function):
    """Differentiates the operator. Not by `register_autograd`, which torch.func.vjp does not go through."""

    @staticmethod
    def forward(values: Tensor, weight: Tensor, eps: float, offset: float, rounds_first: bool) -> Tensor:
        found: Tensor = rms_norm(values, weight, eps, offset, rounds_first)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        values, weight, *ctx.rule = inputs
        ctx.save_for_backward(values, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        values, weight = ctx.saved_tensors
        for_values, for_weight = rms_norm_backward(gradient, values, weight, *ctx.rule)
        return for_values, for_weight, None, None, None

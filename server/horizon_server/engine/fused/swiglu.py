"""`silu(gate) * up` as operators that torch can trace, forward and backward, with the rounding of the code they
replace."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from horizon_server.store.triton_kernels import runs_triton


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, differentiable. Both tensors have the same shape and dtype, which the result has too."""
    output: Tensor = _SwiGlu.apply(gate, up)  # type: ignore[no-untyped-call]
    return output


@torch.library.custom_op("horizon::swiglu", mutates_args=())
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The product, contiguous."""
    if runs_triton(gate.device):
        from horizon_server.engine.fused.swiglu_triton import forward

        return forward(gate, up)
    return (functional.silu(gate) * up).contiguous()


@swiglu.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op("horizon::swiglu_backward", mutates_args=())
def swiglu_backward(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up, contiguous."""
    if runs_triton(gate.device):
        from horizon_server.engine.fused.swiglu_triton import backward

        return backward(gradient, gate, up)
    wide, wide_gradient = gate.float(), gradient.float()
    share = torch.sigmoid(wide)
    for_gate = wide_gradient * up.float() * share * (1 + wide * (1 - share))
    for_up = wide_gradient * functional.silu(gate).float()
    return for_gate.to(gate.dtype).contiguous(), for_up.to(up.dtype).contiguous()


@swiglu_backward.register_fake
def _(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


class _SwiGlu(torch.autograd.Function):
    """Differentiates the operator. Not by `register_autograd`, which torch.func.vjp does not go through."""

    @staticmethod
    def forward(gate: Tensor, up: Tensor) -> Tensor:
        found: Tensor = swiglu(gate, up)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        for_gate, for_up = swiglu_backward(gradient, gate, up)
        return for_gate, for_up

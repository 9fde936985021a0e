"""The kernels of `swiglu` for GPUs: a program has a part of a row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from horizon_server.engine.fused.rows import as_rows, num_warps_for

_TILE = 4096


@triton.jit(do_not_specialize=["inner"])  # type: ignore[untyped-decorator]
def _swiglu_forward(  # type: ignore[no-untyped-def]
    gate, up, out, gate_outer, gate_inner, up_outer, up_inner, inner, size, BLOCK: tl.constexpr,
):  # fmt: skip
    # 64 bits, because a micro-batch may have more than 2^31 elements.
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    outer, place = row // inner, row % inner
    g = tl.load(gate + outer * gate_outer + place * gate_inner + columns, mask=inside).to(tl.float32)
    u = tl.load(up + outer * up_outer + place * up_inner + columns, mask=inside).to(tl.float32)
    # The model's code rounds what silu returns.
    activated = (g / (1 + tl.exp(-g))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * size + columns, (activated * u).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["inner"])  # type: ignore[untyped-decorator]
def _swiglu_backward(  # type: ignore[no-untyped-def]
    gradient, gate, up, for_gate, for_up, gradient_outer, gradient_inner, gate_outer, gate_inner, up_outer, up_inner,
    inner, size, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    outer, place = row // inner, row % inner
    grad = tl.load(gradient + outer * gradient_outer + place * gradient_inner + columns, mask=inside).to(tl.float32)
    g = tl.load(gate + outer * gate_outer + place * gate_inner + columns, mask=inside).to(tl.float32)
    u = tl.load(up + outer * up_outer + place * up_inner + columns, mask=inside).to(tl.float32)
    share = 1 / (1 + tl.exp(-g))
    activated = (g * share).to(for_up.dtype.element_ty).to(tl.float32)
    result = grad * u * share * (1 + g * (1 - share))
    tl.store(for_gate + row * size + columns, result.to(for_gate.dtype.element_ty), mask=inside)
    tl.store(for_up + row * size + columns, (grad * activated).to(for_up.dtype.element_ty), mask=inside)


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """As `swiglu.swiglu`."""
    out = gate.new_empty(gate.shape)
    gates, ups = as_rows(gate), as_rows(up)
    outer, inner, size = gates.shape
    block = min(_TILE, triton.next_power_of_2(size))
    _swiglu_forward[(outer * inner, triton.cdiv(size, block))](
        gates, ups, out, *gates.stride()[:2], *ups.stride()[:2], inner, size, BLOCK=block,
        num_warps=num_warps_for(block),
    )  # fmt: skip
    return out


def backward(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """As `swiglu.swiglu_backward`."""
    for_gate, for_up = gate.new_empty(gate.shape), up.new_empty(up.shape)
    gradients, gates, ups = as_rows(gradient), as_rows(gate), as_rows(up)
    outer, inner, size = gates.shape
    block = min(_TILE, triton.next_power_of_2(size))
    _swiglu_backward[(outer * inner, triton.cdiv(size, block))](
        gradients, gates, ups, for_gate, for_up, *gradients.stride()[:2], *gates.stride()[:2], *ups.stride()[:2],
        inner, size, BLOCK=block, num_warps=num_warps_for(block),
    )  # fmt: skip
    return for_gate, for_up

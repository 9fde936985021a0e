"""The kernels of `rms_norm` for GPUs: a program has some whole rows in its registers, and reads them once.

Shapes: D = size of a row, P = programs of backward.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from horizon_server.engine.fused.rows import as_rows, num_warps_for

_TILE = 4096
# Each adds up its rows' gradients of the weight. Always as many, because another number adds in another order.
_NUM_PROGRAMS = 256


# Numbers of tokens are not compiled in.
@triton.jit(do_not_specialize=["inner", "num_rows"])  # type: ignore[untyped-decorator]
def _rms_norm_forward(  # type: ignore[no-untyped-def]
    values, added, total, weight, out, outer_stride, inner_stride, added_outer, added_inner, inner, num_rows, size,
    eps, offset, ADDS: tl.constexpr, ROUNDS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # 64 bits, because a micro-batch may have more than 2^31 elements.
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < size)[None, :]
    starts = (rows // inner) * outer_stride + (rows % inner) * inner_stride
    x = tl.load(values + starts[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        starts = (rows // inner) * added_outer + (rows % inner) * added_inner
        x += tl.load(added + starts[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(total + rows[:, None] * size + columns[None, :], x.to(total.dtype.element_ty), mask=inside)
        # What is normalised is the sum as it is stored.
        x = x.to(total.dtype.element_ty).to(tl.float32)
    scale = tl.load(weight + columns, mask=columns < size, other=0.0).to(tl.float32) + offset
    normed = x * tl.rsqrt(tl.sum(x * x, 1) / size + eps)[:, None]
    if ROUNDS:
        normed = normed.to(out.dtype.element_ty).to(tl.float32)
    result = (normed * scale[None, :]).to(out.dtype.element_ty)
    tl.store(out + rows[:, None] * size + columns[None, :], result, mask=inside)


@triton.jit(do_not_specialize=["inner", "num_rows"])  # type: ignore[untyped-decorator]
def _rms_norm_backward(  # type: ignore[no-untyped-def]
    gradient, values, added, weight, out, partial_sums, gradient_outer, gradient_inner, outer_stride, inner_stride,
    added_outer, added_inner, inner, num_rows, size, eps, offset, ADDS: tl.constexpr, ROUNDS: tl.constexpr, ROWS:
    tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    scale = tl.load(weight + columns, mask=columns < size, other=0.0).to(tl.float32) + offset
    for_weight = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(program * ROWS, num_rows, tl.num_programs(0) * ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < num_rows)[:, None] & (columns < size)[None, :]
        starts = (rows // inner) * outer_stride + (rows % inner) * inner_stride
        x = tl.load(values + starts[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        starts = (rows // inner) * gradient_outer + (rows % inner) * gradient_inner
        grad = tl.load(gradient + starts[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(x * x, 1) / size + eps)[:, None]
        normed = x * factor
        scaled = grad * scale[None, :]
        mean = (tl.sum(scaled * normed, 1) / size)[:, None]
        result = (scaled - normed * mean) * factor
        if ADDS:
            starts = (rows // inner) * added_outer + (rows % inner) * added_inner
            result += tl.load(added + starts[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(out + rows[:, None] * size + columns[None, :], result.to(out.dtype.element_ty), mask=inside)
        if ROUNDS:
            normed = normed.to(out.dtype.element_ty).to(tl.float32)
        for_weight += tl.sum(grad * normed, 0)
    tl.store(partial_sums + program * size + columns, for_weight, mask=columns < size)


def forward(values: Tensor, weight_D: Tensor, eps: float, offset: float, rounds_first: bool) -> Tensor:
    """As `rms_norm.rms_norm`."""
    return _forward(values, None, weight_D, eps, offset, rounds_first)[1]


def forward_of_sum(
    one: Tensor, other: Tensor, weight_D: Tensor, eps: float, offset: float, rounds_first: bool
) -> tuple[Tensor, Tensor]:
    """As `rms_norm.rms_norm_of_sum`."""
    return _forward(one, other, weight_D, eps, offset, rounds_first)


def _forward(
    values: Tensor, added: Tensor | None, weight_D: Tensor, eps: float, offset: float, rounds_first: bool
) -> tuple[Tensor, Tensor]:
    out = values.new_empty(values.shape)
    total = out if added is None else torch.empty_like(out)
    rows, weight_D = as_rows(values), weight_D.contiguous()
    others = rows if added is None else as_rows(added)
    num_rows, size = rows.shape[0] * rows.shape[1], rows.shape[2]
    block, per_program = _tile(size)
    _rms_norm_forward[(triton.cdiv(num_rows, per_program),)](
        rows, others, total, weight_D, out, *rows.stride()[:2], *others.stride()[:2], rows.shape[1], num_rows, size,
        eps, offset, ADDS=added is not None, ROUNDS=rounds_first, ROWS=per_program, BLOCK=block,
        num_warps=num_warps_for(block * per_program),
    )  # fmt: skip
    return total, out


def backward(
    gradient: Tensor,
    values: Tensor,
    weight_D: Tensor,
    eps: float,
    offset: float,
    rounds_first: bool,
    added: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `rms_norm.rms_norm_backward`, and `rms_norm_backward_added` with a tensor to add."""
    out = values.new_empty(values.shape)
    rows, gradients, weight_D = as_rows(values), as_rows(gradient), weight_D.contiguous()
    others = rows if added is None else as_rows(added)
    num_rows, size = rows.shape[0] * rows.shape[1], rows.shape[2]
    block, per_program = _tile(size)
    num_programs = min(_NUM_PROGRAMS, triton.cdiv(num_rows, per_program))
    partial_sums_PD = torch.empty(num_programs, size, dtype=torch.float32, device=values.device)
    _rms_norm_backward[(num_programs,)](
        gradients, rows, others, weight_D, out, partial_sums_PD, *gradients.stride()[:2], *rows.stride()[:2],
        *others.stride()[:2], rows.shape[1], num_rows, size, eps, offset, ADDS=added is not None, ROUNDS=rounds_first,
        ROWS=per_program, BLOCK=block, num_warps=num_warps_for(block * per_program),
    )  # fmt: skip
    # In a fixed order, where atomic additions would add in that of arrival.
    return out, partial_sums_PD.sum(0).to(weight_D.dtype)


def _tile(size: int) -> tuple[int, int]:
    """Columns and rows of a program: short rows (of heads) share one."""
    block = triton.next_power_of_2(size)
    return block, max(1, _TILE // block)

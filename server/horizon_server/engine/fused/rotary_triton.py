"""The kernel of `rotary` for GPUs: a program turns all heads of a token.

Shapes: B = rows, T = tokens of a row, E = size of a head, R = size of the tables.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from horizon_server.engine.fused.rows import num_warps_for


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator]
def _rotary_turn(  # type: ignore[no-untyped-def]
    values, cos, sin, out, row_stride, head_stride, token_stride, cos_row_stride, cos_token_stride, sin_row_stride,
    sin_token_stride, num_tokens, num_heads, half, num_kept, IS_BACKWARD: tl.constexpr, ROUNDS: tl.constexpr, HEADS:
    tl.constexpr, HALF: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    # 64 bits, because a micro-batch may have more than 2^31 elements.
    program = tl.program_id(0).to(tl.int64)
    row, token = program // num_tokens, program % num_tokens
    size = 2 * half + num_kept
    heads, columns = tl.arange(0, HEADS).to(tl.int64), tl.arange(0, HALF)
    values += row * row_stride + token * token_stride
    out += program * num_heads * size
    sources, targets = heads[:, None] * head_stride, heads[:, None] * size
    inside = (heads < num_heads)[:, None] & (columns < half)[None, :]
    x1 = tl.load(values + sources + columns[None, :], mask=inside).to(tl.float32)
    x2 = tl.load(values + sources + half + columns[None, :], mask=inside).to(tl.float32)
    cos += row * cos_row_stride + token * cos_token_stride + columns
    sin += row * sin_row_stride + token * sin_token_stride + columns
    cos1 = tl.load(cos, mask=columns < half).to(tl.float32)[None, :]
    cos2 = tl.load(cos + half, mask=columns < half).to(tl.float32)[None, :]
    sin1 = tl.load(sin, mask=columns < half).to(tl.float32)[None, :]
    sin2 = tl.load(sin + half, mask=columns < half).to(tl.float32)[None, :]
    if IS_BACKWARD:
        other1, other2 = x2 * sin2, -x1 * sin1
    else:
        other1, other2 = -x2 * sin1, x1 * sin2
    same1, same2 = x1 * cos1, x2 * cos2
    if ROUNDS:
        # The model's code rounds each product.
        other1, other2 = other1.to(out.dtype.element_ty).to(tl.float32), other2.to(out.dtype.element_ty).to(tl.float32)
        same1, same2 = same1.to(out.dtype.element_ty).to(tl.float32), same2.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + targets + columns[None, :], (same1 + other1).to(out.dtype.element_ty), mask=inside)
    tl.store(out + targets + half + columns[None, :], (same2 + other2).to(out.dtype.element_ty), mask=inside)
    if KEPT:
        kept = tl.arange(0, KEPT)
        inside = (heads < num_heads)[:, None] & (kept < num_kept)[None, :]
        rest = tl.load(values + sources + 2 * half + kept[None, :], mask=inside)
        tl.store(out + targets + 2 * half + kept[None, :], rest, mask=inside)


def turn_into(out: Tensor, values: Tensor, cos_BTR: Tensor, sin_BTR: Tensor, *, is_backward: bool) -> None:
    """Write the turned [B, heads, T, E] to `out`, in which a token's heads are next to each other."""
    rows, num_heads, num_tokens, size = values.shape
    half = cos_BTR.shape[-1] // 2
    num_kept = size - 2 * half
    if values.stride(-1) != 1:
        values = values.contiguous()
    rounds = cos_BTR.dtype == values.dtype
    cos_BTR, sin_BTR = (
        (table if table.stride(-1) == 1 else table.contiguous()).expand(rows, -1, -1) for table in (cos_BTR, sin_BTR)
    )
    heads, columns = triton.next_power_of_2(num_heads), triton.next_power_of_2(half)
    _rotary_turn[(rows * num_tokens,)](
        values, cos_BTR, sin_BTR, out, *values.stride()[:3], *cos_BTR.stride()[:2], *sin_BTR.stride()[:2], num_tokens,
        num_heads, half, num_kept, IS_BACKWARD=is_backward, ROUNDS=rounds, HEADS=heads, HALF=columns,
        KEPT=triton.next_power_of_2(num_kept) if num_kept else 0, num_warps=num_warps_for(heads * columns),
    )  # fmt: skip

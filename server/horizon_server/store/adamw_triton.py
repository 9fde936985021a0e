"""The AdamW update of `adamw.cpp` for states that are in a GPU's memory: the same single IEEE operations in the same
order, so the same bits.

Only the bits of a NaN are the processor's own, but for the master's, which becomes the quiet NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024
_NUM_WARPS = 4


@triton.jit(do_not_specialize=["num_elements"])  # type: ignore[untyped-decorator]
def _adamw(  # type: ignore[no-untyped-def]
    hi, lo, exp_avg, exp_avg_sq, grads, num_elements, grad_scale, beta1, one_minus_beta1, beta2, one_minus_beta2,
    scaled_eps, step_size, decay_factor, GRADS_ARE_BF16: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # 64 bits, because a unit may have more than 2^31 elements.
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < num_elements
    grad = tl.load(grads + at, mask=inside, other=0)
    if GRADS_ARE_BF16:
        grad = (grad.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    grad = grad * grad_scale
    first = beta1 * tl.load(exp_avg + at, mask=inside, other=0.0) + one_minus_beta1 * grad
    second = beta2 * tl.load(exp_avg_sq + at, mask=inside, other=0.0) + (one_minus_beta2 * grad) * grad
    high = tl.load(hi + at, mask=inside, other=0).to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    low = tl.load(lo + at, mask=inside, other=0).to(tl.int32).to(tl.uint32, bitcast=True)
    decayed = (high + low).to(tl.float32, bitcast=True) * decay_factor
    denominator = tl.sqrt_rn(second) + scaled_eps
    master = decayed - tl.div_rn(step_size * first, denominator)
    # The split with its guards, as in `reference`.
    bits = master.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    special = tl.where(magnitude == 0x7F800000, 0x7F800000, 0x7FC00000).to(tl.uint32)
    guarded = tl.where(magnitude >= 0x7F800000, special, tl.minimum(magnitude, 0x7F7F7FFF))
    bits = (bits & 0x80000000) | guarded
    tl.store(exp_avg + at, first, mask=inside)
    tl.store(exp_avg_sq + at, second, mask=inside)
    tl.store(hi + at, ((bits + 0x8000) >> 16).to(tl.uint16).to(tl.int16, bitcast=True), mask=inside)
    tl.store(lo + at, (bits & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True), mask=inside)


def adamw(
    hi_bits: Tensor,
    lo: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grads: Tensor,
    *,
    grads_are_bf16: bool,
    grad_scale: float,
    beta1: float,
    one_minus_beta1: float,
    beta2: float,
    one_minus_beta2: float,
    scaled_eps: float,
    step_size: float,
    decay_factor: float,
) -> None:
    """One update in place. `hi_bits` are int16; `grads` are fp32, or bf16 as int16. The numbers are fp32 values.

    CUDA: launches on the current stream.
    """
    grid = (triton.cdiv(lo.numel(), _TILE),)
    # Without fusion: a multiplication and an addition in one rounding would be other bits.
    _adamw[grid](
        hi_bits, lo, exp_avg, exp_avg_sq, grads, lo.numel(), grad_scale, beta1, one_minus_beta1, beta2,
        one_minus_beta2, scaled_eps, step_size, decay_factor, GRADS_ARE_BF16=grads_are_bf16, TILE=_TILE,
        num_warps=_NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip

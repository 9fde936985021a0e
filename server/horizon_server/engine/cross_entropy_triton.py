"""The kernel of `cross_entropy` for GPUs: one program per row reads the logits twice and writes their gradient over
them.

Shapes: S = supervised tokens of a chunk, V = vocabulary.
Source: online softmax, Milakov and Gimelshein (arXiv 1805.02867).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_NUM_WARPS = 8


@triton.jit  # type: ignore[untyped-decorator]
def _row_kernel(  # type: ignore[no-untyped-def]
    logits, gradient, targets, losses, scales, logits_stride, gradient_stride, vocab_size, scale, smoothing,
    WRITES: tl.constexpr, SCALES: tl.constexpr, SMOOTHS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # 64 bits, because a chunk of 16k tokens has more than 2^31 logits.
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    target = tl.load(targets + row)
    at_target = tl.load(logits + target).to(tl.float32)
    highest = -float("inf")
    total = 0.0
    sum_of_logits = 0.0
    for start in range(0, vocab_size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(logits + columns, mask=columns < vocab_size, other=-float("inf")).to(tl.float32)
        new_highest = tl.maximum(highest, tl.max(values, 0))
        # Models may forbid tokens with -inf: a block of nothing else must not make NaN.
        shift = tl.where(new_highest == -float("inf"), 0.0, new_highest)
        total = total * tl.exp(highest - shift) + tl.sum(tl.exp(values - shift), 0)
        highest = new_highest
        if SMOOTHS:
            sum_of_logits += tl.sum(tl.where(columns < vocab_size, values, 0.0), 0)
    loss = highest + tl.log(total) - at_target
    if SMOOTHS:
        of_all = highest + tl.log(total) - sum_of_logits / vocab_size
        loss = (1.0 - smoothing) * loss + smoothing * of_all
    tl.store(losses + row, loss)
    if WRITES:
        if SCALES:
            scale = tl.load(scales + row)
        gradient += row * gradient_stride
        # Every thread has the target's logit before any of them overwrites it.
        tl.debug_barrier()
        factor = scale / total
        for start in range(0, vocab_size, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < vocab_size
            values = tl.load(logits + columns, mask=inside, other=-float("inf")).to(tl.float32)
            values = tl.exp(values - highest) * factor
            if SMOOTHS:
                values -= scale * smoothing / vocab_size
                values = tl.where(columns == target, values - scale * (1.0 - smoothing), values)
            else:
                values = tl.where(columns == target, values - scale, values)
            tl.store(gradient + columns, values.to(gradient.dtype.element_ty), mask=inside)


def row_losses(
    logits_SV: Tensor, targets_S: Tensor, gradient_SV: Tensor | None, scale: float | Tensor, smoothing: float = 0.0
) -> Tensor:
    """Every row's loss, in fp32; `gradient_SV`, which may be the logits, receives `scale` times their gradient.

    `scale` is a number, or fp32 with one for each row. `smoothing` is torch's `label_smoothing`.
    """
    if logits_SV.stride(1) != 1:
        logits_SV = logits_SV.contiguous()
    out_SV = logits_SV if gradient_SV is None else gradient_SV
    assert out_SV.stride(1) == 1, "a gradient's rows are contiguous"
    num_rows, vocab_size = logits_SV.shape
    losses_S = torch.empty(num_rows, dtype=torch.float32, device=logits_SV.device)
    has_scales = isinstance(scale, Tensor)
    # A kernel needs some address for what it does not read.
    scales, number = (scale, 0.0) if isinstance(scale, Tensor) else (losses_S, scale)
    _row_kernel[(num_rows,)](
        logits_SV, out_SV, targets_S, losses_S, scales, logits_SV.stride(0), out_SV.stride(0), vocab_size, number,
        smoothing, WRITES=gradient_SV is not None, SCALES=has_scales, SMOOTHS=smoothing > 0, BLOCK=min(_BLOCK,
        triton.next_power_of_2(vocab_size)), num_warps=_NUM_WARPS,
    )  # fmt: skip
    return losses_S

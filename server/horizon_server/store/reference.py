"""The store's arithmetic in NumPy, on raw bits: the compiled kernel must give the same bits; runs where it is missing.

Split: `hi = (bits + 0x8000) >> 16` as uint16, `lo = int16(bits)`; merge: `(hi << 16) + lo` in integers. Rounding half
up is exactly invertible, where rounding half to even is not.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from horizon_server.store.native import Scalars

# Elements handled at once, which bounds the temporaries to a few MiB whatever the tensor's size.
CHUNK_ELEMENTS = 1 << 18
# Elements summed up by themselves; fixed, because it decides how a sum of squares is rounded.
NORM_BLOCK_ELEMENTS = 1 << 16

_NORM_LANES = 16
_LARGEST_MAGNITUDE = 0x7F7F7FFF
_INFINITY = 0x7F800000


def merge(hi_bits: npt.NDArray[np.uint16], lo: npt.NDArray[np.int16], out: npt.NDArray[np.float32]) -> None:
    """Write the fp32 master of `hi` and `lo` into `out`."""
    out_bits = out.view(np.uint32)
    for start in range(0, len(out), CHUNK_ELEMENTS):
        part = slice(start, start + CHUNK_ELEMENTS)
        high = hi_bits[part].astype(np.uint32) << np.uint32(16)
        np.add(high, lo[part].astype(np.int32).view(np.uint32), out=out_bits[part])


def split(master: npt.NDArray[np.float32], hi_bits: npt.NDArray[np.uint16], lo: npt.NDArray[np.int16]) -> None:
    """Split the fp32 `master` into `hi` and `lo`; exact for Inf and every finite value up to the bound."""
    master_bits = master.view(np.uint32)
    for start in range(0, len(master), CHUNK_ELEMENTS):
        part = slice(start, start + CHUNK_ELEMENTS)
        magnitude = master_bits[part] & np.uint32(0x7FFFFFFF)
        # Two guards keep `hi`, which the device computes with, true. A finite value that would round to Inf (beyond
        # 3.396e38) saturates to the largest master whose `hi` is finite.
        finite = np.minimum(magnitude, np.uint32(_LARGEST_MAGNITUDE))
        # A NaN keeps its sign and becomes the quiet NaN with `lo` 0: the carry could turn its payload into Inf or -0.
        special = np.where(magnitude == np.uint32(_INFINITY), np.uint32(_INFINITY), np.uint32(0x7FC00000))
        guarded = np.where(magnitude >= np.uint32(_INFINITY), special, finite)
        bits = master_bits[part] & np.uint32(0x80000000) | guarded
        hi_bits[part] = ((bits + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)
        lo[part] = (bits & np.uint32(0xFFFF)).astype(np.uint16).view(np.int16)


def adamw(
    hi_bits: npt.NDArray[np.uint16],
    lo: npt.NDArray[np.int16],
    exp_avg: npt.NDArray[np.float32],
    exp_avg_sq: npt.NDArray[np.float32],
    grads: npt.NDArray[np.float32] | npt.NDArray[np.uint16],
    decay_factor: float,
    step_scale: float,
    scalars: Scalars,
) -> None:
    """One AdamW update in place; `grads` are fp32, or bf16 as raw bits. `step_scale` multiplies the step size.

    Source: Loshchilov and Hutter, arXiv 1711.05101, Algorithm 2, in the order of operations of torch.optim.AdamW but
    for the second bias correction, which `scalars` carries.
    """
    f32 = np.float32
    step_size = f32(scalars.scaled_step_size) * f32(step_scale)
    master = np.empty(min(CHUNK_ELEMENTS, len(lo)), dtype=np.float32)
    for start in range(0, len(lo), CHUNK_ELEMENTS):
        part = slice(start, start + CHUNK_ELEMENTS)
        first, second = exp_avg[part], exp_avg_sq[part]
        weights = master[: len(first)]
        # The kernel reports no overflow or NaN either; the engine looks at the gradients' norm.
        with np.errstate(all="ignore"):
            grad = _widen(grads[part]) * f32(scalars.grad_scale)
            first[:] = f32(scalars.beta1) * first + f32(scalars.one_minus_beta1) * grad
            second[:] = f32(scalars.beta2) * second + (f32(scalars.one_minus_beta2) * grad) * grad
            merge(hi_bits[part], lo[part], weights)
            denominator = np.sqrt(second) + f32(scalars.scaled_eps)
            weights *= f32(decay_factor)
            weights -= (step_size * first) / denominator
        split(weights, hi_bits[part], lo[part])


def sum_squares(values: npt.NDArray[np.float32] | npt.NDArray[np.uint16]) -> float:
    """Sum of squares in float64, in the kernel's order: lanes within a block, then the blocks one after another."""
    return in_order(square_blocks(values, NORM_BLOCK_ELEMENTS))


def add(total: npt.NDArray[np.float32], values: npt.NDArray[np.float32]) -> float:
    """Add `values` to `total`, in place; returns the sum of squares of the result."""
    # The kernel reports no overflow or NaN either.
    with np.errstate(all="ignore"):
        total += values
    return sum_squares(total)


def square_blocks(
    values: npt.NDArray[np.float32] | npt.NDArray[np.uint16], block_elements: int
) -> npt.NDArray[np.float64]:
    """Sums of squares in float64, one for each started block."""
    sums = np.zeros(-(-len(values) // block_elements))
    for index in range(len(sums)):
        block = _widen(values[index * block_elements : (index + 1) * block_elements])
        rows = -(-len(block) // _NORM_LANES)
        squares = np.zeros(rows * _NORM_LANES)
        with np.errstate(invalid="ignore"):
            np.square(block, out=squares[: len(block)], dtype=np.float64)
            # An accumulation along the rows keeps their order; a plain sum would be free to pair them up.
            lanes = np.add.accumulate(squares.reshape(rows, _NORM_LANES), axis=0)[-1]
            while len(lanes) > 1:
                lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
        sums[index] = lanes[0]
    return sums


def in_order(sums: npt.NDArray[np.float64]) -> float:
    """The sum of these numbers, one after the other."""
    with np.errstate(invalid="ignore"):
        return float(np.add.accumulate(sums)[-1]) if len(sums) else 0.0


def _widen(values: npt.NDArray[np.float32] | npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    if values.dtype == np.float32:
        return values.view(np.float32)
    return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)

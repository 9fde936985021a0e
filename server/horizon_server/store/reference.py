"""The store's arithmetic in NumPy, on raw bits: the compiled kernel must give the same bits; runs where it is missing.

Split: `hi = (bits + 0x8000) >> 16` as uint16, `lo = int16(bits)`; merge: `(hi << 16) + lo` in integers. Rounding half
up is exactly invertible, where rounding half to even is not.

Compressed states: of the master, the nearest number whose last eight bits are zero, split as above into `hi` and an
int8 `lo`; of the moments, for each group of 32 elements

* the first, m, as int8: with x = m / scale, the code is 127 * 2x / (1 + |x|), as 254 * m / (scale + |m|);
* the root r of the second as uint8: 255 * r / scale; a root above 0 has a code of at least 1, so that no division is by
  less than a 255th of the group's largest root;
* two scales in bfloat16, the largest magnitude of each rounded up: in 16 bits the range of fp32, so that the result
  does not depend on how large gradients are.

Codes are rounded down, negative ones too, after `dither` was added: numbers from 0 to 1 that fill this range evenly
from step to step. To the nearest, a moment that changes by less than half a code in a step would never change: with
beta2 0.999 a root falls by a twentieth of a percent at most.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from horizon_server.store.native import Scalars

# Elements handled at once, which bounds the temporaries to a few MiB whatever the tensor's size.
CHUNK_ELEMENTS = 1 << 18
# Elements with a scale for each moment.
GROUP_ELEMENTS = 32
# Elements summed up by themselves; fixed, because it decides how a sum of squares is rounded.
NORM_BLOCK_ELEMENTS = 1 << 16

_NORM_LANES = 16
_LARGEST_MAGNITUDE = 0x7F7F7FFF
_INFINITY = 0x7F800000
_LARGEST_24 = 0x7F7F7F00
# In fp32 bits, 2^-100 and 2^100, which bound the scales of first moments, and 2^-76 and 2^63, those of roots: the
# square of 2^63 is finite.
_FIRST_SCALES = (0x0D800000, 0x71800000)
_ROOT_SCALES = (0x19800000, 0x5F000000)
_LARGEST_ROOT = np.float32(2.0**63)
# Twice the largest code of a first moment, less what roundings can add to a code: none is beyond the largest.
_FIRST_CODES = np.float32(254 * (1 - 2.0**-20))
# Fills a range evenly from number to number: 2^32 divided by the golden ratio (Knuth, TAOCP 6.4), odd.
_WEYL = 0x9E3779B1


Lows = npt.NDArray[np.int16] | npt.NDArray[np.int8]
"""The second half of masters: 16 bits, or the 8 beside compressed moments."""


def merge(hi_bits: npt.NDArray[np.uint16], lo: Lows, out: npt.NDArray[np.float32]) -> None:
    """Write the fp32 master of `hi` and `lo` into `out`."""
    out_bits = out.view(np.uint32)
    shift = np.uint32(16 - 8 * lo.itemsize)
    for start in range(0, len(out), CHUNK_ELEMENTS):
        part = slice(start, start + CHUNK_ELEMENTS)
        high = hi_bits[part].astype(np.uint32) << np.uint32(16)
        np.add(high, lo[part].astype(np.int32).view(np.uint32) << shift, out=out_bits[part])


def split(master: npt.NDArray[np.float32], hi_bits: npt.NDArray[np.uint16], lo: Lows) -> None:
    """Split the fp32 `master` into `hi` and `lo`; exact for Inf and every finite value up to the bound, where `lo` has
    16 bits, else rounded to the nearest."""
    master_bits = master.view(np.uint32)
    is_short = lo.dtype == np.int8
    largest = _LARGEST_24 if is_short else _LARGEST_MAGNITUDE
    for start in range(0, len(master), CHUNK_ELEMENTS):
        part = slice(start, start + CHUNK_ELEMENTS)
        magnitude = master_bits[part] & np.uint32(0x7FFFFFFF)
        # Two guards keep `hi`, which the device computes with, true. A finite value that would round to Inf (beyond
        # 3.396e38) saturates to the largest master whose `hi` is finite.
        finite = np.minimum(magnitude, np.uint32(largest))
        # A NaN keeps its sign and becomes the quiet NaN with `lo` 0: the carry could turn its payload into Inf or -0.
        special = np.where(magnitude == np.uint32(_INFINITY), np.uint32(_INFINITY), np.uint32(0x7FC00000))
        guarded = np.where(magnitude >= np.uint32(_INFINITY), special, finite)
        bits = master_bits[part] & np.uint32(0x80000000) | guarded
        if is_short:
            bits = bits + np.uint32(0x80) & np.uint32(0xFFFFFF00)
        hi_bits[part] = ((bits + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)
        low = (bits & np.uint32(0xFFFF)).astype(np.uint16).view(np.int16)
        lo[part] = low >> 8 if is_short else low


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


def dither_of(step: int) -> npt.NDArray[np.float32]:
    """What a step adds to codes before they are rounded down: for each element of a group a number above 0 and below 1
    for its first moment, and after these as many for the roots.

    Each follows the multiples of an irrational number from step to step, and so fills the range evenly. With 16 bits,
    it stays exact beside a code.
    """
    numbers = (np.arange(2 * GROUP_ELEMENTS, dtype=np.uint64) + np.uint64(2 * GROUP_ELEMENTS * step)) * np.uint64(_WEYL)
    high = ((numbers & np.uint64(0xFFFFFFFF)) >> np.uint64(17)).astype(np.float32)
    return (high + np.float32(0.5)) / np.float32(32768)


def decode_first(
    codes: npt.NDArray[np.int8], scales: npt.NDArray[np.uint16], *, times: float = 1.0
) -> npt.NDArray[np.float32]:
    """First moments of whole groups, `times` a number. Shapes: codes [G * 32], scales [G], bf16 as raw bits; returns
    [G * 32]."""
    code = codes.astype(np.float32)
    numbers: npt.NDArray[np.float32] = _of_groups(_widen(scales) * np.float32(times)) * code
    numbers /= np.float32(254) - np.abs(code)
    return numbers


def decode_root(codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Roots of second moments of whole groups. Shapes: as `decode_first`."""
    return _of_groups(_widen(scales) * (np.float32(1) / np.float32(255))) * codes.astype(np.float32)


def encode_first(
    first: npt.NDArray[np.float32],
    dither: npt.NDArray[np.float32],
    codes: npt.NDArray[np.int8],
    scales: npt.NDArray[np.uint16],
) -> None:
    """The codes and scales of first moments of whole groups. Shapes: first, codes [G * 32], dither [32], scales [G]."""
    scale = _scales(first, _FIRST_SCALES, scales)
    # Rounded to the nearest, half a code below.
    offsets = _per_group(dither - np.float32(0.5), first)
    codes[:] = np.rint((_FIRST_CODES * first) / (_of_groups(scale) + np.abs(first)) + offsets).astype(np.int8)


def encode_root(
    root: npt.NDArray[np.float32],
    dither: npt.NDArray[np.float32],
    codes: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.uint16],
    *,
    unit: float = 1.0,
) -> None:
    """The codes and scales of roots of second moments of whole groups, which come times `unit`. Shapes: as
    `encode_first`."""
    root = np.minimum(root, _LARGEST_ROOT)
    scale = _scales(root * (np.float32(1) / np.float32(unit)), _ROOT_SCALES, scales) * np.float32(unit)
    offsets = _per_group(dither - np.float32(0.5), root)
    steps = np.rint(root * _of_groups(np.float32(255) / scale) + offsets)
    above = np.maximum(steps, (root > 0).astype(np.float32))
    codes[:] = np.minimum(above, np.float32(255)).astype(np.uint8)


def adamw_compressed(
    hi_bits: npt.NDArray[np.uint16],
    lo: npt.NDArray[np.int8],
    first_codes: npt.NDArray[np.int8],
    root_codes: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.uint16],
    grads: npt.NDArray[np.float32] | npt.NDArray[np.uint16],
    decay_factor: float,
    step_scale: float,
    scalars: Scalars,
    dither: npt.NDArray[np.float32],
) -> None:
    """One AdamW update in place, of compressed states; otherwise as `adamw`.

    The update itself is made with the moments before they are rounded. A first moment is kept within `most_ratio` times
    the root of the second, as it is without rounding; so no update is larger than an exact one can be.

    Shapes: scales [2 * G], one of each moment for each started group of 32 elements; all others [N]. Source: FlashOptim
    for codes and groups.
    """
    f32 = np.float32
    step_size = f32(scalars.scaled_step_size) * f32(step_scale)
    for start in range(0, len(lo), CHUNK_ELEMENTS):
        stop = min(start + CHUNK_ELEMENTS, len(lo))
        part, groups = slice(start, stop), slice(2 * start // GROUP_ELEMENTS, 2 * -(-stop // GROUP_ELEMENTS))
        # Zeros after the end change nothing of the others.
        own_scales, size = scales[groups].reshape(-1, 2), stop - start
        codes, roots, wide = (_padded(values[part]) for values in (first_codes, root_codes, grads))
        with np.errstate(all="ignore"):
            wide_grads, scale = _widen(wide), f32(scalars.grad_scale)
            own = (f32(scalars.one_minus_beta1) * scale) * wide_grads
            # Roots are in a unit in which the gradient's part of the root is `own`, as that of the first moment.
            unit = f32(scalars.one_minus_beta1) / np.sqrt(f32(scalars.one_minus_beta2))
            root_step = _widen(own_scales[:, 1]) * ((np.sqrt(f32(scalars.beta2)) * (f32(1) / f32(255))) * unit)
            square = roots.astype(np.float32) ** 2
            root = np.sqrt(_of_groups(root_step * root_step) * square + own * own)
            root = np.where(root < _LARGEST_ROOT, root, _LARGEST_ROOT)
            first = decode_first(codes, own_scales[:, 0], times=scalars.beta1) + own
            magnitude, limit = np.abs(first), (f32(scalars.most_ratio) / unit) * root
            first = np.copysign(np.where(magnitude < limit, magnitude, limit), first)
            weights = np.empty(size, dtype=f32)
            merge(hi_bits[part], lo[part], weights)
            weights *= f32(decay_factor)
            weights -= (((step_size * unit) * first) / (root + f32(scalars.scaled_eps) * unit))[:size]
            split(weights, hi_bits[part], lo[part])
            encode_first(first, dither[:GROUP_ELEMENTS], codes, own_scales[:, 0])
            encode_root(root, dither[GROUP_ELEMENTS:], roots, own_scales[:, 1], unit=unit)
        first_codes[part], root_codes[part] = codes[:size], roots[:size]


def _scales(
    values: npt.NDArray[np.float32], bounds: tuple[int, int], out: npt.NDArray[np.uint16]
) -> npt.NDArray[np.float32]:
    """The scales of groups, in `out` as they are kept, which is 0 for a group of zeros."""
    least, most = bounds
    magnitudes = values.view(np.uint32).reshape(-1, GROUP_ELEMENTS) & np.uint32(0x7FFFFFFF)
    largest = np.minimum(magnitudes.max(axis=1), np.uint32(most))
    up = np.maximum(largest + np.uint32(0xFFFF) & np.uint32(0xFFFF0000), np.uint32(least))
    out[:] = np.where(largest > 0, up >> np.uint32(16), np.uint32(0)).astype(np.uint16)
    found: npt.NDArray[np.float32] = up.view(np.float32)
    return found


def _of_groups(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return np.repeat(values, GROUP_ELEMENTS)


def _per_group(values: npt.NDArray[np.float32], of: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return np.tile(values, len(of) // GROUP_ELEMENTS)


def _padded(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A copy of whole groups, with zeros after the end."""
    return np.pad(values, (0, -len(values) % GROUP_ELEMENTS))


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

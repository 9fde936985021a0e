"""The store's arithmetic in NumPy: the compiled kernel must give the same bits; runs where it is missing.

Owns the definition of the hi/lo split. Works on raw bits (`hi` as uint16, `lo` as int16) and knows neither torch nor
the store's layout.

Split: `hi = (bits + 0x8000) >> 16`, `lo = int16(bits)`; merge: `(hi << 16) + lo` in integers. Rounding half up is
exactly invertible, where rounding half to even is not. Two guards keep `hi`, which is what the device computes with,
honest:

* a NaN keeps its sign and becomes the quiet NaN 0x7fc0 with `lo` 0 (the carry could turn its payload into Inf or -0);
* a finite value that would round to Inf (beyond 3.396e38) saturates to the largest master whose `hi` is finite.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

CHUNK_ELEMENTS = 1 << 18
"""Elements handled at once, which bounds the temporaries to a few MiB whatever the tensor's size."""

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
    """Split the fp32 `master` into `hi` and `lo`; exact for Inf and for every finite value up to the saturation bound."""
    master_bits = master.view(np.uint32)
    for start in range(0, len(master), CHUNK_ELEMENTS):
        part = slice(start, start + CHUNK_ELEMENTS)
        bits = _guard(master_bits[part])
        hi_bits[part] = ((bits + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)
        lo[part] = (bits & np.uint32(0xFFFF)).astype(np.uint16).view(np.int16)


def _guard(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    sign = bits & np.uint32(0x80000000)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    finite = np.minimum(magnitude, np.uint32(_LARGEST_MAGNITUDE))
    special = np.where(magnitude == np.uint32(_INFINITY), np.uint32(_INFINITY), np.uint32(0x7FC00000))
    return sign | np.where(magnitude >= np.uint32(_INFINITY), special, finite)

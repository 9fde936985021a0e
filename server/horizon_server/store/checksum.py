"""The checksum of data on drives: one 64-bit number that finds what was torn, lost, or written to another place.

The compiled kernel and NumPy give the same number.

Thread: any; the GIL is released while the kernel works.
Source: Fletcher, "An arithmetic checksum for serial transmissions" (1982), in eight lanes of 64-bit words.
"""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import numpy.typing as npt

from horizon_server.store import native

_LANES = 8
ROW_BYTES = 8 * _LANES
_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def checksum(data: memoryview, *, place: int) -> int:
    """The checksum of `data`, a multiple of `ROW_BYTES` long and aligned to 8 bytes, at a place of its own. Never 0."""
    words = np.frombuffer(data, dtype=np.uint64)
    assert len(words) % _LANES == 0, "data on drives comes in whole rows"
    sums = np.zeros(2 * _LANES, dtype=np.uint64)
    if (kernel := _kernel()) is None:
        _reference(words, sums)
    else:
        kernel.hz_checksum(words.ctypes.data, len(words), sums.ctypes.data)
    found = place
    for value in (len(words), *sums.tolist()):
        found = ((found ^ value) * _MULTIPLIER) & _MASK
        found ^= found >> 29
    # 0 says that nothing was written yet.
    return found or 1


def _reference(words: npt.NDArray[np.uint64], sums: npt.NDArray[np.uint64]) -> None:
    rows = words.reshape(-1, _LANES)
    # Sums of integers wrap, as they do in the kernel.
    sums[:_LANES] = rows.sum(axis=0, dtype=np.uint64)
    weights = np.arange(len(rows), 0, -1, dtype=np.uint64)
    sums[_LANES:] = (rows * weights[:, None]).sum(axis=0, dtype=np.uint64)


@functools.cache
def _kernel() -> ctypes.CDLL | None:
    found, _ = native.find(native.CHECKSUM_SOURCE_FILE)
    if found is not None:
        found.hz_checksum.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
        found.hz_checksum.restype = None
    return found

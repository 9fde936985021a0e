"""Measures how fast memory, not a cache, feeds the optimizer: the AdamW kernel against a STREAM triad on the same
threads.

Source: McCalpin, STREAM: a = b + s * c counts 24 bytes per element, without the write-allocate traffic.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from horizon_server.store import native, planes
from horizon_server.store.layout import COMPRESSED_BYTES, EXACT_BYTES

TRIAD_BYTES_PER_ELEMENT = 24

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_TIMES_CACHE = 4
_SHARE_OF_MEMORY = 1 / 8
_FEWEST_PARAMETERS, _MOST_PARAMETERS = 1 << 24, 1 << 27
_KEPT_BYTES = EXACT_BYTES + 2
"""Of a parameter with a bf16 gradient: what the kernel's planes hold."""


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """Medians over rounds of runs. Units: bytes per second; `ratio` is the kernel's share of its own round's triad, and
    `compressed_ratio` how many parameters it updates with compressed states while it updates one with exact ones."""

    num_threads: int
    num_parameters: int
    grad_bytes: int
    adamw_bytes_per_s: float
    triad_bytes_per_s: float
    ratio: float
    compressed_ratio: float


def adamw_bytes_per_parameter(grad_bytes: int) -> int:
    """Memory traffic of one update: hi, lo and both moments read and written, the gradient read. 26 with bf16
    gradients."""
    return 2 * EXACT_BYTES + grad_bytes


def compressed_bytes_per_parameter(grad_bytes: int) -> float:
    """The same of a parameter whose states are compressed: 12.25 with bf16 gradients."""
    return 2 * COMPRESSED_BYTES + grad_bytes


def parameters_beyond_caches(caches: Path = _CACHES) -> int:
    """How many parameters make planes four times the largest cache, as STREAM wants it; fewer where memory is small."""
    sizes = []
    for file in caches.glob("index*/size"):
        # The kernel writes sizes as 307200K.
        size = file.read_text("ascii").strip()
        sizes.append(int(size.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(size[-1:], 0))
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    room = int(memory_bytes * _SHARE_OF_MEMORY / (_KEPT_BYTES + adamw_bytes_per_parameter(2)))
    wanted = _TIMES_CACHE * max(sizes, default=0) // _KEPT_BYTES
    return max(_FEWEST_PARAMETERS, min(wanted, room, _MOST_PARAMETERS))


def measure_bandwidth(
    *, num_threads: int, num_parameters: int | None = None, grad_bytes: int = 2, num_pairs: int = 7
) -> Bandwidth | None:
    """Time the kernel and the triad in turns over equally many bytes, and the kernel of compressed states over equally
    many parameters; None where the kernel is missing.

    Each round runs back to back, so that a machine shared with others slows all. Without a number of parameters,
    `parameters_beyond_caches`.
    """
    num_parameters = num_parameters or parameters_beyond_caches()
    kernel = native.library()
    if kernel is None:
        return None
    num_bytes = num_parameters * adamw_bytes_per_parameter(grad_bytes)
    num_elements = num_bytes // TRIAD_BYTES_PER_ELEMENT
    # The kernel runs on memory files, as in a real store; the triad on anonymous memory, as STREAM does.
    files = [_map_file(num_parameters * size) for size in (2, 2, 4, 4, grad_bytes)]
    touched = [
        _touch(mapping, num_threads) for mapping in (*files, *(mmap.mmap(-1, num_elements * 8) for _ in range(3)))
    ]
    addresses = [ctypes.addressof(first_byte) for first_byte in touched]
    segments = (native.Segment * 1)(native.Segment(0, num_parameters, 1.0, 1.0))
    scalars = native.Scalars(1.0, 0.9, 0.1, 0.999, 0.001, 1e-8, 1e-3, 7.3)

    hi, lo, exp_avg, exp_avg_sq, grads = addresses[:5]
    # In the memory of the exact states, which is larger: all of it is zeros, in either form.
    compressed = (hi, lo, exp_avg, exp_avg_sq, exp_avg + 2 * num_parameters, grads)
    dither = (ctypes.c_float * 64)()

    def seconds_of_round() -> tuple[float, float, float]:
        start = time.perf_counter()
        kernel.hz_adamw(*addresses[:5], grad_bytes == 2, segments, 1, scalars, num_threads)
        between = time.perf_counter()
        kernel.hz_triad(*addresses[5:], 3.0, num_elements, num_threads)
        last = time.perf_counter()
        kernel.hz_adamw_compressed(*compressed, grad_bytes == 2, segments, 1, scalars, dither, num_threads)
        return between - start, last - between, time.perf_counter() - last

    # The first round starts the threads and fills the translation tables.
    rounds = [seconds_of_round() for _ in range(1 + num_pairs)][1:]
    return Bandwidth(
        num_threads=num_threads,
        num_parameters=num_parameters,
        grad_bytes=grad_bytes,
        adamw_bytes_per_s=num_bytes / statistics.median(adamw_s for adamw_s, *_ in rounds),
        triad_bytes_per_s=num_bytes / statistics.median(triad_s for _, triad_s, _ in rounds),
        ratio=statistics.median(triad_s / adamw_s for adamw_s, triad_s, _ in rounds),
        compressed_ratio=statistics.median(adamw_s / compressed_s for adamw_s, _, compressed_s in rounds),
    )


def _map_file(num_bytes: int) -> mmap.mmap:
    descriptor = planes.create_memory_file("bandwidth", num_bytes)
    try:
        return planes.map_memory_file(descriptor, num_bytes)
    finally:
        os.close(descriptor)


def _touch(mapping: mmap.mmap, num_threads: int) -> ctypes.c_char:
    """Have the kernel provide the memory; its first byte, which keeps it mapped."""
    planes.advise_huge_pages(mapping)
    planes.touch(mapping, num_threads=num_threads)
    return ctypes.c_char.from_buffer(mapping)

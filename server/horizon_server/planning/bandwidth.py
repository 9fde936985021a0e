"""Measures how fast memory feeds the optimizer: the AdamW kernel against a STREAM triad on the same threads.

Owns what `horizond doctor` and bench/adamw.py print: the speed of memory, not of a cache. Torch-free. The kernel runs on memory files,
as in a real store; the triad on anonymous memory, as STREAM does.

Source: McCalpin, STREAM: a = b + s * c counts 24 bytes per element, without the write-allocate traffic.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from horizon_server.store import native, planes

TRIAD_BYTES_PER_ELEMENT = 24

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_TIMES_CACHE = 4
_SHARE_OF_MEMORY = 1 / 8
_FEWEST_PARAMETERS, _MOST_PARAMETERS = 1 << 24, 1 << 27
_KEPT_BYTES = 2 + 2 + 4 + 4 + 2
"""Of a parameter with a bf16 gradient: what the kernel's planes hold."""


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """Medians over pairs of runs. Units: bytes per second; `ratio` is the kernel's share of its own pair's triad."""

    num_threads: int
    num_parameters: int
    grad_bytes: int
    adamw_bytes_per_s: float
    triad_bytes_per_s: float
    ratio: float


def adamw_bytes_per_parameter(grad_bytes: int) -> int:
    """Memory traffic of one update: hi, lo and both moments read and written, the gradient read. 26 with bf16 gradients."""
    return 2 * (2 + 2 + 4 + 4) + grad_bytes


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
    """Time the kernel and the triad in turns over equally many bytes; None where the kernel is missing.

    Each pair runs back to back, so that a machine shared with others slows both. Without a number of parameters,
    `parameters_beyond_caches`.
    """
    num_parameters = num_parameters or parameters_beyond_caches()
    kernel = native.library()
    if kernel is None:
        return None
    num_bytes = num_parameters * adamw_bytes_per_parameter(grad_bytes)
    adamw = _adamw_run(kernel, num_parameters, grad_bytes, num_threads)
    triad = _triad_run(kernel, num_bytes // TRIAD_BYTES_PER_ELEMENT, num_threads)
    adamw()
    triad()
    pairs = [(_seconds(adamw), _seconds(triad)) for _ in range(num_pairs)]
    return Bandwidth(
        num_threads=num_threads,
        num_parameters=num_parameters,
        grad_bytes=grad_bytes,
        adamw_bytes_per_s=num_bytes / statistics.median(adamw_s for adamw_s, _ in pairs),
        triad_bytes_per_s=num_bytes / statistics.median(triad_s for _, triad_s in pairs),
        ratio=statistics.median(triad_s / adamw_s for adamw_s, triad_s in pairs),
    )


def _adamw_run(kernel: ctypes.CDLL, num_parameters: int, grad_bytes: int, num_threads: int) -> Callable[[], None]:
    buffers = [_Buffer.on_memory_file(num_parameters * size, num_threads) for size in (2, 2, 4, 4, grad_bytes)]
    segments = (native.Segment * 1)(native.Segment(0, num_parameters, 1.0))
    scalars = native.Scalars(1.0, 0.9, 0.1, 0.999, 0.001, 1e-8, 1e-3)

    def run() -> None:
        addresses = [buffer.address for buffer in buffers]
        kernel.hz_adamw(*addresses, grad_bytes == 2, segments, 1, scalars, num_threads)

    return run


def _triad_run(kernel: ctypes.CDLL, num_elements: int, num_threads: int) -> Callable[[], None]:
    buffers = [_Buffer(mmap.mmap(-1, num_elements * 8), num_threads) for _ in range(3)]

    def run() -> None:
        kernel.hz_triad(*(buffer.address for buffer in buffers), 3.0, num_elements, num_threads)

    return run


def _seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


class _Buffer:
    """Touched memory and its address, for as long as the object lives."""

    def __init__(self, mapping: mmap.mmap, num_threads: int) -> None:
        planes.advise_huge_pages(mapping)
        planes.touch(mapping, num_threads=num_threads)
        self._anchor = ctypes.c_char.from_buffer(mapping)
        self.address = ctypes.addressof(self._anchor)

    @classmethod
    def on_memory_file(cls, size_bytes: int, num_threads: int) -> _Buffer:
        fd = planes.create_memory_file("bandwidth", size_bytes)
        try:
            return cls(planes.map_memory_file(fd, size_bytes), num_threads)
        finally:
            os.close(fd)

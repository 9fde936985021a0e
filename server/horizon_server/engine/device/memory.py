"""A device's memory: accounts by component with a limit, host memory that it copies from and to, and what of that is
pinned.

Units: bytes, unless a name says elements. Shapes: R = rows of a table that are used, D = hidden size, V = vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from mmap import mmap
from typing import Any

import torch
from torch import Tensor

from horizon_server import progress
from horizon_server.engine.device.cuda_runtime import Mark, Runtime
from horizon_server.errors import DoesNotFit
from horizon_server.store import planes

# Drivers refuse to register very much at once: 512 GiB is too much for some, 64 GiB for none that we know of.
MAX_PIECE_BYTES = 64 << 30

STAGING_BYTES = 32 << 20


class Arena:
    """Allocations by component under one limit, on a torch device. `limit_bytes` None means unbounded. Thread: safe
    from any."""

    def __init__(self, *, limit_bytes: int | None, device: torch.device | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._device = device or torch.device("cpu")
        self._held: dict[str, int] = {}
        self._peak: dict[str, int] = {}
        self._peak_total = 0
        self._blocks: dict[int, tuple[str, int]] = {}
        # Compute's thread charges workspace while the driving thread allocates.
        self._lock = threading.Lock()

    def allocate(self, component: str, num_elements: int, dtype: torch.dtype) -> Tensor:
        """A flat, uninitialised tensor.

        Raises:
            DoesNotFit: the limit would be exceeded.
        """
        # It would have no address to find it by, and the kernel maps no empty range: a model of one layer has nothing
        # to offload.
        if num_elements == 0:
            return torch.empty(0, dtype=dtype, device=self._device)
        num_bytes = num_elements * dtype.itemsize
        # Before the memory is taken: a limit that is below what the machine has must bind first.
        self.charge(component, num_bytes)
        tensor = self._provide(num_elements, dtype)
        self._note(tensor, component, num_bytes)
        return tensor

    def _provide(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_elements, dtype=dtype, device=self._device)

    def _note(self, tensor: Tensor, component: str, num_bytes: int) -> None:
        with self._lock:
            self._blocks[tensor.untyped_storage().data_ptr()] = (component, num_bytes)

    def free(self, tensor: Tensor) -> None:
        """Take an allocation off the account; the caller drops the tensor."""
        if tensor.numel() == 0:
            return
        with self._lock:
            component, num_bytes = self._blocks.pop(tensor.untyped_storage().data_ptr())
        self.charge(component, -num_bytes)

    def owns(self, tensor: Tensor) -> bool:
        """Whether the tensor is a view into an allocation of this arena."""
        return tensor.untyped_storage().data_ptr() in self._blocks

    def charge(self, component: str, num_bytes: int) -> None:
        """Add to a component's account; negative releases.

        Raises:
            DoesNotFit: the limit would be exceeded.
        """
        with self._lock:
            held_total = sum(self._held.values())
            if num_bytes > 0 and self._limit_bytes is not None and held_total + num_bytes > self._limit_bytes:
                held = ", ".join(f"{name} {size:,}" for name, size in sorted(self._held.items()) if size)
                raise DoesNotFit(
                    f"device memory: {component} needs {num_bytes:,} bytes more, but {held_total:,} of the limit of "
                    f"{self._limit_bytes:,} bytes are in use ({held or 'nothing'}); lower tokens_per_step or "
                    "sequence_length, "
                    "or raise the device's memory limit"
                )
            self._held[component] = self._held.get(component, 0) + num_bytes
            self._peak[component] = max(self._peak.get(component, 0), self._held[component])
            # Of the sum: components have their peaks at different moments.
            self._peak_total = max(self._peak_total, held_total + num_bytes)

    def held_bytes(self) -> Mapping[str, int]:
        """What each component holds now."""
        with self._lock:
            return dict(self._held)

    def peak_bytes(self) -> Mapping[str, int]:
        """The most each component has held."""
        with self._lock:
            return dict(self._peak)

    @property
    def peak_total_bytes(self) -> int:
        """The most that was held at one moment."""
        return self._peak_total


class HostBuffers(Arena):
    """Page-aligned blocks of zeros, provided by the kernel at once and in parallel: nothing faults in the middle of a
    step."""

    def __init__(self, *, num_threads: int) -> None:
        super().__init__(limit_bytes=None)
        self._num_threads = num_threads

    def _provide(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        mapping = planes.map_anonymous(num_elements * dtype.itemsize)
        planes.touch(mapping, num_threads=self._num_threads)
        # The tensor keeps the mapping alive; the last view to go unmaps it.
        return torch.frombuffer(mapping, dtype=dtype, count=num_elements)

    def share(self, component: str, memory: mmap, dtype: torch.dtype, *, is_counted: bool) -> Tensor:
        """A flat tensor in memory that other processes map as well; on the account where it `is_counted`."""
        counted_bytes = len(memory) if is_counted else 0
        self.charge(component, counted_bytes)
        planes.touch(memory, num_threads=self._num_threads)
        tensor = torch.frombuffer(memory, dtype=dtype)
        self._note(tensor, component, counted_bytes)
        return tensor


class PinnedRanges:
    """Host memory registered with the driver, piece by piece. Thread: one changes it; any may ask."""

    def __init__(self, runtime: Runtime, *, max_piece_bytes: int = MAX_PIECE_BYTES) -> None:
        self._runtime, self._max_piece_bytes = runtime, max_piece_bytes
        # First and last address, with the memory: were it unmapped first, the driver would continue to copy from the
        # old pages.
        self._pieces: list[tuple[int, int, Tensor]] = []
        self.refusals: list[str] = []

    def add(self, memory: Tensor, *, cuts: Sequence[int]) -> None:
        """Register a flat tensor. No copy crosses an element of `cuts`, so a piece may end at any of them.

        A refusal is noted, not raised: what is not registered is copied through a staging ring.
        """
        item_bytes, base = memory.element_size(), memory.data_ptr()
        for start, stop in split_at(cuts, max_size=self._max_piece_bytes // item_bytes):
            address, num_bytes = base + start * item_bytes, (stop - start) * item_bytes
            # A store may be adopted twice, and drivers refuse to register the same pages again.
            if self.holds(memory[start:stop]):
                continue
            progress.advance()
            code = self._runtime.register(address, num_bytes)
            if code == 0:
                self._pieces.append((address, address + num_bytes, memory))
            else:
                # Which of the reasons it is, the driver does not say: cudaHostRegister reports most of them as one
                # code.
                self.refusals.append(
                    f"the driver refused to pin {num_bytes / 2**30:.2f} GiB of host memory (CUDA error {code}); copies "
                    "from and to it "
                    "take a detour and are slower; the usual reasons are too little free host memory (free some, or "
                    "lower tokens_per_step), WSL, which pins only part of it, or a container or unit with a memory "
                    "lock limit (ulimit -l)"
                )

    def remove(self, memory: Tensor) -> None:
        """Unregister a tensor's memory."""
        start, stop = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        for address, _, _ in self._pieces:
            if start <= address < stop:
                self._runtime.unregister(address)
        # A new list, because a queue's thread may be reading this one.
        self._pieces = [piece for piece in self._pieces if not start <= piece[0] < stop]

    def holds(self, tensor: Tensor) -> bool:
        """Whether one piece holds all of a contiguous tensor."""
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(first <= start and stop <= last for first, last, _ in self._pieces)

    def clear(self) -> None:
        """Unregister everything."""
        for address, _, _ in self._pieces:
            self._runtime.unregister(address)
        self._pieces = []


def split_at(cuts: Sequence[int], *, max_size: int) -> list[tuple[int, int]]:
    """Whole stretches between ascending cuts, joined as long as they stay within `max_size`; a longer one stays
    whole."""
    pieces: list[tuple[int, int]] = []
    start = cuts[0]
    for stop, next_stop in zip(cuts, [*cuts[1:], None], strict=True):
        if stop > start and (next_stop is None or next_stop - start > max_size):
            pieces.append((start, stop))
            start = stop
    return pieces


class StagingRing:
    """Two pinned pieces of memory in turn: one is filled or emptied by the host while the other is copied.

    Thread: the thread of the queue whose stream it is given; it blocks only that thread.
    """

    def __init__(self, runtime: Runtime, stream: Any, *, num_bytes: int = STAGING_BYTES) -> None:
        self._stream = stream
        self._buffers: list[tuple[Tensor, Mark]] = [(runtime.pinned(num_bytes), runtime.new_mark()) for _ in range(2)]
        self._next = 0

    def upload(self, source: Tensor, out: Tensor) -> None:
        """Copy flat host memory to the device, equal dtypes."""
        for start, view, mark in self._pieces(out):
            view.copy_(source[start : start + view.numel()])
            out[start : start + view.numel()].copy_(view, non_blocking=True)
            mark.record(self._stream)

    def upload_rows(self, table_VD: Tensor, rows_R: Tensor, out_RD: Tensor) -> None:
        """Gather rows of a host table on their way to the device."""
        width, out = out_RD.shape[1], out_RD.view(-1)
        for start, view, mark in self._pieces(out, multiple_of=width):
            rows = rows_R[start // width : (start + view.numel()) // width]
            torch.index_select(table_VD, 0, rows, out=view.view(-1, width))
            out[start : start + view.numel()].copy_(view, non_blocking=True)
            mark.record(self._stream)

    def download(self, source: Tensor, dtype: torch.dtype, land: Callable[[int, Tensor], None]) -> None:
        """Copy flat device memory to the host as `dtype` and hand it over, piece by piece: first element, values."""
        waiting: tuple[int, Tensor, Mark] | None = None

        def hand_over() -> None:
            if waiting is not None:
                start, values, mark = waiting
                mark.synchronize()
                land(start, values)

        for start, view, mark in self._pieces(source, dtype=dtype):
            view.copy_(source[start : start + view.numel()].to(dtype), non_blocking=True)
            mark.record(self._stream)
            # One piece late, so that the host empties one buffer while the next copy is under way.
            hand_over()
            waiting = (start, view, mark)
        hand_over()

    def _pieces(
        self, flat: Tensor, *, dtype: torch.dtype | None = None, multiple_of: int = 1
    ) -> Iterator[tuple[int, Tensor, Mark]]:
        """First element, staging memory as long as the piece, and its mark; the memory's last copy is over."""
        start = 0
        while start < flat.numel():
            raw, mark = self._buffers[self._next]
            self._next = 1 - self._next
            buffer = raw.view(dtype or flat.dtype)
            size = min(buffer.numel() // multiple_of * multiple_of, flat.numel() - start)
            assert size > 0, "a row is smaller than the staging ring"
            # Its last copy may still read or write it; a mark that was never recorded does not block.
            mark.synchronize()
            yield start, buffer[:size], mark
            start += size

"""Which host memory the device copies from and to directly, and the detour for what it does not.

Owns the registered ranges and the staging ring.

Units: bytes, unless a name says elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from horizon_server.engine.device.cuda_runtime import Mark, Runtime

MAX_PIECE_BYTES = 64 << 30
"""Drivers refuse to register very much at once: 512 GiB is too much for some, 64 GiB for none that we know of."""

STAGING_BYTES = 32 << 20


class PinnedRanges:
    """Host memory registered with the driver, piece by piece. Thread: one changes it; any may ask.

    It keeps what it registered: were memory unmapped before, the driver would continue to copy from the old pages.
    """

    def __init__(self, runtime: Runtime, *, max_piece_bytes: int = MAX_PIECE_BYTES) -> None:
        self._runtime, self._max_piece_bytes = runtime, max_piece_bytes
        self._pieces: list[tuple[int, int]] = []
        self._kept: dict[int, Tensor] = {}
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
            code = self._runtime.register(address, num_bytes)
            if code == 0:
                self._pieces.append((address, address + num_bytes))
                self._kept[address] = memory
            else:
                self.refusals.append(
                    f"the driver refused to pin {num_bytes / 2**30:.2f} GiB of host memory (CUDA error {code}); copies from and to "
                    "it take a detour and are slower; raise the memory lock limit (ulimit -l), if there is one"
                )

    def remove(self, memory: Tensor) -> None:
        """Unregister a tensor's memory."""
        start, stop = memory.data_ptr(), memory.data_ptr() + memory.numel() * memory.element_size()
        for piece in [piece for piece in self._pieces if start <= piece[0] < stop]:
            self._runtime.unregister(piece[0])
            self._pieces.remove(piece)
            del self._kept[piece[0]]

    def holds(self, tensor: Tensor) -> bool:
        """Whether one piece holds all of a contiguous tensor."""
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
        return any(first <= start and stop <= last for first, last in self._pieces)

    def clear(self) -> None:
        """Unregister everything."""
        for address, _ in self._pieces:
            self._runtime.unregister(address)
        self._pieces.clear()
        self._kept.clear()


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
        for start, buffer, mark in self._pieces(out):
            view = buffer[: min(buffer.numel(), out.numel() - start)]
            view.copy_(source[start : start + view.numel()])
            out[start : start + view.numel()].copy_(view, non_blocking=True)
            mark.record(self._stream)

    def upload_rows(self, table_VD: Tensor, rows_R: Tensor, out_RD: Tensor) -> None:
        """Gather rows of a host table on their way to the device."""
        width, out = out_RD.shape[1], out_RD.view(-1)
        for start, buffer, mark in self._pieces(out, multiple_of=width):
            rows = rows_R[start // width : (start + buffer.numel()) // width]
            view = buffer[: rows.numel() * width]
            torch.index_select(table_VD, 0, rows, out=view.view(-1, width))
            out[start : start + view.numel()].copy_(view, non_blocking=True)
            mark.record(self._stream)

    def download(
        self, source: Tensor, dtype: torch.dtype, land: Callable[[int, Tensor], None], *, multiple_of: int = 1
    ) -> None:
        """Copy flat device memory to the host as `dtype` and hand it over, piece by piece: first element, values."""
        waiting: tuple[int, Tensor, Mark] | None = None
        for start, buffer, mark in self._pieces(source, dtype=dtype, multiple_of=multiple_of):
            view = buffer[: min(buffer.numel(), source.numel() - start)]
            view.copy_(source[start : start + view.numel()].to(dtype), non_blocking=True)
            mark.record(self._stream)
            # One piece late, so that the host empties one buffer while the next copy is under way.
            _hand_over(waiting, land)
            waiting = (start, view, mark)
        _hand_over(waiting, land)

    def _pieces(
        self, flat: Tensor, *, dtype: torch.dtype | None = None, multiple_of: int = 1
    ) -> Iterator[tuple[int, Tensor, Mark]]:
        """First element, buffer and mark of each piece; the buffer's last copy is over."""
        start = 0
        while start < flat.numel():
            raw, mark = self._buffers[self._next]
            self._next = 1 - self._next
            buffer = raw.view(dtype or flat.dtype)
            size = buffer.numel() // multiple_of * multiple_of
            assert size > 0, "a row is smaller than the staging ring"
            # Its last copy may still read or write it; a mark that was never recorded does not block.
            mark.synchronize()
            yield start, buffer[:size], mark
            start += size


def split_at(cuts: Sequence[int], *, max_size: int) -> list[tuple[int, int]]:
    """Whole stretches between ascending cuts, joined as long as they stay within `max_size`; a longer one stays whole."""
    pieces: list[tuple[int, int]] = []
    start = stop = cuts[0]
    for cut in cuts[1:]:
        if cut - start > max_size and stop > start:
            pieces.append((start, stop))
            start = stop
        stop = cut
    return [*pieces, (start, stop)] if stop > start else pieces


def _hand_over(landed: tuple[int, Tensor, Mark] | None, land: Callable[[int, Tensor], None]) -> None:
    if landed is None:
        return
    start, values, mark = landed
    mark.synchronize()
    land(start, values)

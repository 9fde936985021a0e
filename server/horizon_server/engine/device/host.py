"""The host device: a CPU in the place of a GPU, with real queues, real copies and a bounded arena.

Shapes: R = rows of a table that are used, D = hidden size, V = vocabulary.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Unpack

import torch
from torch import Tensor

from horizon_server.engine.device.memory import Arena, HostBuffers
from horizon_server.engine.device.protocol import Queue, Work
from horizon_server.engine.device.queued_device import HostQueue, QueuedDevice, Switches
from horizon_server.engine.device.span_copies import SpanCopies
from horizon_server.engine.device.timeline import HOPS
from horizon_server.records.execution import DeviceKind
from horizon_server.store.adamw import square_blocks, sum_squares
from horizon_server.store.cpus import available_cpus
from horizon_server.store.host_store import HostStore
from horizon_server.store.packed_pieces import copied_bytes
from horizon_server.store.packing import unpack
from horizon_server.store.pages import Span

_GATHER_ROWS = 4096


class HostDevice(QueuedDevice):
    """Trains on a CPU-only machine and makes the schedule testable: in fp32, or in bf16 exactly as a cuda device does.

    `link_bytes_per_s` emulates a link of that speed in each direction, over which the copies of two queues go one after
    the other. `num_threads` is compute's intra-op threads: the CPUs this process may use, unless given. Results do not
    depend on any option but this one and `compute_dtype`.
    """

    name: DeviceKind = "host"

    def __init__(
        self,
        *,
        compute_dtype: torch.dtype = torch.float32,
        limit_bytes: int | None = None,
        link_bytes_per_s: float | None = None,
        num_threads: int | None = None,
        **switches: Unpack[Switches],
    ) -> None:
        assert compute_dtype in (torch.float32, torch.bfloat16)
        # The dtype that gradients leave in is the same: fp32 for exactness, else what crosses a cuda device's link.
        self.compute_dtype = self.gradient_dtype = compute_dtype
        num_threads = num_threads or available_cpus()
        host_buffers = HostBuffers(num_threads=num_threads)
        super().__init__(arena=Arena(limit_bytes=limit_bytes), host_buffers=host_buffers, **switches)
        self._link_bytes_per_s = link_bytes_per_s
        up, down = threading.Lock(), threading.Lock()
        self._links = {"h2d": up, HOPS[0]: up, "d2h": down, HOPS[1]: down}
        self._workspace_bytes: dict[Hashable, int] = {}
        # First, because OpenMP's own threads take the count that any thread has set last. Theirs must stay 1, or a
        # product inside attention would be summed in another order once torch has given them a count.
        self.compute = HostQueue("compute", self._group, num_threads=num_threads)
        self.h2d, self.d2h = self._new_queue("h2d"), self._new_queue("d2h")

    def _new_queue(self, name: str) -> HostQueue:
        return HostQueue(name, self._group, num_threads=1)

    @property
    def generator(self) -> torch.Generator:
        return torch.default_generator

    def adopt(self, store: HostStore, states: Collection[int] = (), *, page_elements: int = 0) -> None:
        """Nothing to prepare: it copies from any memory."""

    @contextmanager
    def workspace(self, key: Hashable) -> Iterator[None]:
        """The first block of a key is measured, later ones are charged what it kept."""
        known_bytes = self._workspace_bytes.get(key)
        if known_bytes is not None:
            self.arena.charge("workspace", known_bytes)
            try:
                yield
            finally:
                self.arena.charge("workspace", -known_bytes)
            return
        kept_bytes: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            # Views into the arena are on its account already.
            if not self.arena.owns(tensor):
                storage = tensor.untyped_storage()
                kept_bytes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            yield
        num_bytes = sum(kept_bytes.values())
        self._workspace_bytes[key] = num_bytes
        # Charged and released at once, because the block is over: it counts for the peak and the limit.
        self.arena.charge("workspace", num_bytes)
        self.arena.charge("workspace", -num_bytes)

    def place(self, tensor: Tensor) -> Tensor:
        """Compute reads host memory."""
        return tensor

    def upload_unit(
        self,
        store: HostStore,
        index: int,
        out: Tensor,
        *,
        only_trained: bool = False,
        parts: Sequence[slice] | None = None,
        packed: Tensor | None = None,
    ) -> None:
        """In fp32 both halves of the master cross the link, 4 bytes a parameter; in bf16 the high one alone. Packed
        tensors cross it as they are.
        """
        unit = store.layout.units[index]
        whole = [slice(0, unit.trained_elements if only_trained else unit.unpacked_elements)]
        copied = whole if parts is None else parts
        num_bytes = sum(out[part].nbytes for part in copied)
        if unit.packed_bytes and packed is None and not only_trained:
            packed = store.unit(index, "packed")
            num_bytes += packed.nbytes
        block = None if only_trained else packed

        def copy() -> None:
            with self._link("h2d", num_bytes):
                for part in copied:
                    if out.dtype is torch.float32:
                        store.merge_part(index, part, out[part])
                    else:
                        out[part].copy_(store.unit(index, "hi")[part])
            # Off the link's time: a GPU unpacks at the speed of its own memory.
            if block is not None:
                store.unpack(index, block, out)

        self.h2d.submit(copy, num_bytes=num_bytes, label=f"unit {index}")

    def upload_spans(self, store: HostStore, index: int, spans: Sequence[Span], out: Tensor) -> None:
        """4 bytes a parameter in fp32 and 2 in bf16, and packed ones as they are, as a unit."""
        copies = SpanCopies.of(store.layout.units[index], spans, out)
        num_bytes = copied_bytes(copies.pieces) + sum(target.nbytes for _, target in copies.plain)

        def copy() -> None:
            with self._link("h2d", num_bytes):
                for part, target in copies.plain:
                    if out.dtype is torch.float32:
                        store.merge_part(index, part, target)
                    else:
                        target.copy_(store.unit(index, "hi")[part])
            # Off the link's time, as of a unit.
            for piece, target in zip(copies.pieces, copies.unpacked, strict=True):
                block = store.unit(index, "packed")
                unpack(piece.place, block, piece.source, target, first_block=piece.first_block)

        self.h2d.submit(copy, num_bytes=num_bytes, label=f"part of unit {index}")

    def upload_packed(self, store: HostStore, index: int, out: Tensor) -> None:
        self._copy(self.h2d, store.unit(index, "packed"), out, label=f"packed weights of unit {index}")

    def upload_exact(self, store: HostStore, index: int, read: Callable[[Tensor], Tensor], out: Tensor) -> None:
        def copy() -> None:
            with self._link("h2d", out.nbytes):
                out.copy_(store.exact(index, read).view(-1))

        self.h2d.submit(copy, num_bytes=out.nbytes, label=f"fp32 parameters of unit {index}")

    def upload_rows(self, store: HostStore, name: str, rows_R: Tensor, out_RD: Tensor) -> None:
        def copy() -> None:
            with self._link("h2d", out_RD.nbytes):
                if out_RD.dtype is not torch.float32:
                    torch.index_select(store.tensor(name, "hi"), 0, rows_R, out=out_RD)
                    return
                # In parts, because the merge makes several temporary copies of the rows.
                for start in range(0, rows_R.numel(), _GATHER_ROWS):
                    rows = rows_R[start : start + _GATHER_ROWS]
                    out_RD[start : start + _GATHER_ROWS].copy_(store.exact_rows(name, rows))

        self.h2d.submit(copy, num_bytes=out_RD.nbytes, label=f"rows of {name}")

    def gather_rows(self, table_VD: Tensor, rows_R: Tensor, out_RD: Tensor) -> None:
        self.h2d.submit(partial(torch.index_select, table_VD, 0, rows_R, out=out_RD), label="rows on the device")

    def upload(self, source: Tensor, out: Tensor, *, label: str = "layer input", queue: Queue | None = None) -> None:
        self._copy(queue or self.h2d, source, out, label=label)

    def download(
        self, source: Tensor, target: Tensor, *, label: str = "layer input", queue: Queue | None = None
    ) -> None:
        self._copy(queue or self.d2h, source, target, label=label)

    def square_blocks(self, values: Tensor, block_elements: int, out: Tensor) -> None:
        out.copy_(square_blocks(values, block_elements))

    def read_back(self, source: Tensor, target: Tensor) -> None:
        self.d2h.submit(partial(target.copy_, source), label="loss")

    def download_unit(self, gradient: Tensor, target: Tensor, square_sum: Tensor, *, label: str = "") -> None:
        def copy() -> None:
            with self._link("d2h", target.nbytes):
                target.copy_(gradient.view(-1))
            # Off the link's time: a GPU takes the sum before it copies, at the speed of its own memory.
            square_sum.fill_(sum_squares(gradient.view(-1)).value)

        self.d2h.submit(copy, num_bytes=target.nbytes, label=label)

    def keep_gradient(self, gradient: Tensor, target: Tensor, square_sum: Tensor | None, *, label: str = "") -> None:
        def keep() -> None:
            target.copy_(gradient.view(-1))
            if square_sum is not None:
                square_sum.fill_(sum_squares(gradient.view(-1)).value)

        self.d2h.submit(keep, label=label)

    def run(self, work: Work) -> None:
        work()

    def _copy(self, queue: Queue, source: Tensor, target: Tensor, *, label: str = "layer input") -> None:
        def copy() -> None:
            with self._link(queue.name, target.nbytes):
                target.copy_(source)

        queue.submit(copy, num_bytes=target.nbytes, label=label)

    def release_memory(self) -> None:
        """It holds nothing of its own."""

    @contextmanager
    def _link(self, queue: str, num_bytes: int) -> Iterator[None]:
        if self._link_bytes_per_s is None:
            yield
            return
        with self._links[queue]:
            start_s = time.perf_counter()
            yield
            # The copy's own time counts too, or the emulated link would be slower than asked for.
            left_s = num_bytes / self._link_bytes_per_s - (time.perf_counter() - start_s)
            if left_s > 0:
                time.sleep(left_s)

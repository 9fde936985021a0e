"""The host device: a CPU-only machine doing what a GPU does, with real queues, real copies and a bounded arena.

Owns the exact fp32 copy-in (hi + lo merged), the copy-out of gradients with their norms, link emulation and the debug switches.
Must not know models or the schedule.

Shapes: R = rows of a table that are used, D = hidden size, V = vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from horizon_server.engine.device.arena import Arena
from horizon_server.engine.device.host_queue import Failure, HostQueue
from horizon_server.engine.device.protocol import Component, DeviceUse, Queue
from horizon_server.engine.device.timeline import summarise
from horizon_server.store.adamw import sum_squares
from horizon_server.store.cpus import available_cpus
from horizon_server.store.host_store import HostStore

_GATHER_ROWS = 4096


class HostDevice:
    """Trains in earnest on a CPU-only machine, in fp32, and makes the schedule testable.

    `link_bytes_per_s` emulates a link of that speed in each direction. `num_threads` is compute's intra-op threads: the CPUs this
    process may use, unless given. `poison_on_free` fills freed slots with NaN; `max_delay_s` delays every piece of work at random.
    Results do not depend on any of these but `num_threads`.
    """

    name = "host"
    compute_dtype = torch.float32

    def __init__(
        self,
        *,
        limit_bytes: int | None = None,
        link_bytes_per_s: float | None = None,
        num_threads: int | None = None,
        poison_on_free: bool = False,
        max_delay_s: float = 0.0,
        delay_seed: int = 0,
    ) -> None:
        self.arena = Arena(limit_bytes=limit_bytes)
        self._link_bytes_per_s = link_bytes_per_s
        self._poison_on_free = poison_on_free
        self._max_delay_s = max_delay_s
        self._delay_seed = delay_seed
        self._failure = Failure()
        self._workspace_bytes: dict[Hashable, int] = {}
        self._host_queues: list[HostQueue] = []
        self.h2d = self._queue("h2d", num_threads=1)
        self.d2h = self._queue("d2h", num_threads=1)
        # Last, because MKL has one thread count for the whole process: the one that was set last.
        self.compute = self._queue("compute", num_threads=num_threads or available_cpus())

    def allocate(self, component: Component, num_elements: int, dtype: torch.dtype) -> Tensor:
        """See `Device.allocate`."""
        tensor = self.arena.allocate(component, num_elements, dtype)
        if self._poison_on_free:
            tensor.fill_(torch.nan)
        return tensor

    def free(self, tensor: Tensor) -> None:
        """See `Device.free`."""
        if self._poison_on_free:
            tensor.fill_(torch.nan)
        self.arena.free(tensor)

    def charge(self, component: Component, num_bytes: int) -> None:
        """See `Device.charge`."""
        self.arena.charge(component, num_bytes)

    @contextmanager
    def workspace(self, key: Hashable) -> Iterator[None]:
        """See `Device.workspace`. The first block of a key is measured, later ones are charged what it kept."""
        known_bytes = self._workspace_bytes.get(key)
        if known_bytes is None:
            with self._measured_workspace(key):
                yield
            return
        self.arena.charge("workspace", known_bytes)
        try:
            yield
        finally:
            self.arena.charge("workspace", -known_bytes)

    def place(self, tensor: Tensor) -> Tensor:
        """See `Device.place`: compute reads host memory."""
        return tensor

    def upload_unit(self, store: HostStore, index: int, out: Tensor) -> None:
        """See `Device.upload_unit`. Both halves of the master cross the link: 4 bytes a parameter."""
        num_bytes = out.numel() * 4

        def copy() -> None:
            with self._link(num_bytes):
                store.merge_master(index, out)

        self.h2d.submit(copy, num_bytes=num_bytes)

    def upload_rows(self, store: HostStore, name: str, rows_R: Tensor, out_RD: Tensor) -> None:
        """See `Device.upload_rows`."""
        num_bytes = out_RD.numel() * 4

        def copy() -> None:
            with self._link(num_bytes):
                hi_VD, lo_VD = store.tensor(name, "hi"), store.tensor(name, "lo")
                for start in range(0, rows_R.numel(), _GATHER_ROWS):
                    rows = rows_R[start : start + _GATHER_ROWS]
                    bits = (hi_VD[rows].view(torch.int16).int() << 16) + lo_VD[rows].int()
                    out_RD[start : start + _GATHER_ROWS].copy_(bits.view(torch.float32))

        self.h2d.submit(copy, num_bytes=num_bytes)

    def download_unit(self, gradient: Tensor, store: HostStore, index: int, square_sum: Tensor | None) -> None:
        """See `Device.download_unit`."""
        target = store.unit(index, "grad")
        num_bytes = target.numel() * target.element_size()

        def copy() -> None:
            with self._link(num_bytes):
                target.copy_(gradient)
            if square_sum is not None:
                square_sum.fill_(sum_squares(gradient).value)

        self.d2h.submit(copy, num_bytes=num_bytes)

    def download_rows(
        self, gradient_RD: Tensor, store: HostStore, name: str, rows_R: Tensor, square_sum: Tensor, *, add: bool
    ) -> None:
        """See `Device.download_rows`. The whole table's squares are summed on the host, where the two parts meet."""
        unit, _ = store.layout.find(name)
        table_VD = store.tensor(name, "grad")
        num_bytes = gradient_RD.numel() * table_VD.element_size()

        def copy() -> None:
            with self._link(num_bytes):
                if add:
                    table_VD[rows_R] = (table_VD[rows_R].float() + gradient_RD).to(table_VD.dtype)
                else:
                    store.unit(unit.index, "grad").zero_()
                    table_VD[rows_R] = gradient_RD.to(table_VD.dtype)
            square_sum.fill_(sum_squares(store.unit(unit.index, "grad")).value)

        self.d2h.submit(copy, num_bytes=num_bytes)

    def poison(self, queue: Queue, tensor: Tensor) -> None:
        """See `Device.poison`."""
        if self._poison_on_free:
            queue.submit(lambda: _fill_with_nan(tensor))

    def host_queue(self, name: str) -> HostQueue:
        """See `Device.host_queue`."""
        queue = self._queue(name, num_threads=1)
        self._host_queues.append(queue)
        return queue

    def raise_failure(self) -> None:
        """See `Device.raise_failure`."""
        self._failure.raise_first()

    def take_use(self) -> DeviceUse:
        """See `Device.take_use`."""
        return summarise(
            h2d=self.h2d.timeline,
            compute=self.compute.timeline,
            d2h=self.d2h.timeline,
            host_queues=[queue.timeline for queue in self._host_queues],
        )

    def peak_bytes(self) -> Mapping[str, int]:
        """See `Device.peak_bytes`."""
        return self.arena.peak_bytes()

    def close(self) -> None:
        """See `Device.close`."""
        for queue in (self.h2d, self.compute, self.d2h, *self._host_queues):
            queue.close()

    def _queue(self, name: str, *, num_threads: int) -> HostQueue:
        return HostQueue(
            name,
            failure=self._failure,
            num_threads=num_threads,
            max_delay_s=self._max_delay_s,
            delay_seed=self._delay_seed,
        )

    @contextmanager
    def _link(self, num_bytes: int) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        if self._link_bytes_per_s is None:
            return
        left_s = num_bytes / self._link_bytes_per_s - (time.perf_counter() - start_s)
        if left_s > 0:
            time.sleep(left_s)

    @contextmanager
    def _measured_workspace(self, key: Hashable) -> Iterator[None]:
        kept_bytes: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            if not self.arena.owns(tensor):
                storage = tensor.untyped_storage()
                kept_bytes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            yield
        num_bytes = sum(kept_bytes.values())
        self._workspace_bytes[key] = num_bytes
        self.arena.charge("workspace", num_bytes)
        self.arena.charge("workspace", -num_bytes)


def _fill_with_nan(tensor: Tensor) -> None:
    tensor.fill_(torch.nan)

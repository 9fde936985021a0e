"""The cuda device: bf16 weights straight from the store's `hi` plane, gradients accumulated in fp32 and sent to the
host in bf16.

Device memory is torch's caching allocator under a limit, with an account by component: slots and activations are
allocated once and counted exactly, the workspace is what the allocator's own peak says beyond them.

CUDA: compute and the queues that copy are streams; a queue's work launches inside its stream and never waits for the
device, except where host memory could not be pinned, and for the few rows of an embedding.
Shapes: R = rows of a table that are used, D = hidden size, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from mmap import mmap
from typing import Any, Unpack

import torch
from torch import Tensor

from horizon_server.engine.device.cuda_queue import CudaQueue, StreamClock, memory_refusals
from horizon_server.engine.device.cuda_runtime import Runtime, TorchCuda
from horizon_server.engine.device.memory import STAGING_BYTES, Arena, HostBuffers, PinnedRanges, StagingRing
from horizon_server.engine.device.protocol import Component, HostComponent, Queue, Work
from horizon_server.engine.device.queued_device import QueuedDevice, Switches
from horizon_server.engine.device.span_copies import SpanCopies
from horizon_server.engine.square_sums import square_blocks
from horizon_server.figures import DeviceFigures
from horizon_server.planning.ledger import CAST_ELEMENTS
from horizon_server.planning.pages import PagesPlan
from horizon_server.records.execution import DeviceKind
from horizon_server.store.adamw import STATE_PLANES
from horizon_server.store.cpus import available_cpus
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import UNIT_ALIGN_ELEMENTS
from horizon_server.store.packing import unpack
from horizon_server.store.pages import Span

_COPY_THREADS = 4
"""Host threads that gather embedding rows and fill staging memory."""


class CudaDevice(QueuedDevice):
    """Trains on one CUDA device. `limit_bytes` bounds what tensors take on it; `runtime` is the driver."""

    name: DeviceKind = "cuda"
    compute_dtype = torch.bfloat16
    gradient_dtype = torch.bfloat16
    h2d: CudaQueue
    compute: CudaQueue
    d2h: CudaQueue
    _cast: Tensor | None = None
    _packed: Tensor | None = None

    def __init__(
        self,
        *,
        limit_bytes: int | None = None,
        runtime: Runtime | None = None,
        staging_bytes: int = STAGING_BYTES,
        **switches: Unpack[Switches],
    ) -> None:
        self._runtime = runtime or TorchCuda()
        # Also where there is none: a limit binds the process, and an earlier device may have left one.
        self._runtime.limit_memory(limit_bytes)
        super().__init__(
            arena=Arena(limit_bytes=limit_bytes, device=self._runtime.device),
            host_buffers=HostBuffers(num_threads=available_cpus()),
            **switches,
        )
        self._pinned = PinnedRanges(self._runtime)
        computes, self._own_stream = self._runtime.new_stream(), self._runtime.new_stream()
        self._clock = StreamClock(self._runtime, computes)
        self.h2d, self.compute, self.d2h = (
            self._new_queue("h2d"),
            self._new_queue("compute", computes),
            self._new_queue("d2h"),
        )
        self._staging_bytes = staging_bytes
        # Now, so that there is memory for them. Those of hops are made where something could not be pinned.
        self._rings = dict[str, StagingRing]()
        for queue in (self.h2d, self.d2h):
            self._ring(queue)

    def _ring(self, queue: Queue) -> StagingRing:
        """One for each queue, because a ring belongs to one queue's thread."""
        if queue.name not in self._rings:
            assert isinstance(queue, CudaQueue)
            self._rings[queue.name] = StagingRing(self._runtime, queue.stream, num_bytes=self._staging_bytes)
        return self._rings[queue.name]

    def _new_queue(self, name: str, stream: Any = None) -> CudaQueue:
        return CudaQueue(
            name,
            self._group,
            num_threads=min(_COPY_THREADS, available_cpus()),
            runtime=self._runtime,
            stream=stream or self._runtime.new_stream(),
            clock=self._clock,
        )

    @property
    def generator(self) -> torch.Generator:
        return self._runtime.generator()

    @property
    def refusals(self) -> list[str]:
        return list(self._pinned.refusals)

    def adopt(self, store: HostStore, states: Collection[int] = (), *, page_elements: int = 0) -> None:
        """The planes that cross the link are registered with the driver, unit by unit."""
        units = store.layout.units
        most_packed = max(unit.packed_bytes for unit in units)
        wanted_planes = {"hi": True, "packed": most_packed > 0, "grad": store.grad_dtype is not None}
        for plane in (name for name, is_there in wanted_planes.items() if is_there):
            memory = store.plane(plane)
            # The embedding begins before a `grad` plane that leaves it out, and a frozen unit where the next one does.
            cuts = {max(0, store.layout.offset_in(plane, unit)) for unit in units}
            with store.frozen_writable():
                for part in store.held(plane):
                    inside = {cut - part.start for cut in cuts if part.start < cut < part.stop}
                    self._pinned.add(memory[part], cuts=sorted({0, *inside, part.stop - part.start}))
        for index in states:
            # What goes home to drives passes through a ring that is not registered.
            for plane in (plane for plane in STATE_PLANES[1:] if store.is_in_memory(index, plane)):
                home = store.unit(index, plane)[: units[index].trained_elements]
                self._pinned.add(home, cuts=[0, len(home)])
        # Gradients are rounded to bf16 in parts: a buffer for the whole would take half a slot more.
        wanted = min(CAST_ELEMENTS, max(unit.trained_elements for unit in units))
        if self._cast is None or self._cast.numel() < wanted:
            if self._cast is not None:
                self.free(self._cast)
            self._cast = self.allocate("gradients", wanted, self.gradient_dtype)
        if self._packed is None and most_packed:
            arrive_bytes = PagesPlan.of(store.layout, page_elements).packed_bytes(store.layout)
            self._packed = self.allocate("weights", arrive_bytes, torch.uint8)

    def release_memory(self) -> None:
        """Also what torch's allocator has cached, which no other process could use."""
        self._free_own()
        self._runtime.release_cached()

    def allocate(self, component: Component, num_elements: int, dtype: torch.dtype) -> Tensor:
        """CUDA: synchronises the device, so that no stream meets what another one left there."""
        with memory_refusals():
            tensor = super().allocate(component, num_elements, dtype)
        self._runtime.synchronize()
        return tensor

    def free(self, tensor: Tensor) -> None:
        """CUDA: synchronises the device. A device that is broken fails the queues, not the caller, who is closing what
        is left."""
        super().free(tensor)
        self._synchronize()

    def allocate_host(
        self, component: HostComponent, num_elements: int, dtype: torch.dtype, *, piece_elements: int | None = None
    ) -> Tensor:
        """Registered with the driver."""
        tensor = super().allocate_host(component, num_elements, dtype)
        if num_elements:
            self._pinned.add(tensor, cuts=[*range(0, num_elements, piece_elements or num_elements), num_elements])
        return tensor

    def share_host(
        self, component: HostComponent, memory: mmap, dtype: torch.dtype, *, piece_elements: int, is_counted: bool
    ) -> Tensor:
        """Registered with the driver, by each process for itself."""
        tensor = super().share_host(component, memory, dtype, piece_elements=piece_elements, is_counted=is_counted)
        self._pinned.add(tensor, cuts=[*range(0, len(tensor), piece_elements), len(tensor)])
        return tensor

    def free_host(self, tensor: Tensor) -> None:
        # Before the pages are unmapped, or the driver would keep them pinned.
        self._pinned.remove(tensor)
        super().free_host(tensor)

    def workspace(self, key: Hashable) -> AbstractContextManager[None]:
        """The allocator's peak shows it afterwards, so nothing is measured here."""
        return nullcontext()

    def place(self, tensor: Tensor) -> Tensor:
        """CUDA: a copy from pageable memory, complete when it returns."""
        with memory_refusals():
            return self._runtime.place(tensor)

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
        """2 bytes a parameter, no cast; packed tensors cross the link as they are and become bf16 on the device.

        CUDA: h2d runs in order, so one buffer is enough for packed bytes that arrive.
        """
        unit = store.layout.units[index]
        whole = [slice(0, unit.trained_elements if only_trained else unit.unpacked_elements)]
        for part in whole if parts is None else parts:
            self._upload(store.unit(index, "hi")[part], out[part], label=f"unit {index}")
        if unit.packed_bytes and not only_trained:
            if packed is None:
                assert self._packed is not None, "adopt comes first"
                packed = self._packed[: unit.packed_bytes]
                self.upload_packed(store, index, packed)
            self.h2d.submit(partial(store.unpack, index, packed, out), label=f"unpacking of unit {index}")

    def upload_spans(self, store: HostStore, index: int, spans: Sequence[Span], out: Tensor) -> None:
        """2 bytes a parameter, no cast; packed pieces become bf16 on the device, as `upload_unit` says."""
        label, copies = f"part of unit {index}", SpanCopies.of(store.layout.units[index], spans, out)
        for part, target in copies.plain:
            self._upload(store.unit(index, "hi")[part], target, label=label)
        arrived = self._packed
        for piece in copies.pieces:
            assert arrived is not None, "adopt comes first"
            block = store.unit(index, "packed")
            for name in ("codes", "scales", "group_scales"):
                source, target = block[getattr(piece.source, name)], arrived[getattr(piece.arrived, name)]
                if len(source):
                    self._upload(source, target, label=f"packed {label}")
        for piece, target in zip(copies.pieces, copies.unpacked, strict=True):
            assert arrived is not None, "adopt comes first"
            work = partial(unpack, piece.place, arrived, piece.arrived, target, first_block=piece.first_block)
            self.h2d.submit(work, label=f"unpacking of {label}")

    def upload_packed(self, store: HostStore, index: int, out: Tensor) -> None:
        self._upload(store.unit(index, "packed"), out, label=f"packed weights of unit {index}")

    def upload_exact(self, store: HostStore, index: int, read: Callable[[Tensor], Tensor], out: Tensor) -> None:
        """Through the staging ring: it is small, and both halves of the master are joined on the host."""

        def copy() -> None:
            self._rings["h2d"].upload(store.exact(index, read).view(-1), out)

        self.h2d.submit(copy, num_bytes=out.nbytes, label=f"fp32 parameters of unit {index}")

    def upload_rows(self, store: HostStore, name: str, rows_R: Tensor, out_RD: Tensor) -> None:
        work = partial(self._rings["h2d"].upload_rows, store.tensor(name, "hi"), rows_R, out_RD)
        self.h2d.submit(work, num_bytes=out_RD.nbytes, label=f"rows of {name}")

    def gather_rows(self, table_VD: Tensor, rows_R: Tensor, out_RD: Tensor) -> None:
        """CUDA: the numbers of the rows go through the staging ring, into memory that is taken on h2d's stream."""

        def work() -> None:
            placed_R = torch.empty_like(rows_R, device=table_VD.device)
            self._rings["h2d"].upload(rows_R, placed_R)
            torch.index_select(table_VD, 0, placed_R, out=out_RD)

        self.h2d.submit(work, num_bytes=rows_R.nbytes, label="rows on the device")

    def upload(self, source: Tensor, out: Tensor, *, label: str = "layer input", queue: Queue | None = None) -> None:
        self._upload(source, out, label=label, queue=queue)

    def download(
        self, source: Tensor, target: Tensor, *, label: str = "layer input", queue: Queue | None = None
    ) -> None:
        queue = queue or self.d2h
        work = partial(self._send_to_host, source.view(-1), target.view(-1), queue)
        queue.submit(work, num_bytes=target.nbytes, label=label)

    def square_blocks(self, values: Tensor, block_elements: int, out: Tensor) -> None:
        """CUDA: launches on the current stream."""
        square_blocks(values, block_elements, out)

    def read_back(self, source: Tensor, target: Tensor) -> None:
        self.d2h.submit(partial(_copy, source, target), label="loss")

    def download_unit(self, gradient: Tensor, target: Tensor, square_sum: Tensor, *, label: str = "") -> None:
        """CUDA: the sum is taken on d2h, in fp32 over rows, or blocks of the size that units are padded to, and in
        float64 over those. A square beyond fp32 (an element of 1.8e19) counts as not finite.
        """

        def work() -> None:
            # Of the fp32 values, before they are rounded: the norm is the same whatever the store keeps.
            _copy(_square_sum(gradient), square_sum)
            self._send_to_host(gradient.view(-1), target, self.d2h)

        self.d2h.submit(work, num_bytes=target.nbytes, label=label)

    def keep_gradient(self, gradient: Tensor, target: Tensor, square_sum: Tensor | None, *, label: str = "") -> None:
        """CUDA: as `download_unit`."""

        def work() -> None:
            if square_sum is not None:
                _copy(_square_sum(gradient), square_sum)
            _copy(gradient.view(-1), target)

        self.d2h.submit(work, label=label)

    def run(self, work: Work) -> None:
        """CUDA: waits for its own stream; what else uses the memory has happened before, or waits for the caller."""
        end = self._runtime.new_mark()
        with self._runtime.using(self._own_stream):
            work()
            end.record(self._own_stream)
        end.synchronize()

    def take_use(self) -> DeviceFigures:
        """CUDA: waits for what the queues were given; between steps they are idle."""
        use = super().take_use()
        self._clock.rebase(self.compute.stream)
        return use

    def peak_bytes(self) -> Mapping[str, int]:
        """The workspace is the allocator's peak beyond what was allocated by name; `cached` is what it holds beyond all
        tensors."""
        peak = dict(self.arena.peak_bytes())
        named = sum(num_bytes for component, num_bytes in peak.items() if component != "workspace")
        allocated = self._runtime.peak_allocated_bytes()
        peak["workspace"] = max(0, allocated - named)
        # Gaps that fit no tensor: where they grow, a job fails although its plan fits.
        peak["cached"] = max(0, self._runtime.peak_reserved_bytes() - allocated)
        return peak

    def close(self) -> None:
        """CUDA: synchronises the device, because a copy may be under way when a queue's thread has ended."""
        super().close()
        # Before anything is unpinned, or a copy under way could write into memory that is no longer the store's.
        self._synchronize()
        self._pinned.clear()
        self._free_own()

    def _free_own(self) -> None:
        for tensor in (self._cast, self._packed):
            if tensor is not None:
                self.free(tensor)
        self._cast = self._packed = None

    def _synchronize(self) -> None:
        try:
            self._runtime.synchronize()
        except RuntimeError as error:
            # After an illegal access every call of the driver fails; the first error is the true one.
            self._group.keep(error)

    def _upload(self, source: Tensor, out: Tensor, *, label: str, queue: Queue | None = None) -> None:
        queue = queue or self.h2d
        # From memory that is not pinned, a copy would block the launching thread and run at a fraction of the speed.
        if self._pinned.holds(source):
            work = partial(_copy, source, out)
        else:
            work = partial(self._ring(queue).upload, source.view(-1), out.view(-1))
        queue.submit(work, num_bytes=out.nbytes, label=label)

    def _send_to_host(self, source: Tensor, target: Tensor, queue: Queue) -> None:
        def land(start: int, values: Tensor) -> None:
            target[start : start + values.numel()].copy_(values)

        if not self._pinned.holds(target):
            self._ring(queue).download(source, target.dtype, land)
            return
        if source.dtype == target.dtype:
            _copy(source, target)
            return
        assert self._cast is not None and self._cast.dtype == target.dtype, "adopt comes first"
        assert queue is self.d2h, "hidden states keep their dtype"
        # One buffer is enough: d2h runs in order, so a part is rounded only when the part before has left.
        for start in range(0, source.numel(), self._cast.numel()):
            part = source[start : start + self._cast.numel()]
            rounded = self._cast[: part.numel()]
            rounded.copy_(part)
            target[start : start + part.numel()].copy_(rounded, non_blocking=True)


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _square_sum(gradient: Tensor) -> Tensor:
    blocks = gradient if gradient.dim() > 1 else gradient.view(-1, UNIT_ALIGN_ELEMENTS)
    norms: Tensor = torch.linalg.vector_norm(blocks, dim=1)
    return norms.double().square_().sum()

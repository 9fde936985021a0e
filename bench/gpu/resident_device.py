"""A device on which the whole model is resident: what streaming is compared with.

The engine's own trainer runs on it, so that every kernel is the same. Nothing crosses the link, nothing runs at the
same time: work is launched by the calling thread as soon as it is submitted, weights are copied out of device memory,
gradients stay there, and the update is left out.

Shapes: R = rows of a table that are used, D = hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from mmap import mmap

import torch
from torch import Tensor

from horizon_server.engine.device.protocol import Component, Event, HostComponent, Queue, Work
from horizon_server.figures import DeviceFigures
from horizon_server.records.execution import DeviceKind
from horizon_server.store.host_store import HostStore
from horizon_server.store.pages import Span


@dataclass
class _Numbers:
    """Numbers on their way to the host: sent when somebody waits, so that reading them does not stop the launches."""

    device: torch.device
    pending: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def send(self) -> None:
        for source, target in self.pending:
            target.copy_(source)
        self.pending.clear()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass
class _Passed:
    """A point that everything submitted before it has reached."""

    origin: str
    numbers: _Numbers
    happened: bool = True

    def wait(self) -> None:
        self.numbers.send()


@dataclass
class _Inline:
    """Runs work where it is submitted, or drops it."""

    name: str
    numbers: _Numbers
    drops: bool = False

    def submit(self, work: Work, *, num_bytes: int = 0, label: str = "", **_: object) -> None:
        if not self.drops:
            work()

    def wait(self, event: Event) -> None:
        """The order of submission is the order of the work."""

    def record(self) -> Event:
        return _Passed(self.name, self.numbers)


class ResidentDevice:
    """Holds a copy of the store's weights. `kind` and the dtypes are those of the device that it stands in for."""

    def __init__(
        self, kind: DeviceKind, store: HostStore, *, compute_dtype: torch.dtype, gradient_dtype: torch.dtype
    ) -> None:
        self.name, self.compute_dtype, self.gradient_dtype = kind, compute_dtype, gradient_dtype
        self._device = torch.device("cuda" if kind == "cuda" else "cpu")
        self._numbers = _Numbers(self._device)
        self.h2d: Queue = _Inline("h2d", self._numbers)
        self.compute: Queue = _Inline("compute", self._numbers)
        self.d2h: Queue = _Inline("d2h", self._numbers)
        self._units = [self._weights(store, unit.index) for unit in store.layout.units]

    @property
    def generator(self) -> torch.Generator:
        return torch.cuda.default_generators[0] if self._device.type == "cuda" else torch.default_generator

    def allocate(self, component: Component, num_elements: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_elements, dtype=dtype, device=self._device)

    def free(self, tensor: Tensor) -> None:
        """The caller drops it."""

    def allocate_host(
        self, component: HostComponent, num_elements: int, dtype: torch.dtype, *, piece_elements: int | None = None
    ) -> Tensor:
        return torch.zeros(num_elements, dtype=dtype)

    def share_host(
        self, component: HostComponent, memory: mmap, dtype: torch.dtype, *, piece_elements: int, is_counted: bool
    ) -> Tensor:
        raise NotImplementedError("no other rank is there")

    def free_host(self, tensor: Tensor) -> None:
        """The caller drops it."""

    def adopt(self, store: HostStore, states: Collection[int] = (), *, page_elements: int = 0) -> None:
        """The weights were copied already."""

    def release_memory(self) -> None:
        """The weights stay: they are what is measured."""

    def charge(self, component: Component, num_bytes: int) -> None:
        """No account is kept."""

    def workspace(self, key: Hashable) -> AbstractContextManager[None]:
        return nullcontext()

    def place(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device)

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
        out.copy_(self._units[index])

    def upload_spans(self, store: HostStore, index: int, spans: Sequence[Span], out: Tensor) -> None:
        raise NotImplementedError("experts come in pages where a layer does not fit, and here all do")

    def upload_packed(self, store: HostStore, index: int, out: Tensor) -> None:
        raise NotImplementedError("weights are unpacked when they are copied")

    def upload_rows(self, store: HostStore, name: str, rows_R: Tensor, out_RD: Tensor) -> None:
        unit, place = store.layout.find(name)
        table_VD = self._units[unit.index].narrow(0, place.offset, place.num_elements).view(place.shape)
        torch.index_select(table_VD, 0, self.place(rows_R), out=out_RD)

    def gather_rows(self, table_VD: Tensor, rows_R: Tensor, out_RD: Tensor) -> None:
        torch.index_select(table_VD, 0, self.place(rows_R), out=out_RD)

    def hops(self) -> tuple[Queue, Queue, Queue]:
        raise NotImplementedError("no other rank is there")

    def drain(self) -> None:
        self.compute.record().wait()

    def upload(self, source: Tensor, out: Tensor, *, label: str = "", queue: Queue | None = None) -> None:
        out.copy_(source)

    def download(self, source: Tensor, target: Tensor, *, label: str = "", queue: Queue | None = None) -> None:
        target.copy_(source)

    def square_blocks(self, values: Tensor, block_elements: int, out: Tensor) -> None:
        out.copy_(torch.linalg.vector_norm(values.view(-1, block_elements), dim=1).double().square_())

    def read_back(self, source: Tensor, target: Tensor) -> None:
        self._numbers.pending.append((source.clone(), target))

    def download_unit(self, gradient: Tensor, target: Tensor, square_sum: Tensor, *, label: str = "") -> None:
        self._numbers.pending.append((torch.linalg.vector_norm(gradient).double().square(), square_sum))

    def upload_exact(self, store: HostStore, index: int, read: Callable[[Tensor], Tensor], out: Tensor) -> None:
        out.copy_(read(self._units[index]).reshape(-1))

    def download_rows(
        self, gradient_RD: Tensor, target: Tensor, table_VD: Tensor, rows_R: Tensor, square_sum: Tensor
    ) -> None:
        self.download_unit(gradient_RD, target, square_sum)

    def keep_gradient(self, gradient: Tensor, target: Tensor, square_sum: Tensor | None, *, label: str = "") -> None:
        raise NotImplementedError("nothing is updated")

    def run(self, work: Work) -> None:
        raise NotImplementedError("nothing is updated")

    def poison(self, queue: Queue, tensor: Tensor) -> None:
        """No use after free is looked for."""

    def host_queue(self, name: str) -> Queue:
        return _Inline(name, self._numbers, drops=True)

    @property
    def refusals(self) -> list[str]:
        return []

    def raise_failure(self) -> None:
        """Errors are raised where the work is submitted."""

    def take_use(self) -> DeviceFigures:
        return DeviceFigures()

    def peak_bytes(self) -> Mapping[str, int]:
        return {}

    def host_peak_bytes(self) -> Mapping[str, int]:
        return {}

    def close(self) -> None:
        self._units.clear()

    def _weights(self, store: HostStore, index: int) -> Tensor:
        if self.compute_dtype != torch.float32:
            return store.unit(index, "hi").to(self._device, self.compute_dtype)
        master = torch.empty(store.layout.units[index].num_elements)
        store.merge_master(index, master)
        return master.to(self._device)

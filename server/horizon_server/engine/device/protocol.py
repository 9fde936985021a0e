"""What the engine needs of a device: queues joined by events, and a bounded arena.

Work given to a queue runs in order, later than the call that submitted it, and must neither read results back nor wait
for the host.

Units: bytes are what crosses the link, seconds come from the queues themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from mmap import mmap
from typing import Literal, Protocol

import torch
from torch import Tensor

from horizon_server.figures import CollectiveKind, DeviceFigures
from horizon_server.records.execution import DeviceKind
from horizon_server.store.host_store import HostStore
from horizon_server.store.pages import Span

Component = Literal["weights", "moments", "gradients", "activations", "workspace"]
HostComponent = Literal["activations", "staging"]
Work = Callable[[], object]
"""Its result is dropped, so that a tensor's own method can be work."""


class Event(Protocol):
    """A point in the order of the queue named `origin`."""

    origin: str

    @property
    def happened(self) -> bool:
        """Whether the queue has passed this point. Does not block."""

    def wait(self) -> object:
        """Block the calling thread until the queue has passed this point."""


class Queue(Protocol):
    """Work done strictly in the order given, at the same time as other queues' work."""

    name: str

    def submit(
        self, work: Work, *, num_bytes: int = 0, label: str = "", collective: CollectiveKind | None = None
    ) -> None:
        """Append work; `num_bytes` is what it moves over the link, `label` what a trace calls it. Of a `collective`,
        which is its kind, they are what this rank gets from the others."""

    def wait(self, event: Event) -> None:
        """Let everything submitted later wait for the event. Does not block the caller."""

    def record(self) -> Event:
        """An event that happens when everything submitted so far is done."""


class Device(Protocol):
    """A compute engine with its own bounded memory, fed from the host store.

    Thread: methods are called by one driving thread; queue work may call `workspace` and `charge`.
    """

    @property
    def name(self) -> DeviceKind:
        """The kind of device, as users choose it."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """What weights are computed with."""

    @property
    def gradient_dtype(self) -> torch.dtype:
        """What gradients leave the device as; they accumulate in fp32 on it."""

    @property
    def generator(self) -> torch.Generator:
        """What random numbers are drawn from where compute runs: torch's default one there, which modules use."""

    @property
    def h2d(self) -> Queue:
        """Copies from the host."""

    @property
    def compute(self) -> Queue:
        """Computation."""

    @property
    def d2h(self) -> Queue:
        """Copies to the host."""

    def hops(self) -> tuple[Queue, Queue, Queue]:
        """Queues for hidden states from other ranks, for those to them, and for telling the others of these; made by
        the first call. On h2d and d2h they would wait behind weights and gradients, which nobody needs so soon. From
        then on, a collective waits for what was submitted to the third, which runs on the host."""

    def drain(self) -> None:
        """Block until all copies and all computation submitted so far are done; work of `host_queue` may go on."""

    def allocate(self, component: Component, num_elements: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor in the arena.

        Raises:
            DoesNotFit: the arena's limit would be exceeded; the message carries the numbers.
        """

    def free(self, tensor: Tensor) -> None:
        """Free what `allocate` returned."""

    def allocate_host(
        self, component: HostComponent, num_elements: int, dtype: torch.dtype, *, piece_elements: int | None = None
    ) -> Tensor:
        """A flat tensor in host memory, page-aligned, that the device copies from and to at full speed.

        No copy may cross a multiple of `piece_elements`; where it is None, the whole may be copied at once.

        Raises:
            DoesNotFit: the kernel has no memory left.
        """

    def share_host(
        self, component: HostComponent, memory: mmap, dtype: torch.dtype, *, piece_elements: int, is_counted: bool
    ) -> Tensor:
        """As `allocate_host`, in memory that other processes map as well. Of those, the one that counts it has it on
        its account."""

    def free_host(self, tensor: Tensor) -> None:
        """Free what `allocate_host` or `share_host` returned."""

    def adopt(self, store: HostStore, states: Collection[int] = (), *, page_elements: int = 0) -> None:
        """Prepare for copies from and to the planes of a store, and all planes of the units whose optimizer `states`
        are on the device; undone by `close`. May be called again. Experts come in pages of at most `page_elements`; 0
        is with their layer."""

    def release_memory(self) -> None:
        """Free what the device itself holds in its memory, what its allocator keeps included, until `adopt` is called
        again.

        The queues must be idle. Host memory stays as it is.
        """

    def charge(self, component: Component, num_bytes: int) -> None:
        """Account for memory that the framework's own allocator holds; negative releases it."""

    def workspace(self, key: Hashable) -> AbstractContextManager[None]:
        """Account for what autograd keeps inside the block. `key` names work that always needs the same amount."""

    def place(self, tensor: Tensor) -> Tensor:
        """Token ids and indices where compute can read them; small, and not part of the account."""

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
        """Append the copy of a unit's weights to h2d; `out` has the unit's padded length. With `only_trained` it has
        the others already; with `parts`, other ranks send what is in none of them. Packed weights are unpacked from
        `packed` where it is given, which `upload_packed` has filled."""

    def upload_spans(self, store: HostStore, index: int, spans: Sequence[Span], out: Tensor) -> None:
        """Append the copy of some of a unit's weights to h2d, each span to its place in `out`; packed weights are
        unpacked there."""

    def upload_packed(self, store: HostStore, index: int, out: Tensor) -> None:
        """Append the copy of a unit's packed weights to h2d, as they are. Shapes: [unit.packed_bytes], uint8."""

    def upload_exact(self, store: HostStore, index: int, read: Callable[[Tensor], Tensor], out: Tensor) -> None:
        """Append the copy of a part of a unit's weights to h2d, in fp32; `read` cuts it out of a plane of the unit."""

    def upload_rows(self, store: HostStore, name: str, rows_R: Tensor, out_RD: Tensor) -> None:
        """Append the gathering and copy of some rows of a 2-D parameter to h2d."""

    def gather_rows(self, table_VD: Tensor, rows_R: Tensor, out_RD: Tensor) -> None:
        """Append the gathering of some rows of a table that is on the device to h2d; `rows_R` are on the host."""

    def upload(self, source: Tensor, out: Tensor, *, label: str = "layer input", queue: Queue | None = None) -> None:
        """Append the copy of host memory, from `allocate_host` or the store, to h2d, or to a queue for hops."""

    def download(
        self, source: Tensor, target: Tensor, *, label: str = "layer input", queue: Queue | None = None
    ) -> None:
        """Append the copy of device memory to d2h, or to a queue for hops, rounded to the dtype of `target`, which
        comes from `allocate_host` or the store."""

    def square_blocks(self, values: Tensor, block_elements: int, out: Tensor) -> None:
        """Write the sum of squares of each block of flat fp32 values into `out`, which is where they are. In work of
        d2h; the order within a block is fixed.

        Shapes: [N] to [N / block_elements], float64.
        """

    def read_back(self, source: Tensor, target: Tensor) -> None:
        """Append the copy of a few numbers to d2h, too small to be part of the account."""

    def download_unit(self, gradient: Tensor, target: Tensor, square_sum: Tensor, *, label: str = "") -> None:
        """Append the copy of a unit's gradient to d2h, and the sum of its squares. `target` is flat; `gradient` may be
        rows of a table.

        The sum is in float64, in a fixed order, of the fp32 values before they are rounded to the target's dtype; it is
        not finite when an element is not.
        """

    def keep_gradient(self, gradient: Tensor, target: Tensor, square_sum: Tensor | None, *, label: str = "") -> None:
        """As `download_unit`, to a `target` on the device: nothing crosses the link but the sum, where it is wanted."""

    def run(self, work: Work) -> None:
        """Do work on the device's memory besides its queues, and block until it is done. Thread: of a `host_queue`.
        CUDA: on a stream of its own."""

    def poison(self, queue: Queue, tensor: Tensor) -> None:
        """Append the poisoning of memory that is about to be reused, where that debug switch is on."""

    def host_queue(self, name: str) -> Queue:
        """A queue for work of the host's own (the optimizer); this device's queues can wait for its events."""

    @property
    def refusals(self) -> list[str]:
        """What the machine refused, one message each; training continues, slower."""

    def raise_failure(self) -> None:
        """Raise the first error any queue met; after one, the queues skip their work."""

    def take_use(self) -> DeviceFigures:
        """What the queues finished since the last call."""

    def peak_bytes(self) -> Mapping[str, int]:
        """The most bytes each component has held."""

    def host_peak_bytes(self) -> Mapping[str, int]:
        """The most bytes of host memory each component of `allocate_host` has held."""

    def close(self) -> None:
        """Finish the queues and free the memory."""

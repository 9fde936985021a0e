"""Gradients of layers whose experts come in pages: each page's leave the device as the page ends.

On the host they land where the gradient of the whole layer would, so that the optimizer sees no difference. The sum of
its squares is taken there, over all of it in its order, because no page has it all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from horizon_server.engine.device.protocol import Device, Event
from horizon_server.engine.paged_experts import Paging
from horizon_server.engine.slot_ring import PageRing, Slot
from horizon_server.store.adamw import sum_squares
from horizon_server.store.pages import UnitPart


class PagedGradients:
    """A ring of gradient slots for pages, and a queue on which squares are summed.

    Thread: the driver's.
    """

    def __init__(self, paging: Paging, device: Device, *, num_slots: int, num_threads: int) -> None:
        self._paging, self._device, self._num_slots, self._num_threads = paging, device, num_slots, num_threads
        self._ring = PageRing(
            device,
            allocate=lambda: device.allocate("gradients", paging.page_trained_elements, torch.float32),
            give_back=device.free,
        )
        self._open: Slot | None = None
        self._queue = device.host_queue("squares")
        self.open_slots()

    def open(self, unit_index: int, number: int) -> Tensor | None:
        """Zeros for a page's gradients; None where it has none."""
        part = self._paging.layers[unit_index].unit.pages[number]
        if not part.trained_elements:
            return None
        self._open = self._ring.take(self._device.compute)
        flat = self._open.flat[: part.trained_elements]
        # Not by the first gradient: most steps leave some expert without one.
        self._device.compute.submit(flat.zero_, label=f"zero gradient {unit_index}")
        return flat

    def send(self, unit_index: int, number: int, target: Tensor) -> None:
        """Send what compute has accumulated since `open`. `target` is where the whole layer's gradient lands."""
        slot, self._open = self._open, None
        assert slot is not None, "open came first"
        self._device.d2h.wait(self._device.compute.record())
        self.download(self._paging.layers[unit_index].unit.pages[number], slot.flat, target, unit_index)
        self._ring.release(slot, self._device.d2h)

    def download(self, part: UnitPart, flat: Tensor, target: Tensor, unit_index: int) -> None:
        """Append the copies of a part's gradients to d2h."""
        for run in part.runs(only_trained=True):
            source = flat[run.local : run.local + run.stop - run.start]
            self._device.download(source, target[run.start : run.stop], label=f"gradient {unit_index}")

    def sum(self, target: Tensor, square_sum: Tensor, unit_index: int) -> Event:
        """Have the squares of a layer's gradient summed once all of it has landed; the event is after that."""
        self._queue.wait(self._device.d2h.record())
        self._queue.submit(
            lambda: square_sum.fill_(sum_squares(target, num_threads=self._num_threads).value),
            label=f"squares of gradient {unit_index}",
        )
        return self._queue.record()

    def meet(self) -> None:
        """Block until all sums that were asked for are there."""
        self._queue.record().wait()

    def open_slots(self) -> None:
        """Have slots on the device."""
        if self._paging.page_trained_elements:
            self._ring.open(self._num_slots)

    def close_slots(self) -> None:
        """Free the slots on the device. The queues must be idle."""
        self._ring.close()

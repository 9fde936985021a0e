"""Equal pieces of memory that units travel through, handed out in turn; an event says when a piece may be
overwritten."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from horizon_server.engine.device.protocol import Device, Event, Queue
from horizon_server.store.layout import UnitLayout


@dataclass(eq=False)
class Slot:
    """One piece. `in_use` until released; `free` happens when its last user's queue has let go. `kept_for` is the unit
    that stays in it until that is asked for again.
    """

    flat: Tensor
    in_use: bool = False
    free: Event | None = None
    kept_for: int | None = None


class SlotRings:
    """A ring of `num_slots` slots for layers (2 is double buffering), and one slot of `edge_elements` for embedding and
    head.

    `allocate` makes a piece of a number of elements, `give_back` frees one. A layer's slot holds `elements_of` the
    largest layer, and `more_layer_elements` beyond that.
    Units that are `resident`, layers or the head, have a slot of their own each, and use none of the ring.
    """

    def __init__(
        self,
        device: Device,
        units: Sequence[UnitLayout],
        *,
        allocate: Callable[[int], Tensor],
        give_back: Callable[[Tensor], None],
        elements_of: Callable[[UnitLayout], int],
        num_slots: int,
        edge_elements: int,
        more_layer_elements: int = 0,
        resident: Collection[int] = (),
    ) -> None:
        self._device, self._units = device, units
        self._allocate, self._give_back, self._elements_of = allocate, give_back, elements_of
        self._num_slots, self._edge_elements, self._more_layer_elements = num_slots, edge_elements, more_layer_elements
        self._resident = resident
        self.open()

    def open(self) -> None:
        """Take the memory; also after `close`, with nothing kept in it."""
        units, resident, more = self._units, self._resident, self._more_layer_elements
        sizes = [self._elements_of(unit) for unit in units]
        passing = [sizes[unit.index] for unit in units if unit.kind == "layer" and unit.index not in resident]
        # None where every layer has its own.
        layer_elements = max(passing, default=0) + more
        layers = deque(Slot(flat=self._allocate(layer_elements)) for _ in range(self._num_slots if passing else 0))
        # Only one: embedding and head can be far larger than a layer, and are needed once or twice a step.
        edges = deque([Slot(flat=self._allocate(self._edge_elements))])
        self._rings = [layers if unit.kind == "layer" else edges for unit in units]
        for index in resident:
            own_elements = sizes[index] + (more if units[index].kind == "layer" else 0)
            self._rings[index] = deque([Slot(flat=self._allocate(own_elements))])

    def available(self, unit_index: int) -> bool:
        """Whether the slot that `take` would give for a unit has been released."""
        return not self._slot_for(unit_index).in_use

    def take(self, unit_index: int, queue: Queue) -> Slot:
        """The next slot in turn for a unit; later work of `queue` waits until its last user has let go."""
        slot = self._slot_for(unit_index)
        assert not slot.in_use, "slots are released in the order they were taken"
        ring = self._rings[unit_index]
        ring.remove(slot)
        ring.append(slot)
        slot.in_use = True
        # What is kept is not written to.
        if slot.free is not None and slot.kept_for is None:
            queue.wait(slot.free)
        return slot

    def release(self, slot: Slot, queue: Queue) -> None:
        """Give a slot back; it is free when `queue` has done what was submitted so far."""
        if slot.kept_for is None:
            # Before the event, so that poison cannot hit what the next user writes.
            self._device.poison(queue, slot.flat)
        slot.free = queue.record()
        slot.in_use = False

    def forget(self, unit_index: int) -> None:
        """Let the next user of a unit's slot write to it, although the unit was kept there. No work may use the slot
        meanwhile."""
        self._slot_for(unit_index).kept_for = None

    def flat_of(self, unit_index: int) -> Tensor:
        """The memory of a resident unit."""
        assert unit_index in self._resident, "others have none of their own"
        return self._slot_for(unit_index).flat

    def _slot_for(self, unit_index: int) -> Slot:
        ring = self._rings[unit_index]
        slot = next((slot for slot in ring if slot.kept_for == unit_index), ring[0])
        assert slot.kept_for in (None, unit_index), "only what is asked for again before its slot's turn may be kept"
        return slot

    def close(self) -> None:
        """Give the memory back. The queues must be idle."""
        for ring in self._rings:
            while ring:
                self._give_back(ring.popleft().flat)


class PageRing:
    """A ring of slots of one size for pages of experts, which are used in the order they are taken.

    Thread: the driver's.
    """

    def __init__(self, device: Device, *, allocate: Callable[[], Tensor], give_back: Callable[[Tensor], None]) -> None:
        self._device, self._allocate, self._give_back = device, allocate, give_back
        self._slots: deque[Slot] = deque()

    def open(self, num_slots: int) -> None:
        """Take the memory."""
        self._slots.extend(Slot(flat=self._allocate()) for _ in range(num_slots))

    def take(self, queue: Queue) -> Slot:
        """The next slot in turn; later work of `queue` waits until its last user has let go."""
        slot = self._slots[0]
        assert not slot.in_use, "pages are released in the order they were taken"
        self._slots.rotate(-1)
        slot.in_use = True
        if slot.free is not None:
            queue.wait(slot.free)
        return slot

    def release(self, slot: Slot, queue: Queue) -> None:
        """Give a slot back; it is free when `queue` has done what was submitted so far."""
        self._device.poison(queue, slot.flat)
        slot.free, slot.in_use = queue.record(), False

    def close(self) -> None:
        """Give the memory back. The queues must be idle."""
        while self._slots:
            self._give_back(self._slots.popleft().flat)

"""A ring of equal pieces of memory, handed out in turn; an event says when a piece may be overwritten.

Owns the pieces and their free events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from horizon_server.engine.device.protocol import Component, Device, Event, Queue
from horizon_server.store.layout import UnitLayout


@dataclass
class Slot:
    """One piece. `in_use` until released; `free` happens when its last user's queue has let go."""

    flat: Tensor
    in_use: bool = False
    free: Event | None = None


class SlotRing:
    """Equal pieces, allocated once. Use `on_device` or `on_host`."""

    def __init__(self, device: Device, pieces: list[Tensor], *, give_back: Callable[[Tensor], None]) -> None:
        self._device, self._give_back = device, give_back
        self._slots = [Slot(flat=piece) for piece in pieces]
        self._next = 0

    @classmethod
    def on_device(cls, device: Device, *, component: Component, num_slots: int, num_elements: int) -> SlotRing:
        """`num_slots` pieces of device memory."""
        # Gradients accumulate over micro-batches and chunks, which bf16 does not survive.
        dtype = torch.float32 if component == "gradients" else device.compute_dtype
        pieces = [device.allocate(component, num_elements, dtype) for _ in range(num_slots)]
        return cls(device, pieces, give_back=device.free)

    @classmethod
    def on_host(cls, device: Device, *, num_slots: int, num_elements: int) -> SlotRing:
        """`num_slots` pieces of host memory for gradients that leave the device."""
        pieces = [device.allocate_host("staging", num_elements, device.gradient_dtype) for _ in range(num_slots)]
        return cls(device, pieces, give_back=device.free_host)

    @property
    def available(self) -> bool:
        """Whether the next slot in turn has been released."""
        return not self._slots[self._next].in_use

    def take(self, queue: Queue) -> Slot:
        """The next slot in turn; later work of `queue` waits until its last user has let go."""
        slot = self._slots[self._next]
        assert not slot.in_use, "slots are released in the order they were taken"
        self._next = (self._next + 1) % len(self._slots)
        slot.in_use = True
        if slot.free is not None:
            queue.wait(slot.free)
        return slot

    def release(self, slot: Slot, queue: Queue) -> None:
        """Give a slot back; it is free when `queue` has done what was submitted so far."""
        # Before the event, so that poison cannot hit what the next user writes.
        self._device.poison(queue, slot.flat)
        slot.free = queue.record()
        slot.in_use = False

    def close(self) -> None:
        """Give the memory back. The queues must be idle."""
        for slot in self._slots:
            self._give_back(slot.flat)
        self._slots.clear()


class UnitRings:
    """A ring of `num_slots` for layers (2 is double buffering), and one slot for embedding and head.

    These two can be far larger than a layer and are needed once or twice a step. `make` is `SlotRing.on_device` or `on_host`.
    """

    def __init__(
        self, units: Sequence[UnitLayout], make: Callable[..., SlotRing], *, num_slots: int, edge_elements: int
    ) -> None:
        self._units = units
        layer_elements = max(unit.num_elements for unit in units if unit.kind == "layer")
        self._layers = make(num_slots=num_slots, num_elements=layer_elements)
        self._edges = make(num_slots=1, num_elements=edge_elements)

    def of(self, unit_index: int) -> SlotRing:
        """The ring that a unit's slots come from."""
        return self._layers if self._units[unit_index].kind == "layer" else self._edges

    def close(self) -> None:
        """Give the memory back. The queues must be idle."""
        self._layers.close()
        self._edges.close()

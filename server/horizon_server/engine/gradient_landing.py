"""Where gradients come down on the host: a plane that keeps them all until the norm is known, or a few slots on their way into the update.

Owns the host memory a gradient lands in and what happens when it has. Must not know how gradients are computed, nor the update.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from functools import partial
from typing import Protocol

from torch import Tensor

from horizon_server.engine.device.protocol import Device, Event, Queue
from horizon_server.engine.slot_ring import Slot, SlotRing, UnitRings
from horizon_server.store.host_store import HostStore

IsFinite = Callable[[], bool]
"""Whether the step's loss and a unit's gradient are finite; to be asked when the gradient has landed."""

UpdateUnit = Callable[[int, Tensor, Event, IsFinite, Set[str]], None]
"""Queue the update of a unit from a landed gradient, to run after an event and if it is finite, for the tensors that have one."""


class GradientLanding(Protocol):
    """One place per unit and step: `open` before the gradient is sent, `landed` after."""

    def open(self, unit_index: int) -> Tensor:
        """Host memory for a unit's gradient; d2h waits until it is free. Shapes: [unit.num_elements]."""

    def landed(self, unit_index: int, is_finite: IsFinite, reached: Set[str]) -> None:
        """All of the unit's gradient has been given to d2h, and so have the numbers that `is_finite` looks at.

        `reached` names the tensors that have a gradient; it is complete for the unit when the gradient has landed.
        """

    def close(self) -> None:
        """Free the memory. The queues must be idle."""


class PlaneLanding:
    """The store's `grad` plane: nothing happens until the step's norm is known."""

    def __init__(self, store: HostStore) -> None:
        self._store = store

    def open(self, unit_index: int) -> Tensor:
        """The plane is free when the last step's update has read it, and that is before its forward."""
        return self._store.unit(unit_index, "grad")

    def landed(self, unit_index: int, is_finite: IsFinite, reached: Set[str]) -> None:
        """It waits in the plane."""

    def close(self) -> None:
        """The plane is the store's."""


class SlotLanding:
    """Slots in turn, each free again when the unit that came down in it has been updated: gradients never add up on the host."""

    def __init__(
        self, store: HostStore, device: Device, *, num_slots: int, update: UpdateUnit, update_queue: Queue
    ) -> None:
        self._layout, self._device = store.layout, device
        self._update, self._update_queue = update, update_queue
        units = store.layout.units
        self._rings = UnitRings(
            units,
            partial(SlotRing.on_host, device),
            num_slots=num_slots,
            edge_elements=max(unit.num_elements for unit in units if unit.kind != "layer"),
        )
        self._open: dict[int, Slot] = {}

    def open(self, unit_index: int) -> Tensor:
        slot = self._rings.of(unit_index).take(self._device.d2h)
        self._open[unit_index] = slot
        return slot.flat[: self._layout.units[unit_index].num_elements]

    def landed(self, unit_index: int, is_finite: IsFinite, reached: Set[str]) -> None:
        """The update follows at once, and the slot is free after it."""
        slot = self._open.pop(unit_index)
        gradient = slot.flat[: self._layout.units[unit_index].num_elements]
        self._update(unit_index, gradient, self._device.d2h.record(), is_finite, reached)
        # To the update's queue and not to d2h: the update still reads it when the copy is over.
        self._rings.of(unit_index).release(slot, self._update_queue)

    def close(self) -> None:
        self._rings.close()

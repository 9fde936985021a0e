"""Gradients on their way to the host: accumulated in fp32 on the device, sent to the host once a step, their squares summed.

Owns the gradient slots, the square sums and the loss of a step. Must not know how gradients are computed or applied.

Shapes: R = rows of the embedding in use, D = hidden size.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from horizon_server.engine.device.protocol import Device
from horizon_server.engine.gradient_landing import GradientLanding, IsFinite
from horizon_server.engine.slot_ring import Slot, SlotRing, UnitRings
from horizon_server.engine.template import Template


class GradientSink:
    """A ring of gradient slots for layers, and one slot for head and embedding.

    `square_sums` holds, per unit and after the device is idle, the float64 sum of squares of its gradient: not finite when an
    element is not. Where the table serves as projection too, the head's slot stays until the embedding's gradient has joined it.
    """

    def __init__(self, template: Template, device: Device, landing: GradientLanding, *, num_slots: int) -> None:
        self._template, self._device, self._landing = template, device, landing
        units = template.layout.units
        # Two sets in turn: the updates of a step may still look at its numbers when the next step begins, but not at its end.
        self._numbers = device.allocate_host("staging", 2 * (len(units) + 1), torch.float64)
        self._sets = self._numbers.view(2, -1)
        self._set = 0
        self._rings = UnitRings(
            units,
            partial(SlotRing.on_device, device, component="gradients"),
            num_slots=num_slots,
            edge_elements=max(units[0].num_elements, template.head_elements),
        )
        self._head_slot: Slot | None = None
        self.reached: set[str] = set()
        """Stored tensors that got a gradient in the step begun last. Thread: compute adds to it."""

    @property
    def square_sums(self) -> Tensor:
        """Of the step begun last. Shapes: [units]."""
        return self._sets[self._set, 1:]

    @property
    def loss(self) -> float:
        """The loss that came back last. The device must be idle, or past the head's gradient."""
        return float(self._sets[self._set, 0])

    def start_step(self) -> None:
        """Forget the last step's numbers, so that a unit that sends no gradient is noticed."""
        self._set = 1 - self._set
        self._sets[self._set].fill_(torch.nan)
        # A new one, because updates of the last step may still look at theirs.
        self.reached = set()

    def open(self, unit_index: int) -> Slot:
        """A zeroed slot for a unit's gradient; compute waits until it is free."""
        slot = self._rings.of(unit_index).take(self._device.compute)
        self._device.compute.submit(slot.flat.zero_, label=f"zero gradient {unit_index}")
        return slot

    def send_loss(self, loss: Tensor) -> None:
        """Send the loss, ahead of the gradients of the same step."""
        self._device.d2h.wait(self._device.compute.record())
        self._device.read_back(loss, self._sets[self._set, 0])

    def send(self, unit_index: int, slot: Slot) -> None:
        """Send what compute has accumulated; a tied head keeps the table's part, and its slot, for `open_table`."""
        self._send_flat(unit_index, slot.flat)
        if self._template.layout.units[unit_index].kind == "head" and self._template.tied:
            self._head_slot = slot
            return
        self._rings.of(unit_index).release(slot, self._device.d2h)

    def open_table(self) -> Slot:
        """The slot with the head's part of a tied table's gradient, for the embedding to add to."""
        slot, self._head_slot = self._head_slot, None
        assert slot is not None, "a tied head sends first"
        return slot

    def embedding_part(self, slot: Slot) -> Tensor:
        """Where the embedding unit's gradient is in a slot of `open_table` or `open`. Shapes: [unit.num_elements]."""
        units = self._template.layout.units
        if self._template.tied:
            return slot.flat[units[-1].num_elements : self._template.head_elements]
        return slot.flat[: units[0].num_elements]

    def send_table(self, slot: Slot) -> None:
        """Send the whole gradient of a tied table."""
        self._send_flat(0, self.embedding_part(slot))
        self._rings.of(0).release(slot, self._device.d2h)

    def send_rows(self, slot: Slot, rows_R: Tensor) -> None:
        """Send the gradient of the embedding's rows; the other rows have none."""
        device, template = self._device, self._template
        gradient_RD = slot.flat[: rows_R.numel() * template.hidden_size].view(-1, template.hidden_size)
        target = self._landing.open(0)
        device.d2h.wait(device.compute.record())
        device.download_rows(gradient_RD, target, template.table_place.view(target), rows_R, self.square_sums[0])
        self._landing.landed(0, self._finiteness(0), self.reached)
        self._rings.of(0).release(slot, device.d2h)

    def close(self) -> None:
        """Free the slots. The queues must be idle."""
        self._rings.close()
        self._device.free_host(self._numbers)
        self._landing.close()

    def _send_flat(self, unit_index: int, flat: Tensor) -> None:
        device, unit = self._device, self._template.layout.units[unit_index]
        target = self._landing.open(unit_index)
        # In the queue: the caller continues with the next unit while compute still fills the slot.
        device.d2h.wait(device.compute.record())
        square_sum = self.square_sums[unit_index]
        device.download_unit(flat[: unit.num_elements], target, square_sum, label=f"gradient {unit_index}")
        self._landing.landed(unit_index, self._finiteness(unit_index), self.reached)

    def _finiteness(self, unit_index: int) -> IsFinite:
        # Views of this step's set, because the update may ask when the next step has begun with the other one.
        loss, square_sum = self._sets[self._set, 0], self.square_sums[unit_index]
        return lambda: math.isfinite(loss) and math.isfinite(square_sum)

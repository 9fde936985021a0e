"""Gradients on their way home: accumulated in fp32 on the device, sent to the store once a step, their squares summed.

Owns the gradient slots and the square sums of a step. Must not know how gradients are computed or applied.

Shapes: R = rows of the embedding in use, D = hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from horizon_server.engine.device.protocol import Device
from horizon_server.engine.slot_ring import Slot, SlotRing
from horizon_server.engine.template import Template
from horizon_server.store.host_store import HostStore


class GradientSink:
    """A ring of gradient slots for layers, and one slot for head and embedding rows.

    `square_sums` holds, per unit and after the device is idle, the float64 sum of squares of its gradient: not finite exactly when
    an element is not.
    """

    def __init__(self, template: Template, store: HostStore, device: Device, *, num_slots: int) -> None:
        self._template, self._store, self._device = template, store, device
        units = template.layout.units
        self.square_sums = torch.full((len(units),), torch.nan, dtype=torch.float64)
        self._layer_ring = SlotRing(
            device,
            component="gradients",
            num_slots=num_slots,
            num_elements=max(unit.num_elements for unit in units if unit.kind == "layer"),
        )
        self._edge_ring = SlotRing(
            device,
            component="gradients",
            num_slots=1,
            num_elements=max(units[0].num_elements, template.head_elements),
        )

    def start_step(self) -> None:
        """Forget the last step's sums: a unit that sends no gradient would not go unnoticed."""
        self.square_sums.fill_(torch.nan)

    def open(self, unit_index: int) -> Slot:
        """A zeroed slot for a unit's gradient; compute waits until it is free."""
        ring = self._ring(unit_index)
        slot = ring.take(self._device.compute)
        self._device.compute.submit(lambda: _zero(slot.flat))
        return slot

    def send(self, unit_index: int, slot: Slot) -> None:
        """Send what compute has accumulated; a tied head takes the table's gradient with it."""
        device, template = self._device, self._template
        device.d2h.wait(device.compute.record())
        unit = template.layout.units[unit_index]
        device.download_unit(slot.flat[: unit.num_elements], self._store, unit_index, self.square_sums[unit_index])
        if unit.kind == "head" and template.tied:
            table = slot.flat[unit.num_elements : template.head_elements]
            device.download_unit(table, self._store, 0, None)
        self._ring(unit_index).release(slot, device.d2h)

    def send_rows(self, slot: Slot, rows_R: Tensor) -> None:
        """Send the gradient of the embedding's rows; where tied, it joins what the head has sent."""
        device, template = self._device, self._template
        device.d2h.wait(device.compute.record())
        gradient_RD = slot.flat[: rows_R.numel() * template.hidden_size].view(-1, template.hidden_size)
        device.download_rows(
            gradient_RD, self._store, template.embedding_name, rows_R, self.square_sums[0], add=template.tied
        )
        self._edge_ring.release(slot, device.d2h)

    def close(self) -> None:
        """Give the slots back. The queues must be idle."""
        self._layer_ring.close()
        self._edge_ring.close()

    def _ring(self, unit_index: int) -> SlotRing:
        return self._layer_ring if self._template.layout.units[unit_index].kind == "layer" else self._edge_ring


def _zero(flat: Tensor) -> None:
    flat.zero_()

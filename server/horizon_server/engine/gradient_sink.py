"""Gradients on their way to the host: accumulated in fp32 on the device, sent to the host once a step, their squares
summed.

Shapes: R = rows of the embedding in use, D = hidden size.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from horizon_server.engine.device.protocol import Device
from horizon_server.engine.optimizer import Optimizer
from horizon_server.engine.slot_ring import Slot, SlotRings
from horizon_server.engine.template import Template
from horizon_server.engine.unit_gradients import UnitGradients
from horizon_server.store.adamw import RowGradient
from horizon_server.store.host_store import HostStore


class GradientSink:
    """A ring of gradient slots for layers, and one slot for head and embedding.

    On the host a gradient lands in the store's `grad` plane, which keeps all of them until the norm is known. A store
    without one has a few slots instead: a landed gradient is updated from at once, and its slot is free after that, so
    gradients never add up there. Where few rows of the embedding are used (`StoreLayout.has_row_gradients`), theirs
    land one after the other in a buffer of their own.

    `square_sums` holds, per unit and after the device is idle, the float64 sum of squares of its gradient: not finite
    when an element is not. `reached` are the stored tensors that got a gradient in the step begun last, `row_gradient`
    the embedding's in it. Thread: compute adds to `reached`.
    """

    def __init__(
        self, template: Template, store: HostStore, device: Device, optimizer: Optimizer, *, num_slots: int
    ) -> None:
        self._template, self._store, self._device, self._optimizer = template, store, device, optimizer
        units = template.layout.units
        # Two sets in turn: the updates of a step may still look at its numbers when the next step begins, but not at
        # its end.
        self._numbers = device.allocate_host("staging", 2 * (len(units) + 1), torch.float64)
        self._sets = self._numbers.view(2, -1)
        self._set = 0
        self._rings = SlotRings(
            device,
            units,
            # Gradients accumulate over micro-batches and chunks, which bf16 does not survive.
            allocate=lambda num_elements: device.allocate("gradients", num_elements, torch.float32),
            give_back=device.free,
            elements_of=lambda unit: unit.trained_elements,
            num_slots=num_slots,
            edge_elements=max(units[0].trained_elements, template.layout.head_gradient_elements),
        )
        self._landing: SlotRings | None = None
        self._has_rows = template.layout.has_row_gradients
        assert not self._has_rows or template.embeds_by_rows, "a unit that is a table alone is looked up by rows"
        self._row_values = self._allocate_row_values(0)
        self.row_gradient: RowGradient | None = None
        if store.grad_dtype is None:
            self._landing = SlotRings(
                device,
                units,
                allocate=lambda num_elements: device.allocate_host("staging", num_elements, device.gradient_dtype),
                give_back=device.free_host,
                elements_of=lambda unit: unit.trained_elements,
                num_slots=num_slots,
                edge_elements=max(
                    unit.trained_elements
                    for unit in units
                    if unit.kind == "head" or (unit.kind == "embedding" and not self._has_rows)
                ),
            )
        self._open: dict[int, Slot] = {}
        self._gradients: dict[int, UnitGradients] = {}
        self.reached: set[str] = set()

    @property
    def square_sums(self) -> Tensor:
        """Of the step begun last. Shapes: [units]."""
        return self._sets[self._set, 1:]

    @property
    def loss(self) -> float:
        """The loss that came back last. The device must be idle, or past the head's gradient."""
        return float(self._sets[self._set, 0])

    def reserve(self, num_tokens: int) -> None:
        """Make room for the embedding's gradient in a step of this number of tokens; the queues must be idle but for
        the optimizer's."""
        if not self._has_rows:
            return
        num_values = min(num_tokens, self._template.vocab_size) * self._template.hidden_size
        if num_values > self._row_values.numel():
            # The last step's update may still read the smaller one.
            self._optimizer.finish().wait()
            self._device.free_host(self._row_values)
            self._row_values = self._allocate_row_values(num_values)

    def _allocate_row_values(self, num_values: int) -> Tensor:
        dtype = self._store.grad_dtype or self._device.gradient_dtype
        return self._device.allocate_host("staging", num_values, dtype)

    def start_step(self) -> None:
        """Forget the last step's numbers, so that a trained unit that sends no gradient is noticed."""
        self._set = 1 - self._set
        self._sets[self._set].fill_(torch.nan)
        for unit in self._template.layout.units:
            if not unit.trained_elements:
                self.square_sums[unit.index] = 0
        # A new one, because updates of the last step may still look at theirs.
        self.reached = set()

    def open(self, unit_index: int, rows_R: Tensor | None = None) -> UnitGradients | None:
        """Memory for a unit's gradients, None where it has none; compute waits until it is free. With `rows_R` it is
        zeros for these rows of the embedding.
        """
        if not self._has_gradient(unit_index):
            return None
        template, units, compute = self._template, self._template.layout.units, self._device.compute
        places, unit = template.places[unit_index], units[unit_index]
        if unit_index == 0 and template.layout.shares_gradient:
            # A table that serves as projection too has the head's part of its gradient in the head's slot, which stayed
            # for it.
            slot = self._open[0] = self._open.pop(len(units) - 1)
            flat = slot.flat[units[-1].num_elements : template.layout.head_gradient_elements]
            places = template.places_besides_table
        else:
            slot = self._open[unit_index] = self._rings.take(unit_index, compute)
            flat = slot.flat
        if rows_R is not None:
            # Not the whole slot: a table of many rows is far larger than what a step uses of it.
            flat = flat[: rows_R.numel() * template.hidden_size]
            compute.submit(flat.zero_, label=f"zero gradient {unit_index}")
            return UnitGradients([], flat, unit, reached=self.reached)
        gradients = self._gradients[unit_index] = UnitGradients(places, flat, unit, reached=self.reached)
        if unit_index == 0 and template.table_place.has_gradient and not template.tied:
            zero = partial(gradients.start_from_zero, template.table_place)
            compute.submit(zero, label=f"zero gradient {unit_index}")
        return gradients

    def send_loss(self, loss: Tensor) -> None:
        """Send the loss, ahead of the gradients of the same step."""
        self._device.d2h.wait(self._device.compute.record())
        self._device.read_back(loss, self._sets[self._set, 0])

    def send(self, unit_index: int, rows_R: Tensor | None = None) -> None:
        """Send what compute has accumulated since `open`; with `rows_R` these rows of the embedding, one after the
        other."""
        if not self._has_gradient(unit_index):
            return
        device, template, unit = self._device, self._template, self._template.layout.units[unit_index]
        slot, landing = self._open[unit_index], None
        if rows_R is not None:
            gradient = slot.flat[: rows_R.numel() * template.hidden_size].view(-1, template.hidden_size)
            target = self._row_values[: gradient.numel()]
            self.row_gradient = RowGradient(rows_R=rows_R, values_RD=target.view_as(gradient))
        else:
            device.compute.submit(self._gradients.pop(unit_index).finish, label=f"backward {unit_index}")
            if not unit.trained_elements:
                # A head that is frozen but for the table that it shares, whose gradient follows.
                return
            shares = template.layout.shares_gradient
            start = template.layout.units[-1].num_elements if unit_index == 0 and shares else 0
            gradient = slot.flat[start : start + unit.trained_elements]
            if self._landing is not None:
                landing = self._landing.take(unit_index, device.d2h)
                target = landing.flat[: unit.trained_elements]
            else:
                target = self._store.unit(unit_index, "grad")
        if unit_index == 0:
            # Its update may be the only one of the last step that is not over yet: all others were, before their unit's
            # forward.
            self._optimizer.wait_for_update(device.d2h, 0)
        # In the queue: the caller continues with the next unit while compute still fills the slot.
        device.d2h.wait(device.compute.record())
        # Views of this step's set, because the update may ask when the next step has begun with the other one.
        loss, square_sum = self._sets[self._set, 0], self.square_sums[unit_index]
        device.download_unit(gradient, target, square_sum, label=f"gradient {unit_index}")
        if self._landing is not None:
            self._optimizer.update_landed(
                unit_index,
                target if rows_R is None or self.row_gradient is None else self.row_gradient,
                device.d2h.record(),
                lambda: math.isfinite(loss) and math.isfinite(square_sum),
                self.reached,
            )
            if landing is not None:
                # To the update's queue and not to d2h: the update still reads it when the copy is over.
                self._landing.release(landing, self._optimizer.queue)
        if not (unit.kind == "head" and template.layout.shares_gradient):
            self._rings.release(self._open.pop(unit_index), device.d2h)

    def _has_gradient(self, unit_index: int) -> bool:
        layout = self._template.layout
        unit = layout.units[unit_index]
        return unit.trained_elements > 0 or (unit.kind == "head" and layout.shares_gradient)

    def open_slots(self) -> None:
        """Have slots on the device again after `close_slots`."""
        self._rings.open()

    def close_slots(self) -> None:
        """Free the slots on the device. The queues must be idle but for the optimizer's, whose updates read host memory
        alone."""
        self._rings.close()

    def close(self) -> None:
        """Free all memory. The queues must be idle."""
        self._rings.close()
        self._device.free_host(self._numbers)
        self._device.free_host(self._row_values)
        if self._landing is not None:
            self._landing.close()

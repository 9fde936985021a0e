"""Gradients on their way to the host: accumulated in fp32 on the device, sent to the host once a step, their squares
summed.

Shapes: R = rows of the embedding in use, D = hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from horizon_server.engine.device.protocol import Device, Event
from horizon_server.engine.lane_sums import LaneGradients, LaneSums, Leaf, RowExchange
from horizon_server.engine.lanes import sum_lanes
from horizon_server.engine.optimizer import IsFinite, Optimizer
from horizon_server.engine.paged_experts import NO_PAGES, Paging
from horizon_server.engine.paged_gradients import PagedGradients
from horizon_server.engine.ranks import ALONE, Ranks
from horizon_server.engine.row_sum import RowSum
from horizon_server.engine.slot_ring import Slot, SlotRings
from horizon_server.engine.template import Template
from horizon_server.engine.unit_gradients import UnitGradients
from horizon_server.store.adamw import RowGradient, add_gradient, sum_squares
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import UnitLayout
from horizon_server.store.ownership import length


class GradientSink:
    """A ring of gradient slots for layers, and one slot for head and embedding.

    On the host a gradient lands in the store's `grad` plane, which keeps all of them until the norm is known. A store
    without one has a few slots instead: a landed gradient is updated from at once, and its slot is free after that, so
    gradients never add up there. Where few rows of the embedding are used (`StoreLayout.has_row_gradients`), theirs
    land one after the other in a buffer of their own.

    Where a step's gradients come by several passes (`adds_up`), those of the first land in the plane, those of the next
    in a few slots as above, from which the optimizer's queue adds them to the plane. Nothing crosses the link twice.

    `square_sums` holds, per unit and after the device is idle, the float64 sum of squares of its gradient: not finite
    when an element is not. `reached` are the stored tensors that got a gradient in the step begun last, `row_gradient`
    the embedding's in it. Of several passes, they are of their sum, once the optimizer's queue is idle too. Thread:
    compute adds to `reached`.
    """

    def __init__(
        self,
        template: Template,
        store: HostStore,
        device: Device,
        optimizer: Optimizer,
        *,
        num_slots: int,
        ranks: Ranks = ALONE,
        num_lanes: int = 1,
        wire: torch.dtype = torch.float32,
        adds_up: bool = False,
        num_add_threads: int = 1,
        paging: Paging = NO_PAGES,
    ) -> None:
        """With `adds_up`, the gradients of a pass may be added to those of the passes before it, by that many
        threads."""
        is_fit = num_lanes == 1 and ranks.is_alone and store.grad_dtype is torch.float32
        assert is_fit or not adds_up, "gradients add up on one device, in one lane, in a plane of fp32"
        self._template, self._store, self._device, self._optimizer = template, store, device, optimizer
        self._ranks, self._num_lanes, self._paging = ranks, num_lanes, paging
        units = template.layout.units
        ownership = ranks.ownership(template.layout)
        # This rank's part of each unit's trained elements.
        self._owned = [ownership.trained(unit.index)[ranks.rank] for unit in units]
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
            elements_of=self._elements_of,
            num_slots=num_slots,
            edge_elements=max(units[0].trained_elements, template.layout.head_gradient_elements),
        )
        self._paged: PagedGradients | None = None
        if paging.layers:
            self._paged = PagedGradients(paging, device, num_slots=num_slots, num_threads=num_add_threads)
        self._lanes: LaneSums | None = None
        self._lane_numbers = torch.empty(0)
        if num_lanes > 1:
            self._lane_numbers = device.allocate_host("staging", 2 * ownership.num_numbers, torch.float64)
            self._lanes = LaneSums(
                template,
                device,
                ranks,
                num_lanes=num_lanes,
                numbers=self._lane_numbers,
                wire=wire,
            )
        self._landing: SlotRings | None = None
        self._has_rows = template.layout.has_row_gradients
        assert not self._has_rows or template.embeds_by_rows, "a unit that is a table alone is looked up by rows"
        self._row_values = self._allocate_row_values(0)
        self._row_gradient: RowGradient | None = None
        self._row_sum: RowSum | None = None
        if adds_up and self._has_rows:
            self._row_sum = RowSum(template.vocab_size, template.hidden_size)
        self._num_add_threads = num_add_threads
        self._adds = False
        # One set, which the optimizer's queue alone writes to.
        self._added_squares = torch.zeros(len(units), dtype=torch.float64)
        self._rows_added: Event | None = None
        if store.grad_dtype is None or adds_up:
            self._landing = SlotRings(
                device,
                units,
                allocate=lambda num_elements: device.allocate_host(
                    "staging", num_elements, store.grad_dtype or device.gradient_dtype
                ),
                give_back=device.free_host,
                elements_of=lambda unit: length(self._owned[unit.index]),
                num_slots=num_slots,
                edge_elements=max(
                    length(self._owned[unit.index])
                    for unit in units
                    if unit.kind == "head" or (unit.kind == "embedding" and not self._has_rows)
                ),
            )
        assert not (adds_up and optimizer.states.holds_any), "gradients add up in host memory"
        self._open: dict[int, Slot] = {}
        # Of paged layers, where their parts land one after the other.
        self._landed: dict[int, Slot] = {}
        # Of the gradients that the step begun last has sent.
        self._checks: tuple[IsFinite, ...] = ()
        self._square_sums: Tensor | None = None
        self.reached: set[str] = set()

    @property
    def square_sums(self) -> Tensor:
        """Of the step begun last. Shapes: [units]."""
        if self._adds:
            return self._added_squares
        if self._lanes is None:
            return self._sets[self._set, 1:]
        if self._square_sums is None:
            units = self._template.layout.units
            sums = [self._lanes.square_sum(unit.index) if unit.trained_elements else 0.0 for unit in units]
            self._square_sums = torch.tensor(sums, dtype=torch.float64)
        return self._square_sums

    @property
    def row_gradient(self) -> RowGradient | None:
        """The embedding's gradient, where it is kept as rows."""
        return self._row_gradient if self._row_sum is None else self._row_sum.gradient

    def all_reached(self) -> set[str]:
        """The tensors that got a gradient, on any rank. Once all gradients are on the host."""
        if self._lanes is not None:
            for unit in self._template.layout.units:
                if unit.trained_elements:
                    self.reached |= self._lanes.reached(unit.index)
        return self.reached

    def meet(self) -> None:
        """Have what other ranks know of the gradients, once all of them are on the host."""
        if self._lanes is not None:
            self._lanes.meet()
        if self._paged is not None:
            self._paged.meet()

    @property
    def loss(self) -> float:
        """The loss that came back last. The device must be idle, or past the head's gradient."""
        return float(self._sets[self._set, 0])

    def reserve(self, num_tokens: int) -> None:
        """Make room for the embedding's gradient in a step of this number of tokens, of all ranks; the queues must be
        idle but for the optimizer's."""
        if self._lanes is not None:
            self._lanes.reserve(num_tokens)
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

    def start_step(self, rows: RowExchange | None = None, *, adds: bool = False) -> None:
        """Forget the last step's numbers, so that a trained unit that sends no gradient is noticed. `rows` are those
        of the embedding, in a step of several lanes. With `adds`, the pass is a further one of the same step: its
        gradients are added to those of the passes before."""
        self._adds, self._checks = adds, ()
        self._set = 1 - self._set
        self._sets[self._set].fill_(torch.nan)
        if self._lanes is not None:
            self._square_sums = None
            self._lanes.start_step(rows)
        else:
            for unit in self._template.layout.units:
                if not unit.trained_elements:
                    self._sets[self._set, 1 + unit.index] = 0
        if not adds:
            # A new one, because updates of the last step may still look at theirs.
            self.reached = set()

    def open(self, unit_index: int, rows_R: Tensor | None = None) -> LaneGradients | None:
        """Memory for a unit's gradients in each lane, None where it has none; compute waits until it is free. With
        `rows_R` it is zeros for these rows of the embedding.
        """
        if not self._has_gradient(unit_index):
            return None
        template, units, compute = self._template, self._template.layout.units, self._device.compute
        places, unit = template.places[unit_index], units[unit_index]
        zeroed: list[slice] = []
        if self._lanes is None and unit_index == 0 and template.layout.shares_gradient:
            # A table that serves as projection too has the head's part of its gradient in the head's slot, which stayed
            # for it.
            slot = self._open[0] = self._open.pop(len(units) - 1)
            flat = slot.flat[units[-1].num_elements : template.layout.head_gradient_elements]
            places = template.places_besides_table
        else:
            slot = self._open[unit_index] = self._rings.take(unit_index, compute)
            flat = slot.flat
            if unit_index in self._paging.layers:
                places, unit = self._paging.layers[unit_index].rest_places, replace(unit, tensors=())
                # With the gaps of the unit, which are read with the rest.
                compute.submit(flat.zero_, label=f"zero gradient {unit_index}")
            if unit.kind == "head" and template.layout.shares_gradient:
                zeroed = self._around_table()
        if rows_R is not None:
            # Not the whole slot: a table of many rows is far larger than what a step uses of it.
            flat, places = flat[: rows_R.numel() * template.hidden_size], []
        flats: Sequence[Tensor] = [flat]
        leaves: Sequence[Leaf] = [Leaf()]
        if self._lanes is not None:
            if rows_R is None:
                # So that no more is added up than what was computed.
                is_head = unit.kind == "head"
                flat = flat[: template.layout.head_gradient_elements if is_head else unit.trained_elements]
            flats, leaves = self._lanes.buffers(unit_index, flat), self._lanes.leaves(unit_index)
        return LaneGradients(
            lanes=[UnitGradients(places, flats[leaf.buffer], unit, reached=self.reached) for leaf in leaves],
            leaves=leaves,
            flats=flats,
            compute=compute,
            label=f"backward {unit_index}",
            zeroed=zeroed,
        )

    def start_table(self, gradients: UnitGradients, rows_R: Tensor | None = None) -> None:
        """Zero the embedding's table, or the rows that `rows_R` picks, where the gradients of tokens are added to it,
        in one lane."""
        template = self._template
        if rows_R is not None:
            self._device.compute.submit(gradients.flat.zero_, label="zero gradient 0")
        elif template.table_place.has_gradient and not (self._lanes is None and template.tied):
            self._device.compute.submit(
                partial(gradients.start_from_zero, template.table_place), label="zero gradient 0"
            )

    def _around_table(self) -> list[slice]:
        """What the head's slot has of the embedding's unit besides the table."""
        head, unit = self._template.layout.units[-1], self._template.layout.units[0]
        table = self._template.layout.find(self._template.embedding_name)[1]
        start, end = head.num_elements, head.num_elements + unit.trained_elements
        return [slice(start, start + table.offset), slice(start + table.offset + table.num_elements, end)]

    def send_loss(self, loss: Tensor) -> None:
        """Send the loss, ahead of the gradients of the same step. Shapes: [lanes of this rank]."""
        device, ranks = self._device, self._ranks
        device.d2h.wait(device.compute.record())
        if self._num_lanes == 1:
            device.read_back(loss[0], self._sets[self._set, 0])
            return
        total = device.place(torch.zeros((), dtype=torch.float64))

        def add_up() -> None:
            lanes = ranks.lanes(self._num_lanes)
            own = loss.new_zeros(self._num_lanes)
            own[lanes[ranks.rank].start : lanes[ranks.rank].stop] = loss
            of_ranks = ranks.collect(own, "d2h")
            of_lanes = [of_rank[range_.start : range_.stop] for of_rank, range_ in zip(of_ranks, lanes, strict=True)]
            total.copy_(sum_lanes(torch.cat(of_lanes)))

        num_others = ranks.num_ranks - 1
        device.d2h.submit(
            add_up,
            num_bytes=num_others * self._num_lanes * loss.itemsize,
            label="loss",
            collective="numbers" if num_others else None,
        )
        device.read_back(total, self._sets[self._set, 0])

    def send(self, unit_index: int, rows_R: Tensor | None = None) -> None:
        """Send what compute has accumulated since `open`; with `rows_R` these rows of the embedding, one after the
        other."""
        if not self._has_gradient(unit_index):
            return
        if self._lanes is not None:
            self._send_lanes(self._lanes, unit_index, rows_R)
            return
        if self._paged is not None and unit_index in self._paging.layers:
            self._send_paged(self._paged, unit_index)
            return
        device, template, unit = self._device, self._template, self._template.layout.units[unit_index]
        slot, landing, stays = self._open[unit_index], None, self._optimizer.states.holds(unit_index)
        if rows_R is not None:
            gradient = slot.flat[: rows_R.numel() * template.hidden_size].view(-1, template.hidden_size)
            target = self._row_values[: gradient.numel()]
            self._row_gradient = RowGradient(rows_R=rows_R, values_RD=target.view_as(gradient))
        else:
            if not unit.trained_elements:
                # A head that is frozen but for the table that it shares, whose gradient follows.
                return
            shares = template.layout.shares_gradient
            start = template.layout.units[-1].num_elements if unit_index == 0 and shares else 0
            gradient = slot.flat[start : start + unit.trained_elements]
            if stays:
                target = self._optimizer.states.gradient(unit_index)
            elif self._landing is not None and self._lands:
                landing = self._landing.take(unit_index, device.d2h)
                target = landing.flat[: unit.trained_elements]
            else:
                target = self._store.unit(unit_index, "grad")
        if unit_index == 0:
            # Its update may be the only one of the last step that is not over yet: all others were, before their unit's
            # forward.
            self._optimizer.wait_for_update(device.d2h, 0)
            if self._rows_added is not None:
                device.d2h.wait(self._rows_added)
        # In the queue: the caller continues with the next unit while compute still fills the slot.
        device.d2h.wait(device.compute.record())
        # Views of this step's set, because the update may ask when the next step has begun with the other one.
        loss, square_sum, reached = self._sets[self._set, 0], self.square_sums[unit_index], self.reached
        if stays:
            # An update may still read what was there before.
            self._optimizer.wait_for_states(device.d2h)
            device.keep_gradient(gradient, target, square_sum, label=f"gradient {unit_index}")
        elif self._adds:
            device.download(gradient.view(-1), target, label=f"gradient {unit_index}")
        else:
            device.download_unit(gradient, target, square_sum, label=f"gradient {unit_index}")
        if self._store.grad_dtype is not None and not stays:
            self._enqueue_sum(unit_index, target, None if rows_R is None else self._row_gradient)
        elif self._store.grad_dtype is None:
            self._optimizer.update_landed(
                unit_index,
                target if rows_R is None or self._row_gradient is None else self._row_gradient,
                device.d2h.record(),
                self._until_now(lambda: math.isfinite(loss) and math.isfinite(square_sum)),
                lambda: reached,
            )
        if landing is not None and self._landing is not None:
            # To the queue of the update or the sum and not to d2h: that still reads it when the copy is over.
            self._landing.release(landing, self._optimizer.queue)
        if not (unit.kind == "head" and template.layout.shares_gradient):
            self._rings.release(self._open.pop(unit_index), device.d2h)

    def open_page(self, unit_index: int, number: int) -> Tensor | None:
        """Zeros for the gradients of a page of a layer's experts, between `open` and `send` of the layer; None where
        they have none. Shapes: [page's trained elements], fp32."""
        if self._paged is None or not self._has_gradient(unit_index):
            return None
        return self._paged.open(unit_index, number)

    def send_page(self, unit_index: int, number: int) -> None:
        """Send what compute has accumulated since `open_page`."""
        assert self._paged is not None, "open_page came first"
        self._paged.send(unit_index, number, self._target_of(unit_index))

    @property
    def _lands(self) -> bool:
        """Whether gradients of this pass land in slots, and not where they stay."""
        return self._adds or self._store.grad_dtype is None

    def _target_of(self, unit_index: int) -> Tensor:
        """Where the gradient of a paged layer lands, part by part."""
        if self._landing is None or not self._lands:
            return self._store.unit(unit_index, "grad")
        if unit_index not in self._landed:
            self._landed[unit_index] = self._landing.take(unit_index, self._device.d2h)
        return self._landed[unit_index].flat[: self._template.layout.units[unit_index].trained_elements]

    def _send_paged(self, paged: PagedGradients, unit_index: int) -> None:
        """Send the rest of a layer, whose pages have been sent."""
        device, target, slot = self._device, self._target_of(unit_index), self._open.pop(unit_index)
        device.d2h.wait(device.compute.record())
        paged.download(self._paging.layers[unit_index].unit.rest, slot.flat, target, unit_index)
        self._rings.release(slot, device.d2h)
        loss, square_sum, reached = self._sets[self._set, 0], self.square_sums[unit_index], self.reached
        if self._adds:
            # With the squares of the sum.
            self._enqueue_sum(unit_index, target, None)
        else:
            summed = paged.sum(target, square_sum, unit_index)
        if self._store.grad_dtype is None:
            self._optimizer.update_landed(
                unit_index,
                target,
                summed,
                self._until_now(lambda: math.isfinite(loss) and math.isfinite(square_sum)),
                lambda: reached,
            )
        if self._landing is not None and self._lands:
            self._landing.release(self._landed.pop(unit_index), self._optimizer.queue)

    def _elements_of(self, unit: UnitLayout) -> int:
        rest = self._paging.rest(unit.index)
        return unit.trained_elements if rest is None else rest.trained_elements

    def _until_now(self, is_finite: IsFinite) -> IsFinite:
        """Whether all that the step has sent is finite, up to what `is_finite` looks at."""
        checks = self._checks = (*self._checks, is_finite)
        return lambda: all(check() for check in checks)

    def _enqueue_sum(self, unit_index: int, landed: Tensor, rows: RowGradient | None) -> None:
        """Add what lands of a unit to what the passes before it have left, where this step may have several."""
        queue, row_sum, adds, num_threads = self._optimizer.queue, self._row_sum, self._adds, self._num_add_threads
        square_sum = self._added_squares[unit_index]

        def add() -> None:
            total = self._store.unit(unit_index, "grad")
            square_sum.fill_(add_gradient(total, landed, num_threads=num_threads).value)

        def add_rows(row_sum: RowSum, rows: RowGradient) -> None:
            if not adds:
                row_sum.forget()
            row_sum.add(rows)
            if adds:
                values = row_sum.gradient.values_RD.view(-1)
                square_sum.fill_(sum_squares(values, num_threads=num_threads).value)

        if rows is not None and row_sum is not None:
            # Those of the first pass too: the next one's land in the same memory.
            queue.wait(self._device.d2h.record())
            queue.submit(partial(add_rows, row_sum, rows), label=f"add gradient {unit_index}")
            self._rows_added = queue.record()
        elif rows is None and adds:
            queue.wait(self._device.d2h.record())
            queue.submit(add, label=f"add gradient {unit_index}")

    def _send_lanes(self, lanes: LaneSums, unit_index: int, rows_R: Tensor | None) -> None:
        """Send this rank's part of the sum over all lanes to the host."""
        device, template, unit = self._device, self._template, self._template.layout.units[unit_index]
        slot, landing, owned = self._open.pop(unit_index), None, self._owned[unit_index]
        stays = self._optimizer.states.holds(unit_index)
        device.d2h.wait(device.compute.record())
        if unit.kind == "head" and template.layout.shares_gradient:
            lanes.keep_table(slot.flat, unit.num_elements)
        if unit.trained_elements:
            if unit_index == 0:
                self._optimizer.wait_for_update(device.d2h, 0)
            reached, loss = self.reached, self._sets[self._set, 0]
            if rows_R is None:
                gradient = lanes.sum_unit(unit_index, slot.flat, reached)
            else:
                gradient = lanes.sum_rows(slot.flat, reached)
            is_rows = unit_index == 0 and self._has_rows
            if is_rows:
                assert lanes.rows is not None, "start_step came first"
                target = self._row_values[: gradient.numel()]
                self._row_gradient = RowGradient(
                    rows_R=lanes.rows.own_U, values_RD=target.view(-1, template.hidden_size)
                )
            elif stays:
                target = self._optimizer.states.gradient(unit_index)
                self._optimizer.wait_for_states(device.d2h)
            elif self._landing is not None:
                landing = self._landing.take(unit_index, device.d2h)
                target = landing.flat[: length(owned)]
            else:
                target = self._store.unit(unit_index, "grad")[owned]
            if stays:
                device.keep_gradient(gradient, target, None, label=f"gradient {unit_index}")
            else:
                device.download(gradient, target, label=f"gradient {unit_index}")
            if self._landing is not None:
                at = lanes.numbers_of(unit_index)
                self._optimizer.update_landed(
                    unit_index,
                    self._row_gradient if is_rows and self._row_gradient is not None else target,
                    device.d2h.record(),
                    self._until_now(lambda: math.isfinite(loss) and bool(torch.isfinite(at.squares).all())),
                    lambda: reached | at.reached(),
                )
                if landing is not None:
                    self._landing.release(landing, self._optimizer.queue)
        lanes.sent_extras(unit_index)
        self._rings.release(slot, device.d2h)

    def _has_gradient(self, unit_index: int) -> bool:
        layout = self._template.layout
        unit = layout.units[unit_index]
        return unit.trained_elements > 0 or (unit.kind == "head" and layout.shares_gradient)

    def deal(self) -> None:
        """The ranks have other lanes from now on. The queues must be idle but for the optimizer's."""
        if self._lanes is not None:
            self._lanes.deal()

    def open_slots(self) -> None:
        """Have slots on the device again after `close_slots`."""
        self._rings.open()
        if self._paged is not None:
            self._paged.open_slots()
        if self._lanes is not None:
            self._lanes.open()

    def close_slots(self) -> None:
        """Free the slots on the device. The queues must be idle but for the optimizer's, whose updates read host memory
        alone."""
        self._rings.close()
        if self._paged is not None:
            self._paged.close_slots()
        if self._lanes is not None:
            self._lanes.close()

    def close(self) -> None:
        """Free all memory. The queues must be idle."""
        self.close_slots()
        self._device.free_host(self._numbers)
        if self._lanes is not None:
            self._device.free_host(self._lane_numbers)
        self._device.free_host(self._row_values)
        if self._landing is not None:
            self._landing.close()

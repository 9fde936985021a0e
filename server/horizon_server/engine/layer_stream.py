"""Weights on their way to the device: each unit is copied into a slot ahead of its use and forgotten after it, unless
it is used again before another unit needs the slot. Layers that are resident, and a resident head, have a slot of their
own; what is trained of them is copied once after each update. Packed weights and a table that stay on the device are
copied once; from there, layers are unpacked into the slots that they pass through, and rows are gathered.

Shapes: R = rows of the embedding in use.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from horizon_server import progress
from horizon_server.engine.device.protocol import Device, Event
from horizon_server.engine.lane_sums import RowExchange
from horizon_server.engine.optimizer import Optimizer
from horizon_server.engine.paged_experts import NO_PAGES, Paging
from horizon_server.engine.ranks import ALONE, Ranks
from horizon_server.engine.slot_ring import PageRing, Slot, SlotRings
from horizon_server.engine.template import Template
from horizon_server.planning.residency import has_frozen_table, packed_units, resident_units
from horizon_server.records.execution import NOTHING_STAYS, Residency
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import UnitLayout
from horizon_server.store.ownership import length

_NEVER: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class UnitRequest:
    """One unit wanted on the device. `rows_R` picks rows of the embedding; other units come whole. Of several ranks,
    `exchange` says which rows each of them uses."""

    unit_index: int
    rows_R: Tensor | None = None
    exchange: RowExchange | None = None


class LayerStream:
    """Streams units from the host store in the order the schedule asks for them; `optimizer` says when a unit may be
    read."""

    def __init__(
        self,
        template: Template,
        store: HostStore,
        device: Device,
        optimizer: Optimizer,
        *,
        num_slots: int,
        residency: Residency = NOTHING_STAYS,
        ranks: Ranks = ALONE,
        paging: Paging = NO_PAGES,
    ) -> None:
        assert num_slots >= 1
        assert not (paging.layers and (residency.resident_layers or residency.packed_layers)), "a page stays nowhere"
        has_ends = residency.resident_head or residency.resident_table
        assert ranks.is_alone or not has_ends, "rows that ranks exchange come from the store"
        assert has_frozen_table(template.layout) or not residency.resident_table, "its rows would have to come again"
        self._ranks, self._ownership = ranks, ranks.ownership(template.layout)
        self._sent_rows: Tensor | None = None
        self._template, self._store, self._device, self._optimizer = template, store, device, optimizer
        self._num_slots = num_slots
        self.paging = paging
        """Whose experts come by `page`, and not with their layer."""
        units = template.layout.units
        # Resident unit -> how often what it is made of had been updated when it was copied.
        self._copied: dict[int, tuple[int, ...]]
        self._copied = {unit.index: _NEVER for unit in resident_units(template.layout, residency.resident_layers)}
        if residency.resident_head:
            self._copied[units[-1].index] = _NEVER
        # Where compute is in fp32, all weights come exact.
        exact = template.exact_elements if device.compute_dtype != torch.float32 else lambda *, in_layers: 0
        head_elements = template.head_elements + exact(in_layers=False)
        edge_elements = units[0].num_elements + exact(in_layers=False)
        self._rings = SlotRings(
            device,
            units,
            allocate=lambda num_elements: device.allocate("weights", num_elements, device.compute_dtype),
            give_back=device.free,
            elements_of=lambda unit: head_elements if unit.kind == "head" else self._elements_of(unit),
            num_slots=num_slots,
            edge_elements=edge_elements if residency.resident_head else max(edge_elements, head_elements),
            more_layer_elements=exact(in_layers=True),
            resident=self._copied,
        )
        self._pages = PageRing(
            device,
            allocate=lambda: device.allocate("weights", paging.page_elements, device.compute_dtype),
            give_back=device.free,
        )
        self._open_pages()
        self._residency = residency
        # What stays beside the slots, by unit, and whether it has been copied.
        self._frozen: dict[int, Tensor] = {}
        self._is_filled: dict[int, bool] = {}
        self._open_frozen()

    def walk(self, requests: Sequence[UnitRequest]) -> Iterator[tuple[UnitRequest, Tensor]]:
        """Each request with its flat weights, in order; compute waits for the copy, the caller does not.

        The weights are good for work submitted to compute before the next item is asked for.
        """
        # Now, and not when a unit is asked for: within a pass, an update of a unit comes after its last use.
        for unit_index, copied in self._copied.items():
            if copied != self._num_updates(unit_index):
                self._rings.forget(unit_index)
        order = list(range(len(requests)))
        # Layer 0 comes up ahead of the embedding: h2d copies in order, its update is the first to end (see
        # Optimizer.submit), and its copy hides behind the update of the rows. Both are needed before the first layer
        # can run; they have slots of their own.
        order[:2] = reversed(order[:2])
        fetched: dict[int, tuple[Slot, Event | None]] = {}
        for position, request in enumerate(requests):
            # As far ahead as slots are free: with two of them, the next unit is copied while this one computes.
            while order and self._rings.available(requests[order[0]].unit_index):
                if order[0] > position and self._comes_last(requests, order[0]):
                    break
                fetched[order[0]] = self._fetch(requests, order[0])
                del order[0]
            slot, ready = fetched.pop(position)
            if ready is not None:
                self._device.compute.wait(ready)
            progress.advance()
            yield request, slot.flat
            self._rings.release(slot, self._device.compute)

    @contextmanager
    def page(self, unit_index: int, number: int, experts: Collection[int] | None = None) -> Iterator[Tensor]:
        """A page of a layer's experts, of which those that are not among `experts` may hold anything; while its layer
        is the item of `walk` that was asked for last.

        The weights are good for work submitted to compute within the block. The next page is copied while this one
        computes, because the caller never waits for compute.
        """
        device, part = self._device, self.paging.layers[unit_index].unit.pages[number]
        slot = self._pages.take(device.h2d)
        # For a layer's first page, the copy of its rest has waited for the update already.
        device.upload_spans(self._store, unit_index, list(part.runs(experts)), slot.flat)
        device.compute.wait(device.h2d.record())
        progress.advance()
        yield slot.flat
        self._pages.release(slot, device.compute)

    def _elements_of(self, unit: UnitLayout) -> int:
        rest = self.paging.rest(unit.index)
        return unit.num_elements if rest is None else rest.num_elements

    def _open_pages(self) -> None:
        if self.paging.layers:
            self._pages.open(self._num_slots)

    def forget(self) -> None:
        """Copy everything again, because the store has changed other than by an update. The queues must be idle."""
        self._copied = dict.fromkeys(self._copied, _NEVER)
        self._is_filled = dict.fromkeys(self._is_filled, False)

    def open(self) -> None:
        """Have slots again after `close`, and copy everything again."""
        self._rings.open()
        self._open_pages()
        self._open_frozen()
        self.forget()

    def close(self) -> None:
        """Free the slots. The queues must be idle."""
        self._rings.close()
        self._pages.close()
        for memory in self._frozen.values():
            self._device.free(memory)
        self._frozen.clear()
        if self._sent_rows is not None:
            self._device.free(self._sent_rows)
            self._sent_rows = None

    def reserve(self, rows: RowExchange) -> None:
        """Make room for the rows that other ranks use in a pass. The queues must be idle."""
        num_elements = sum(sent.numel() for sent in rows.sent) * self._template.hidden_size
        if self._sent_rows is None or self._sent_rows.numel() < num_elements:
            if self._sent_rows is not None:
                self._device.free(self._sent_rows)
            self._sent_rows = self._device.allocate("weights", num_elements, self._device.compute_dtype)

    def _fetch(self, requests: Sequence[UnitRequest], position: int) -> tuple[Slot, Event | None]:
        """A slot for a request, and the event after which its weights are there; None where they never left."""
        device, template, units = self._device, self._template, self._template.layout.units
        request = requests[position]
        slot = self._rings.take(request.unit_index, device.h2d)
        was_kept = slot.kept_for is not None
        slot.kept_for = request.unit_index if self._stays(requests, position) else None
        if was_kept:
            if not self._optimizer.states.holds(request.unit_index):
                return slot, None
            # Updated where it is.
            self._optimizer.wait_for_update(device.h2d, request.unit_index)
            return slot, device.h2d.record()
        # What is frozen of a resident layer stays as it is.
        only_trained = self._copied.get(request.unit_index, _NEVER) != _NEVER
        if request.unit_index in self._copied:
            self._copied[request.unit_index] = self._num_updates(request.unit_index)
        start = 0
        for index in self._made_of(request.unit_index):
            # The copy waits in its queue for the last step's update of this unit alone, so that the others update
            # meanwhile.
            owned_U = request.rows_R if request.exchange is None else request.exchange.own_U
            self._optimizer.wait_for_update(device.h2d, index, owned_U)
            if request.exchange is not None:
                self._exchange_rows(request.exchange, slot.flat)
            elif request.rows_R is not None:
                rows_RD = slot.flat[: request.rows_R.numel() * template.hidden_size].view(-1, template.hidden_size)
                table_VD = self._table_on_device()
                if table_VD is not None:
                    device.gather_rows(table_VD, request.rows_R, rows_RD)
                else:
                    device.upload_rows(self._store, template.embedding_name, request.rows_R, rows_RD)
            elif (rest := self.paging.rest(index)) is not None:
                device.upload_spans(self._store, index, list(rest.runs()), slot.flat)
            else:
                end = start + units[index].num_elements
                self._upload(index, slot.flat[start:end], only_trained=only_trained)
                start = end
        if self._optimizer.states.holds(request.unit_index):
            self._optimizer.states.fill(request.unit_index, slot.flat)
        if device.compute_dtype != torch.float32:
            pieces = template.exact_pieces(request.unit_index)
            if pieces:
                self._optimizer.wait_for_ranks(device.h2d, request.unit_index)
            for piece in pieces:
                device.upload_exact(self._store, request.unit_index, piece.piece.read, piece.end_of(slot.flat))
        return slot, device.h2d.record()

    def _upload(self, index: int, flat: Tensor, *, only_trained: bool) -> None:
        """Append the copy of a unit, this rank's part or all of it, once all ranks have updated theirs."""
        device, ranks, packed = self._device, self._ranks, self._frozen.get(index)
        if packed is not None and not self._is_filled[index]:
            device.upload_packed(self._store, index, packed)
            self._is_filled[index] = True
        if not ranks.gathers:
            self._optimizer.wait_for_ranks(device.h2d, index)
            device.upload_unit(self._store, index, flat, only_trained=only_trained, packed=packed)
            return
        divisions = [self._ownership.trained(index)]
        if not only_trained:
            divisions.append(self._ownership.frozen(index))
        parts = [parts[ranks.rank] for parts in divisions]
        device.upload_unit(self._store, index, flat, only_trained=only_trained, parts=parts, packed=packed)
        for division in divisions:
            if division[-1].stop > division[0].start:
                others = division[-1].stop - division[0].start - length(division[ranks.rank])
                device.h2d.submit(
                    partial(ranks.complete, flat, division, "h2d"),
                    num_bytes=others * flat.itemsize,
                    label=f"gather unit {index}",
                    collective="weights",
                )

    def _made_of(self, unit_index: int) -> list[int]:
        """The units whose weights are in a unit's slot: a tied head computes with the table, which is in another unit
        with an update of its own."""
        is_head = self._template.layout.units[unit_index].kind == "head"
        return [unit_index, 0] if is_head and self._template.tied else [unit_index]

    def _num_updates(self, unit_index: int) -> tuple[int, ...]:
        return tuple(self._optimizer.num_updates(index) for index in self._made_of(unit_index))

    def _open_frozen(self) -> None:
        """Take the memory of packed weights and of a table that stay beside the slots."""
        layout, device = self._template.layout, self._device
        for unit in packed_units(layout, self._residency):
            self._frozen[unit.index] = device.allocate("weights", unit.packed_bytes, torch.uint8)
        if self._residency.resident_table:
            self._frozen[0] = device.allocate("weights", layout.units[0].num_elements, device.compute_dtype)
        self._is_filled = dict.fromkeys(self._frozen, False)

    def _table_on_device(self) -> Tensor | None:
        """The embedding's table, where all of it is on the device as it is in the store."""
        layout, width = self._template.layout, self._template.hidden_size
        head = layout.units[-1]
        if self._residency.resident_table:
            table = self._frozen[0]
            if not self._is_filled[0]:
                self._device.upload_unit(self._store, 0, table)
                self._is_filled[0] = True
        elif self._template.tied and self._copied.get(head.index) == self._num_updates(head.index):
            # Trained, it is there from a step's head on. Before that, the rows in use are updated first and need not
            # wait for all others.
            table = self._rings.flat_of(head.index)[head.num_elements :]
        else:
            return None
        place = layout.find(self._template.embedding_name)[1]
        return table[place.offset : place.offset + place.num_elements].view(-1, width)

    def _exchange_rows(self, rows: RowExchange, flat: Tensor) -> None:
        """Append the journey of embedding rows from the ranks that own them to those that use them."""
        device, width = self._device, self._template.hidden_size
        sent_rows = torch.cat(list(rows.sent))
        assert self._sent_rows is not None, "reserve comes first"
        sent = self._sent_rows[: sent_rows.numel() * width]
        device.upload_rows(self._store, self._template.embedding_name, sent_rows, sent.view(-1, width))
        received = flat[: rows.rows_R.numel() * width]
        sizes = [used.numel() * width for used in rows.sent]
        work = partial(self._ranks.exchange, received, sent, [count * width for count in rows.received], sizes, "h2d")
        others = rows.rows_R.numel() - rows.received[self._ranks.rank]
        num_bytes = others * width * received.itemsize
        device.h2d.submit(work, num_bytes=num_bytes, label="exchange of rows", collective="rows")

    def _comes_last(self, requests: Sequence[UnitRequest], position: int) -> bool:
        """Whether a request is fetched when it is asked for, and not before: rows for the end of backward, where ranks
        divide a step by layers. All ranks take part in it, and hidden states behind it would wait for the slowest."""
        return self._ranks.by_layers and position > 0 and requests[position].unit_index == 0

    def _stays(self, requests: Sequence[UnitRequest], position: int) -> bool:
        """Whether a layer is asked for again before its slot's turn comes, as the last ones are where forward turns
        into backward."""
        units, layer, between = self._template.layout.units, requests[position].unit_index, set()
        if layer in self._copied:
            return True
        if units[layer].kind != "layer":
            return False
        for request in requests[position + 1 :]:
            if request.unit_index == layer:
                return True
            if units[request.unit_index].kind == "layer" and request.unit_index not in self._copied:
                between.add(request.unit_index)
            if len(between) == self._num_slots:
                break
        return False

"""Weights on their way to the device: each unit is copied into a slot ahead of its use and forgotten after it, unless
it is used again before another unit needs the slot. Layers that are resident have a slot of their own; what is trained
of them is copied once after each update.

Shapes: R = rows of the embedding in use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from horizon_server import progress
from horizon_server.engine.device.protocol import Device, Event
from horizon_server.engine.lane_sums import RowExchange
from horizon_server.engine.optimizer import Optimizer
from horizon_server.engine.ranks import ALONE, Ranks
from horizon_server.engine.slot_ring import Slot, SlotRings
from horizon_server.engine.template import Template
from horizon_server.planning.residency import resident_units
from horizon_server.store.host_store import HostStore
from horizon_server.store.ownership import length


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
        resident_layers: int = 0,
        resident_head: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        """`resident_head` is for weights that nothing updates while the slots are open."""
        assert num_slots >= 1
        self._ranks, self._ownership = ranks, ranks.ownership(template.layout)
        self._sent_rows: Tensor | None = None
        self._template, self._store, self._device, self._optimizer = template, store, device, optimizer
        self._num_slots = num_slots
        units = template.layout.units
        # Resident unit -> how often it had been updated when it was copied.
        self._copied = {unit.index: -1 for unit in resident_units(template.layout, resident_layers)}
        if resident_head:
            self._copied[units[-1].index] = -1
        # Where compute is in fp32, all weights come exact.
        exact = template.exact_elements if device.compute_dtype != torch.float32 else lambda *, in_layers: 0
        head_elements = template.head_elements + exact(in_layers=False)
        self._rings = SlotRings(
            device,
            units,
            allocate=lambda num_elements: device.allocate("weights", num_elements, device.compute_dtype),
            give_back=device.free,
            elements_of=lambda unit: head_elements if unit.kind == "head" else unit.num_elements,
            num_slots=num_slots,
            edge_elements=max(units[0].num_elements + exact(in_layers=False), head_elements),
            more_layer_elements=exact(in_layers=True),
            resident=self._copied,
        )

    def walk(self, requests: Sequence[UnitRequest]) -> Iterator[tuple[UnitRequest, Tensor]]:
        """Each request with its flat weights, in order; compute waits for the copy, the caller does not.

        The weights are good for work submitted to compute before the next item is asked for.
        """
        # Now, and not when a unit is asked for: within a pass, an update of a unit comes after its last use.
        for unit_index, num_updates in self._copied.items():
            if num_updates != self._optimizer.num_updates(unit_index):
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

    def forget(self) -> None:
        """Copy everything again, because the store has changed other than by an update. The queues must be idle."""
        self._copied = dict.fromkeys(self._copied, -1)

    def open(self) -> None:
        """Have slots again after `close`, and copy everything again."""
        self._rings.open()
        self.forget()

    def close(self) -> None:
        """Free the slots. The queues must be idle."""
        self._rings.close()
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
            return slot, None
        # What is frozen of a resident layer stays as it is.
        only_trained = self._copied.get(request.unit_index, -1) >= 0
        if request.unit_index in self._copied:
            self._copied[request.unit_index] = self._optimizer.num_updates(request.unit_index)
        indices, start = [request.unit_index], 0
        # A tied head computes with the table, which is in another unit with an update of its own.
        if units[request.unit_index].kind == "head" and template.tied:
            indices.append(0)
        for index in indices:
            # The copy waits in its queue for the last step's update of this unit alone, so that the others update
            # meanwhile.
            owned_U = request.rows_R if request.exchange is None else request.exchange.own_U
            self._optimizer.wait_for_update(device.h2d, index, owned_U)
            if request.exchange is not None:
                self._exchange_rows(request.exchange, slot.flat)
            elif request.rows_R is not None:
                rows_RD = slot.flat[: request.rows_R.numel() * template.hidden_size].view(-1, template.hidden_size)
                device.upload_rows(self._store, template.embedding_name, request.rows_R, rows_RD)
            else:
                end = start + units[index].num_elements
                self._upload(index, slot.flat[start:end], only_trained=only_trained)
                start = end
        if device.compute_dtype != torch.float32:
            pieces = template.exact_pieces(request.unit_index)
            if pieces:
                self._optimizer.wait_for_ranks(device.h2d, request.unit_index)
            for piece in pieces:
                device.upload_exact(self._store, request.unit_index, piece.piece.read, piece.end_of(slot.flat))
        return slot, device.h2d.record()

    def _upload(self, index: int, flat: Tensor, *, only_trained: bool) -> None:
        """Append the copy of a unit, this rank's part or all of it, once all ranks have updated theirs."""
        device, ranks = self._device, self._ranks
        if ranks.is_alone:
            device.upload_unit(self._store, index, flat, only_trained=only_trained)
            return
        if not ranks.gathers:
            self._optimizer.wait_for_ranks(device.h2d, index)
            device.upload_unit(self._store, index, flat, only_trained=only_trained)
            return
        divisions = [self._ownership.trained(index)]
        if not only_trained:
            divisions.append(self._ownership.frozen(index))
        parts = [parts[ranks.rank] for parts in divisions]
        device.upload_unit(self._store, index, flat, only_trained=only_trained, parts=parts)
        for division in divisions:
            if division[-1].stop > division[0].start:
                others = division[-1].stop - division[0].start - length(division[ranks.rank])
                device.h2d.submit(
                    partial(ranks.complete, flat, division, "h2d"),
                    num_bytes=others * flat.itemsize,
                    label=f"gather unit {index}",
                    collective="weights",
                )

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

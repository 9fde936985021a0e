"""Gradients of a step in several lanes: summed in a balanced tree, first the lanes of this rank, then over the ranks,
of which each gets the sum of the parts that it owns.

The lanes of a unit are computed one after the other. Each adds up in a buffer of its own, and is added to the one
before as soon as both are the two halves of a subtree. So a few buffers serve any number of lanes, and the first one,
the slot of the unit, ends with the sum. The subtrees that a rank can close by itself travel to the owners, who sum them
in the same tree. Where ranks divide a step by layers, the owner of a layer computes all of its lanes, and nothing of it
travels but its numbers, at the end of backward: in between, every rank would wait for the slowest at each layer.

Shapes: R = rows of the embedding that this rank uses, U = those that all ranks use of the rows that this rank owns,
D = hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from horizon_server.engine.device.protocol import Device, Event, Queue
from horizon_server.engine.lanes import StepRows, sum_subtrees
from horizon_server.engine.node_sums import NodeSums
from horizon_server.engine.ranks import Ranks
from horizon_server.engine.template import Template
from horizon_server.engine.unit_gradients import UnitGradients
from horizon_server.planning.lane_tree import Stack, Subtree, num_buffers, num_sums, roots_of, rounds_of
from horizon_server.store import reference
from horizon_server.store.ownership import NORM_BLOCK_ELEMENTS, length


@dataclass(frozen=True, kw_only=True)
class RowExchange:
    """Which rows of the embedding table travel in a step. All are ascending; `sent` and `received` have one item for
    each rank."""

    rows_R: Tensor
    """Those that this rank's tokens use."""
    own_U: Tensor
    """Those that tokens of any rank use, of those that this rank owns."""
    sent: tuple[Tensor, ...]
    """Those of this rank's rows that each rank uses."""
    received: tuple[int, ...]
    """How many of this rank's rows each rank owns."""
    num_owned: tuple[int, ...]
    """How many rows in use each rank owns."""

    @classmethod
    def of(cls, rows: StepRows, ranks: Ranks, owned: Sequence[range]) -> RowExchange:
        """Those of a step; `owned` are the rows of each rank."""
        lanes = ranks.lanes(len(rows.lanes))
        return cls.between([rows.rows_in_use(of_rank) for of_rank in lanes], ranks, owned)

    @classmethod
    def between(cls, used: Sequence[Tensor], ranks: Ranks, owned: Sequence[range]) -> RowExchange:
        """`used` are the rows that each rank uses."""
        in_use = torch.unique(torch.cat(list(used)))
        mine = owned[ranks.rank]
        return cls(
            rows_R=used[ranks.rank],
            own_U=_within(in_use, mine),
            sent=tuple(_within(rows, mine) for rows in used),
            received=tuple(_within(used[ranks.rank], range_).numel() for range_ in owned),
            num_owned=tuple(_within(in_use, range_).numel() for range_ in owned),
        )


def _within(rows: Tensor, owned: range) -> Tensor:
    """The rows of an ascending list that are in a range."""
    start, stop = (int(torch.searchsorted(rows, bound)) for bound in (owned.start, owned.stop))
    return rows[start:stop]


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """Where a lane of this rank adds up, and which buffers are added to the one before them at its end."""

    buffer: int = 0
    joins: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LaneGradients:
    """The gradients of one unit, lane by lane of this rank.

    Thread: the driver's; what it submits runs on compute.
    """

    lanes: Sequence[UnitGradients]
    leaves: Sequence[Leaf]
    flats: Sequence[Tensor]
    """The buffers that the lanes add up in."""
    compute: Queue
    label: str
    zeroed: Sequence[slice] = ()
    """What no gradient of these places is written to, and is read all the same."""

    def close(self, lane: int) -> None:
        """All of a lane is submitted: add it to what it joins."""
        self.compute.submit(partial(self._join, lane), label=self.label)

    def _join(self, lane: int) -> None:
        gradients, leaf = self.lanes[lane], self.leaves[lane]
        gradients.finish()
        for part in self.zeroed:
            gradients.flat[part].zero_()
        for right in leaf.joins:
            self.flats[right - 1].add_(self.flats[right])


@dataclass(frozen=True, kw_only=True)
class UnitNumbers:
    """What the ranks have found of one unit's gradient in a step; it may be read once d2h has passed it.

    Shapes: numbers [ranks, blocks and flags], of which a rank uses the first `num_blocks` and the last ones.
    """

    numbers: Tensor
    num_blocks: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def squares(self) -> Tensor:
        """The sums of squares of all blocks, in order."""
        return torch.cat([self.numbers[rank, :count] for rank, count in enumerate(self.num_blocks)])

    def reached(self) -> set[str]:
        """The tensors that got a gradient on any rank."""
        flags = self.numbers[:, -len(self.names) :].amax(0).tolist()
        return {name for name, flag in zip(self.names, flags, strict=True) if flag > 0}


class LaneSums:
    """The buffers, the exchange between ranks, and the numbers of a step's gradients.

    Thread: the driver's.
    """

    def __init__(
        self,
        template: Template,
        device: Device,
        ranks: Ranks,
        *,
        num_lanes: int,
        numbers: Tensor,
        wire: torch.dtype = torch.float32,
    ) -> None:
        """`numbers` is host memory for the ownership's `num_numbers` of two steps in turn; `wire` is what gradients go
        from node to node in."""
        self._template, self.device, self._ranks = template, device, ranks
        self.ownership = ranks.ownership(template.layout)
        self._num_lanes, self._wire = num_lanes, wire
        self._plan()
        self._extras: list[Tensor] = []
        self._received: Tensor | None = None
        self._row_sums: Tensor | None = None
        self._row_tokens = 0
        self._table: Tensor | None = None
        self._extras_free: Event | None = None
        self._found: dict[int, Tensor] = {}
        self._of_layers: dict[int, tuple[float, set[str]]] = {}
        self._numbers = numbers.view(2, -1)
        self._set = 0
        self.rows: RowExchange | None = None
        """Of the step, where the embedding's gradient is rows."""
        self.open()

    def _plan(self) -> None:
        """Work out where lanes add up, and which subtrees travel."""
        ranks = self._ranks
        of_ranks = ranks.lanes(self._num_lanes)
        self._edge_lanes = of_ranks[ranks.rank]
        self._layer_lanes = range(self._num_lanes) if ranks.by_layers else self._edge_lanes
        self._edge_leaves, self._layer_leaves = _leaves(self._edge_lanes), _leaves(self._layer_lanes)
        # The subtrees of all ranks, in the order in which they are received: first the first of each rank.
        roots = [roots_of(of_rank) for of_rank in of_ranks]
        self._num_roots = len(roots[ranks.rank])
        self._rounds = rounds_of(roots)
        self._on_nodes = None if ranks.num_nodes == 1 else NodeSums(ranks, of_ranks, wire=self._wire)
        self._num_subtrees = sum(map(len, roots))
        self._num_row_sums = num_sums(sorted(root for of_rank in roots for root in of_rank))

    def deal(self) -> None:
        """The ranks have other lanes from now on. The queues must be idle."""
        self.close()
        self._plan()
        self.open()

    def open(self) -> None:
        """Take the memory on the device, also after `close`."""
        device, ownership = self.device, self.ownership
        units, layout = self._template.layout.units, self._template.layout
        layer_elements = max(unit.trained_elements for unit in units if unit.kind == "layer")
        edge_elements = max(units[0].trained_elements, layout.head_gradient_elements, units[-1].trained_elements)
        num_edge, num_layer = num_buffers(self._edge_lanes) - 1, num_buffers(self._layer_lanes) - 1
        self._extras = [
            device.allocate(
                "gradients",
                max(edge_elements if index < num_edge else 0, layer_elements if index < num_layer else 0),
                torch.float32,
            )
            for index in range(max(num_edge, num_layer))
        ]
        if self._template.layout.shares_gradient:
            self._table = device.allocate("gradients", length(ownership.trained(0)[self._ranks.rank]), torch.float32)
        if not self._ranks.is_alone:
            parts = [ownership.trained(unit.index) for unit in units if not ownership.is_whole(unit.index)]
            num_received = self._num_subtrees * max(length(of_ranks[self._ranks.rank]) for of_ranks in parts)
            if self._on_nodes is not None:
                num_received = max(self._on_nodes.num_elements(list(map(length, of_ranks))) for of_ranks in parts)
            self._received = device.allocate("gradients", num_received, torch.float32)
            self._open_rows()

    def reserve(self, num_tokens: int) -> None:
        """Make room for the rows of a step of this number of tokens of all ranks. The queues must be idle."""
        if self._ranks.is_alone or not self._template.embeds_by_rows or num_tokens <= self._row_tokens:
            return
        self._row_tokens = num_tokens
        if self._row_sums is not None:
            self.device.free(self._row_sums)
        self._open_rows()

    def close(self) -> None:
        """Free the memory on the device. The queues must be idle."""
        for tensor in (*self._extras, self._received, self._row_sums, self._table):
            if tensor is not None:
                self.device.free(tensor)
        self._extras, self._received, self._row_sums, self._table = [], None, None, None
        self._found.clear()

    def start_step(self, rows: RowExchange | None) -> None:
        """Forget the numbers of the step before last."""
        self._set = 1 - self._set
        self._numbers[self._set].fill_(torch.nan)
        self._of_layers.clear()
        self.rows = rows

    def leaves(self, unit_index: int) -> Sequence[Leaf]:
        """Of the lanes of a unit that this rank computes."""
        is_layer = self._template.layout.units[unit_index].kind == "layer"
        return self._layer_leaves if is_layer else self._edge_leaves

    def buffers(self, unit_index: int, slot: Tensor) -> list[Tensor]:
        """All buffers of a unit whose slot this is; compute waits until they are free."""
        if self._extras_free is not None:
            self.device.compute.wait(self._extras_free)
            self._extras_free = None
        return self._stack(slot)[: 1 + max(leaf.buffer for leaf in self.leaves(unit_index))]

    def sent_extras(self, unit_index: int) -> None:
        """What was submitted to d2h reads other buffers than the unit's slot; they are free after it."""
        if self._num_roots > 1 and not self.ownership.is_whole(unit_index):
            self._extras_free = self.device.d2h.record()

    def keep_table(self, slot: Tensor, start: int) -> None:
        """Submit the sum of the head's part of the table's gradient, which `slot` has from `start` on; it is kept for
        the embedding's."""
        unit, table = self._template.layout.units[0], self._table
        assert table is not None, "the head shares the table's gradient"
        own = self._submit_sum(0, self._roots(slot, start, start + unit.trained_elements))
        self.device.d2h.submit(partial(table.copy_, own), label="gradient of the table")

    def sum_unit(self, unit_index: int, slot: Tensor, reached: set[str]) -> Tensor:
        """Submit the sum of a unit's gradient and its numbers; returns where this rank's part is then, fp32."""
        unit = self._template.layout.units[unit_index]
        if self.ownership.is_whole(unit_index):
            own = slot[: unit.trained_elements]
        else:
            own = self._submit_sum(unit_index, self._roots(slot, 0, unit.trained_elements))
        if unit_index == 0 and self._table is not None:
            self.device.d2h.submit(partial(own.add_, self._table), label="gradient of the table")
        self._submit_numbers(unit_index, own, NORM_BLOCK_ELEMENTS, reached)
        return own

    def sum_rows(self, slot: Tensor, reached: set[str]) -> Tensor:
        """The same for an embedding whose gradient is that of the rows in use; where the head has its part of it, that
        of the whole table. Shapes: [U * D], or the rank's part of the table."""
        rows, width = self.rows, self._template.hidden_size
        assert rows is not None, "start_step comes first"
        roots = self._roots(slot, 0, rows.rows_R.numel() * width)
        own, block = roots[0], width
        if not self._ranks.is_alone:
            assert self._row_sums is not None, "reserve comes first"
            own = self._row_sums[: rows.own_U.numel() * width]
            others = sum(
                rows.sent[rank].numel() for of_round in self._rounds for rank, _ in of_round if rank != self._ranks.rank
            )
            self.device.d2h.submit(
                partial(self._sum_received_rows, roots, rows),
                num_bytes=others * width * own.itemsize,
                label="gradient 0",
                collective="rows",
            )
        if (table := self._table) is not None:
            first = self.ownership.rows()[self._ranks.rank].start
            places_U = self.device.place(rows.own_U - first)
            summed_UD, whole = own.view(-1, width), table[: len(self.ownership.rows()[self._ranks.rank]) * width]
            self.device.d2h.submit(
                partial(whole.view(-1, width).index_add_, 0, places_U, summed_UD), label="gradient of the table"
            )
            own, block = table, NORM_BLOCK_ELEMENTS
        self._submit_numbers(0, own, block, reached)
        return own

    def square_sum(self, unit_index: int) -> float:
        """Of a unit's gradient over all ranks, once d2h has passed it: block after block, in fp64."""
        if unit_index in self._of_layers:
            return self._of_layers[unit_index][0]
        return reference.in_order(self.numbers_of(unit_index).squares.numpy())

    def reached(self, unit_index: int) -> set[str]:
        """The tensors of a unit that got a gradient on any rank, once d2h has passed it."""
        if unit_index in self._of_layers:
            return self._of_layers[unit_index][1]
        return self.numbers_of(unit_index).reached()

    def meet(self) -> None:
        """Have the numbers of layers that other ranks compute, once d2h is through with the step."""
        units = [u for u in self._template.layout.units if u.trained_elements and self.ownership.is_whole(u.index)]
        if not units:
            return
        own: list[float] = []
        for unit in units:
            numbers = self.numbers_of(unit.index)
            reached = numbers.reached() if self._owns(unit.index) else set()
            square = reference.in_order(numbers.squares.numpy()) if self._owns(unit.index) else 0.0
            own += [square, *(float(name in reached) for name in numbers.names)]
        # One rank has them, the others have zeros.
        found = self._ranks.meet(own).sum(0).tolist()
        for unit in units:
            names = self.numbers_of(unit.index).names
            square, *flags = found[: 1 + len(names)]
            del found[: 1 + len(names)]
            self._of_layers[unit.index] = square, {name for name, flag in zip(names, flags, strict=True) if flag}

    def numbers_of(self, unit_index: int) -> UnitNumbers:
        """What d2h brings of a unit in this step."""
        unit, blocks = self._template.layout.units[unit_index], tuple(self._blocks(unit_index))
        names = tuple(tensor.name for tensor in unit.tensors if tensor.trained)
        return UnitNumbers(numbers=self._numbers_at(unit_index), num_blocks=blocks, names=names)

    def _submit_sum(self, unit_index: int, roots: Sequence[Tensor]) -> Tensor:
        if self._ranks.is_alone:
            return roots[0]
        assert self._received is not None, "open comes first"
        sizes = [length(part) for part in self.ownership.trained(unit_index)]
        received = self._received
        own = sizes[self._ranks.rank]
        work, num_bytes = partial(self._sum_received, roots, sizes), (self._num_subtrees - self._num_roots) * own * 4
        if self._on_nodes is not None:
            work, num_bytes = partial(self._on_nodes.sum, roots, sizes, received), self._on_nodes.num_bytes(sizes)
        self.device.d2h.submit(
            work,
            num_bytes=num_bytes,
            label=f"exchange {unit_index}",
            collective="gradients",
        )
        return received[:own]

    def _sum_received(self, roots: Sequence[Tensor], sizes: Sequence[int]) -> None:
        assert self._received is not None
        own, start, found = sizes[self._ranks.rank], 0, list[tuple[Subtree, Tensor]]()
        for index, senders in enumerate(self._rounds):
            taken = self._received[start : start + own * len(senders)]
            self._exchange(taken, roots, index, [own * self._sends(rank, index) for rank in self._all()], sizes)
            found += zip((subtree for _, subtree in senders), taken.view(len(senders), own).unbind(), strict=True)
            start += taken.numel()
        sum_subtrees(sorted(found, key=lambda one: one[0]))

    def _sum_received_rows(self, roots: Sequence[Tensor], rows: RowExchange) -> None:
        """Each subtree's rows are spread over the rows in use that this rank owns: rows that it lacks are zeros."""
        assert self._row_sums is not None
        width, num_own = self._template.hidden_size, rows.own_U.numel()
        # As many sums as are there at once, then what is received.
        free = [self._row_sums[at * num_own * width :][: num_own * width] for at in range(self._num_row_sums)]
        taken = self._row_sums[self._num_row_sums * num_own * width :]
        start, found = 0, list[tuple[Subtree, int, Tensor]]()
        for index, senders in enumerate(self._rounds):
            counts = [rows.sent[rank].numel() * width * self._sends(rank, index) for rank in self._all()]
            part = taken[start : start + sum(counts)]
            self._exchange(part, roots, index, counts, [count * width for count in rows.received])
            for rank, subtree in senders:
                found.append((subtree, rank, taken[start : start + counts[rank]]))
                start += counts[rank]
        stack, sums = Stack(), list[Tensor]()
        for subtree, rank, values in sorted(found, key=lambda one: one[0]):
            spread = free.pop(0)
            spread.zero_()
            places = torch.searchsorted(rows.own_U, rows.sent[rank]).to(spread.device)
            # Rows are distinct, so nothing is added twice.
            spread.view(-1, width).index_copy_(0, places, values.view(-1, width))
            sums.append(spread)
            for right in stack.push(subtree):
                sums[right - 1].add_(sums[right])
                free.insert(0, sums.pop())

    def _exchange(
        self, out: Tensor, roots: Sequence[Tensor], index: int, out_sizes: Sequence[int], sizes: Sequence[int]
    ) -> None:
        """The exchange of the subtree of that number of each rank that has as many."""
        has_one = index < len(roots)
        source = roots[index] if has_one else roots[0][:0]
        self._ranks.exchange(out, source, out_sizes, sizes if has_one else [0] * len(sizes), "d2h")

    def _sends(self, rank: int, index: int) -> bool:
        return any(sender == rank for sender, _ in self._rounds[index])

    def _all(self) -> range:
        return range(self._ranks.num_ranks)

    def _submit_numbers(self, unit_index: int, own: Tensor, block: int, reached: set[str]) -> None:
        unit, target = self._template.layout.units[unit_index], self._numbers_at(unit_index)
        names = [tensor.name for tensor in unit.tensors if tensor.trained]
        num_blocks, num_most = own.numel() // block, target.shape[1] - len(names)
        is_whole = self.ownership.is_whole(unit_index)
        # Made here, so that the copy to the host has a source while the work that fills it is queued; d2h reads one
        # step's before it fills the next one's.
        if unit_index not in self._found:
            self._found[unit_index] = self.device.place(torch.zeros(target.shape, dtype=torch.float64))
        found = self._found[unit_index]

        def work() -> None:
            numbers = found.new_zeros(target.shape[1])
            if num_blocks:
                self.device.square_blocks(own, block, numbers[:num_blocks])
            flags = torch.tensor([float(name in reached) for name in names], dtype=torch.float64)
            numbers[num_most:].copy_(flags)
            found.copy_(numbers[None] if is_whole else self._ranks.collect(numbers, "d2h"))

        num_others = 0 if is_whole else self._ranks.num_ranks - 1
        self.device.d2h.submit(
            work,
            num_bytes=num_others * target[0].nbytes,
            label=f"norm {unit_index}",
            collective="numbers" if num_others else None,
        )
        self.device.read_back(found, target)

    def _numbers_at(self, unit_index: int) -> Tensor:
        """Of this step. Shapes: [ranks, blocks and flags], of one rank where a unit is one rank's."""
        num_finding = 1 if self.ownership.is_whole(unit_index) else self._ranks.num_ranks
        return self._numbers[self._set, self.ownership.numbers(unit_index)].view(num_finding, -1)

    def _blocks(self, unit_index: int) -> list[int]:
        """How many blocks each rank has of a unit."""
        if unit_index == 0 and self.rows is not None and self._table is None:
            return list(self.rows.num_owned)
        blocks = [length(part) // NORM_BLOCK_ELEMENTS for part in self.ownership.trained(unit_index)]
        return [max(blocks)] if self.ownership.is_whole(unit_index) else blocks

    def _owns(self, unit_index: int) -> bool:
        return length(self.ownership.trained(unit_index)[self._ranks.rank]) > 0

    def _stack(self, slot: Tensor) -> list[Tensor]:
        return [slot, *(extra[: slot.numel()] for extra in self._extras)]

    def _roots(self, slot: Tensor, start: int, stop: int) -> list[Tensor]:
        return [buffer[start:stop] for buffer in self._stack(slot)[: self._num_roots]]

    def _open_rows(self) -> None:
        if not self._template.embeds_by_rows or not self.ownership.has_rows or not self._row_tokens:
            return
        # Sums, and what is received: at most all tokens' rows, once for each subtree.
        rows = self.ownership.rows()[self._ranks.rank]
        received = min(len(self._rounds) * self._row_tokens, self._num_subtrees * len(rows))
        num_rows = self._num_row_sums * min(self._row_tokens, len(rows)) + received
        self._row_sums = self.device.allocate("gradients", num_rows * self._template.hidden_size, torch.float32)


def _leaves(lanes: range) -> list[Leaf]:
    stack, leaves = Stack(), list[Leaf]()
    for lane in lanes:
        buffer = len(stack.subtrees)
        leaves.append(Leaf(buffer=buffer, joins=tuple(stack.push(Subtree(lane)))))
    return leaves

"""Which rank owns which part of each unit of the store: it alone updates that part, and sends it to the others.

Where ranks divide a step by rows, a unit's trained part, and what follows it that is not packed, are each divided into
equal runs of whole blocks, one for each rank; what does not divide belongs to the last rank. A block is a page in every
plane; of an embedding table whose rows are looked up by themselves it is whole rows as well. Where they divide it by
layers, each layer belongs to one rank as a whole, as the plan has dealt them; embedding and head are divided as for
rows.
Torch-free.

Units: elements, unless a name says rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from horizon_server.records.execution import Execution, Parallel
from horizon_server.store.layout import UNIT_ALIGN_ELEMENTS, StoreLayout

NORM_BLOCK_ELEMENTS = UNIT_ALIGN_ELEMENTS
"""Elements whose squares are summed by themselves where a step has several lanes: whole blocks belong to one rank, so
the sums, and with them the norm's bits, depend on no number of ranks."""


@dataclass(frozen=True, kw_only=True)
class Ownership:
    """The division of a layout among `num_ranks` ranks."""

    layout: StoreLayout
    num_ranks: int
    parallel: Parallel = "rows"
    dealt: tuple[int, ...] = ()
    """As `Execution.layer_ranks`."""

    @classmethod
    def of(cls, layout: StoreLayout, execution: Execution) -> Ownership:
        """The division that a plan has decided."""
        return cls(
            layout=layout,
            num_ranks=execution.num_ranks,
            parallel=execution.parallel,
            dealt=execution.layer_ranks,
        )

    @cached_property
    def layer_ranks(self) -> tuple[int, ...]:
        """By layers, the rank that computes each layer, and owns it."""
        num_layers = sum(unit.kind == "layer" for unit in self.layout.units)
        return self.dealt or tuple(layer % self.num_ranks for layer in range(num_layers))

    def is_whole(self, unit_index: int) -> bool:
        """Whether all of a unit belongs to one rank, which computes it alone."""
        return self.parallel == "layers" and self.layout.units[unit_index].kind == "layer"

    def trained(self, unit_index: int) -> tuple[slice, ...]:
        """The part of a unit's trained elements of each rank; empty parts where there are too few."""
        return self._trained[unit_index]

    def frozen(self, unit_index: int) -> tuple[slice, ...]:
        """The part of each rank of what follows the trained elements in the `hi` plane."""
        unit = self.layout.units[unit_index]
        return divided(unit.trained_elements, unit.unpacked_elements, self.num_ranks, block=self._block(unit_index))

    def rows(self) -> tuple[range, ...]:
        """The rows of the embedding table of each rank, where the table is alone in its unit."""
        num_rows, width = self.layout.units[0].tensors[0].shape
        parts = self.trained(0) if self.has_rows else self.frozen(0)
        return tuple(range(part.start // width, min(num_rows, part.stop // width)) for part in parts)

    @property
    def has_rows(self) -> bool:
        """Whether the embedding is a trained table with nothing next to it."""
        return self.is_table_alone and self.layout.units[0].tensors[0].trained

    @property
    def is_table_alone(self) -> bool:
        """Whether the embedding is a table with nothing next to it, trained or not."""
        tensors = self.layout.units[0].tensors
        return len(tensors) == 1 and len(tensors[0].shape) == 2

    def _block(self, unit_index: int) -> int:
        if unit_index == 0 and self.is_table_alone:
            return math.lcm(UNIT_ALIGN_ELEMENTS, self.layout.units[0].tensors[0].shape[1])
        return UNIT_ALIGN_ELEMENTS

    def parts_in(self, plane: str, rank: int) -> Iterator[slice]:
        """Where a plane has what a rank owns, in the order of units."""
        for unit in self.layout.units:
            # A negative one is that of a unit which the plane leaves out.
            if self.layout.offset_in(plane, unit) >= 0:
                for of_ranks in (self.trained, self.frozen):
                    part = self.layout.part_in(plane, unit, of_ranks(unit.index)[rank])
                    if part.start < part.stop:
                        yield part

    @property
    def num_numbers(self) -> int:
        """What the ranks find of all units' gradients in a step: for each rank as many numbers as the one with the most
        has, one for each block or row, and one for each trained tensor. Of a layer that one rank computes, for that
        one."""
        return int(self._numbers[-1].stop)

    def numbers(self, unit_index: int) -> slice:
        """Where those of a unit are among them."""
        return self._numbers[unit_index]

    @cached_property
    def _numbers(self) -> list[slice]:
        sizes = []
        for unit in self.layout.units:
            parts = [length(part) // NORM_BLOCK_ELEMENTS for part in self.trained(unit.index)]
            if unit.index == 0 and self.has_rows:
                parts += [len(rows) for rows in self.rows()]
            num_finding = 1 if self.is_whole(unit.index) else self.num_ranks
            sizes.append(num_finding * (max(parts) + sum(tensor.trained for tensor in unit.tensors)))
        return [slice(start, stop) for start, stop in pairwise([0, *accumulate(sizes)])]

    @cached_property
    def _trained(self) -> list[tuple[slice, ...]]:
        parts = []
        for unit in self.layout.units:
            if self.is_whole(unit.index):
                owner = self.layer_ranks[unit.index - 1]
                cuts = [0] * (owner + 1) + [unit.trained_elements] * (self.num_ranks - owner)
                parts.append(tuple(slice(start, stop) for start, stop in pairwise(cuts)))
                continue
            parts.append(divided(0, unit.trained_elements, self.num_ranks, block=self._block(unit.index)))
        return parts


def length(part: slice) -> int:
    """How many elements a part has."""
    return int(part.stop - part.start)


def divided(start: int, stop: int, num_parts: int, *, block: int) -> tuple[slice, ...]:
    """The elements from `start` to `stop` in `num_parts` runs of as many whole blocks; the last one takes the rest."""
    size = (stop - start) // (block * num_parts) * block
    cuts = [start + index * size for index in range(num_parts)] + [stop]
    return tuple(slice(begin, end) for begin, end in pairwise(cuts))

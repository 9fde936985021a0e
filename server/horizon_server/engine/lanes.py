"""Lanes: parts of a step whose gradients are summed by themselves, and then in a balanced tree.

A sum of floating-point numbers depends on its order. So that a step has the same bits on any number of ranks, the
order belongs to the step: its documents are divided into V lanes, the micro-batches of a lane add up one after the
other, and the lanes add up as the leaves of a balanced binary tree. A rank computes neighbouring lanes and closes the
subtrees that are its own; who closes the rest makes no difference.

The arithmetic of the tree is in `planning.lane_tree`.

Shapes: V = lanes of the step, a power of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.planning.lane_tree import Stack, Subtree


def lane_of_each(sizes: Sequence[int], num_lanes: int) -> list[int]:
    """The lane of each item, in order and of about equal size together: that in which the item's middle is."""
    total, start = sum(sizes), 0
    lanes = []
    for size in sizes:
        lanes.append((2 * start + size) * num_lanes // (2 * total))
        start += size
    return lanes


def sum_subtrees(sums: Sequence[tuple[Subtree, Tensor]]) -> Tensor:
    """The sum over all lanes of subtrees that have them all, given in order; made in the memory of the first one."""
    (total,) = close_subtrees(sums)
    return total


def close_subtrees(sums: Sequence[tuple[Subtree, Tensor]]) -> list[Tensor]:
    """The sums of the largest subtrees that neighbouring ones, given in order, make together; each in the memory of its
    first one."""
    stack, buffers = Stack(), list[Tensor]()
    for subtree, values in sums:
        buffers.append(values)
        for right in stack.push(subtree):
            buffers[right - 1].add_(buffers.pop())
    return buffers


def sum_lanes(values_V: Tensor) -> Tensor:
    """The balanced sum of one number for each lane. Shapes: [V] to []."""
    while values_V.numel() > 1:
        values_V = values_V[0::2] + values_V[1::2]
    return values_V[0]


@dataclass(frozen=True, kw_only=True)
class StepRows:
    """The micro-batches of a step, lane by lane; a lane may have none."""

    lanes: tuple[tuple[MicroBatch, ...], ...]

    @classmethod
    def single(cls, micro_batches: Sequence[MicroBatch]) -> StepRows:
        """All in one lane."""
        return cls(lanes=(tuple(micro_batches),))

    def of(self, lanes: range) -> list[MicroBatch]:
        """The micro-batches of some lanes, in order."""
        return [micro_batch for lane in lanes for micro_batch in self.lanes[lane]]

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """Those of all lanes, in order."""
        return self.of(range(len(self.lanes)))

    @property
    def num_targets(self) -> int:
        """Supervised tokens of the step."""
        return sum(micro_batch.num_targets for micro_batch in self.micro_batches)

    def rows_in_use(self, lanes: range) -> Tensor:
        """The distinct token ids of some lanes, in order. Shapes: [R]."""
        ids = [micro_batch.input_ids_T for micro_batch in self.of(lanes)]
        return torch.unique(torch.cat(ids)) if ids else torch.empty(0, dtype=torch.int64)

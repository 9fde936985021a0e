"""Lanes: parts of a step whose gradients are summed by themselves, and then in a balanced tree.

A sum of floating-point numbers depends on its order. So that a step has the same bits on any number of ranks, the
order belongs to the step: its documents are divided into V lanes, the micro-batches of a lane add up one after the
other, and the lanes add up as the leaves of a balanced binary tree. A rank computes neighbouring lanes and closes the
subtrees that are its own; who closes the rest makes no difference.

Shapes: V = lanes of the step, a power of two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from horizon_server.engine.micro_batch import MicroBatch


def lane_of_each(sizes: Sequence[int], num_lanes: int) -> list[int]:
    """The lane of each item, in order and of about equal size together: that in which the item's middle is."""
    total, start = sum(sizes), 0
    lanes = []
    for size in sizes:
        lanes.append((2 * start + size) * num_lanes // (2 * total))
        start += size
    return lanes


def lanes_of_rank(rank: int, num_ranks: int, num_lanes: int) -> range:
    """The lanes that a rank computes."""
    return range(rank * num_lanes // num_ranks, (rank + 1) * num_lanes // num_ranks)


@dataclass(frozen=True, order=True)
class Subtree:
    """`size` lanes from `start` on, which are the leaves under one node of the tree."""

    start: int
    size: int = 1

    def is_sibling_of(self, left: Subtree) -> bool:
        """Whether this one and the one before it are the two children of a node."""
        return left.size == self.size and left.start % (2 * self.size) == 0 and left.start + left.size == self.start


class Stack:
    """Subtrees that are closed as far as their leaves have come, from the left; siblings join at once.

    The position in the stack is the number of the buffer that a subtree's sum is in.
    """

    def __init__(self) -> None:
        self.subtrees: list[Subtree] = []

    def push(self, subtree: Subtree) -> Iterator[int]:
        """Add the next subtree. Yields each buffer whose sum is to be added to that of the one before it."""
        self.subtrees.append(subtree)
        while len(self.subtrees) > 1 and self.subtrees[-1].is_sibling_of(self.subtrees[-2]):
            right, left = self.subtrees.pop(), self.subtrees.pop()
            yield len(self.subtrees) + 1
            self.subtrees.append(Subtree(left.start, left.size + right.size))


def roots_of(lanes: range) -> list[Subtree]:
    """The subtrees that the ranks with these lanes can close."""
    stack = Stack()
    for lane in lanes:
        for _ in stack.push(Subtree(lane)):
            pass
    return stack.subtrees


def num_buffers(lanes: range) -> int:
    """How many sums are there at once at most while the lanes are summed in their order."""
    stack, most = Stack(), 0
    for lane in lanes:
        most = max(most, len(stack.subtrees) + 1)
        for _ in stack.push(Subtree(lane)):
            pass
    return most


def sum_subtrees(sums: Sequence[tuple[Subtree, Tensor]]) -> Tensor:
    """The sum over all lanes of subtrees that have them all, given in order; made in the memory of the first one."""
    stack, buffers = Stack(), []
    for subtree, values in sums:
        buffers.append(values)
        for right in stack.push(subtree):
            buffers[right - 1].add_(buffers.pop())
    (total,) = buffers
    return total


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

"""The balanced tree in which the lanes of a step are summed: who computes which lanes, and which sums are there at
once. Torch-free.

Source: pairwise summation, Higham, Accuracy and Stability of Numerical Algorithms (2002), section 4.2; the fixed tree
is what makes the bits those of the lanes alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


def lanes_of_rank(rank: int, num_ranks: int, num_lanes: int) -> range:
    """The lanes that a rank computes."""
    return range(rank * num_lanes // num_ranks, (rank + 1) * num_lanes // num_ranks)


def dealt(num_lanes: int, speeds: Sequence[float]) -> list[int]:
    """How many lanes each rank computes where the ranks have these speeds: one at least, and so that the one that takes
    the longest takes as little as can be."""
    sizes = [1] * len(speeds)
    for _ in range(num_lanes - len(speeds)):
        # The next lane is for who would be done with it first.
        rank = min(range(len(speeds)), key=lambda rank: ((sizes[rank] + 1) / speeds[rank], rank))
        sizes[rank] += 1
    return sizes


def ranges_of(sizes: Sequence[int]) -> list[range]:
    """Neighbouring lanes for the ranks, as many for each."""
    ends = [0, *accumulate(sizes)]
    return [range(start, stop) for start, stop in pairwise(ends)]


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
    """How many sums are there at once at most while a rank sums its lanes in their order."""
    return num_sums([Subtree(lane) for lane in lanes])


def num_sums(subtrees: Iterable[Subtree]) -> int:
    """How many sums are there at once at most while neighbouring subtrees are summed in their order."""
    stack, most = Stack(), 0
    for subtree in subtrees:
        most = max(most, len(stack.subtrees) + 1)
        for _ in stack.push(subtree):
            pass
    return most


def rounds_of(roots: Sequence[Sequence[Subtree]]) -> list[list[tuple[int, Subtree]]]:
    """Who sends which subtree in each round of an exchange: first the first of each one that has any, then the
    second."""
    return [
        [(who, of_one[index]) for who, of_one in enumerate(roots) if index < len(of_one)]
        for index in range(max(map(len, roots)))
    ]


@dataclass(frozen=True, kw_only=True)
class NodeTree:
    """The subtrees that each rank closes by itself, and those that the ranks of a node close together."""

    by_rank: tuple[tuple[Subtree, ...], ...]
    of_nodes: tuple[tuple[Subtree, ...], ...]

    @classmethod
    def of(cls, lanes: Sequence[range], num_nodes: int) -> NodeTree:
        """`lanes` are those of each rank, the ranks of a node one after the other."""
        per_node = len(lanes) // num_nodes
        wholes = [
            range(lanes[first].start, lanes[first + per_node - 1].stop) for first in range(0, len(lanes), per_node)
        ]
        return cls(
            by_rank=tuple(tuple(roots_of(of_rank)) for of_rank in lanes),
            of_nodes=tuple(tuple(roots_of(whole)) for whole in wholes),
        )

    @property
    def ranks_per_node(self) -> int:
        """As many are on each."""
        return len(self.by_rank) // len(self.of_nodes)

    def of_ranks(self, node: int) -> tuple[tuple[Subtree, ...], ...]:
        """Those of each rank of a node."""
        return self.by_rank[node * self.ranks_per_node : (node + 1) * self.ranks_per_node]

    def num_elements(self, node: int, largest_part: int) -> int:
        """Of memory that a rank of a node needs to sum its parts, of up to this many elements: what comes from nodes,
        what goes to them, and what comes from the node's other ranks."""
        received = sum(map(len, self.of_nodes))
        if self.ranks_per_node == 1:
            return received * largest_part
        sent, here = len(self.of_nodes) * len(self.of_nodes[node]), sum(map(len, self.of_ranks(node)))
        return (received + sent + here) * largest_part

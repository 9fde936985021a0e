"""Gradients of a step on several nodes: summed on each node first, so that each node sends every part of a unit once
over the network, however many ranks it has.

Ranks of a node share out its sum by their place: the one at place p gets the parts of those at place p of every node.
Then ranks at one place exchange what belongs to each other. Both sums follow the tree of the lanes, so the bits are
those of one rank; `wire` may round what goes from node to node.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from horizon_server.engine.lanes import close_subtrees, sum_subtrees
from horizon_server.engine.ranks import Ranks
from horizon_server.planning.lane_tree import NodeTree, Subtree, rounds_of


class NodeSums:
    """The two exchanges of one rank.

    Thread: the methods that exchange run in d2h.
    """

    def __init__(self, ranks: Ranks, lanes: Sequence[range], *, wire: torch.dtype) -> None:
        """`lanes` are those of each rank; `wire` is what travels between nodes."""
        self._ranks, self._wire = ranks, wire
        self._tree = NodeTree.of(lanes, ranks.num_nodes)
        self._place = ranks.rank % ranks.ranks_per_node
        self._node = ranks.rank // ranks.ranks_per_node
        self._here, self._between = rounds_of(self._tree.of_ranks(self._node)), rounds_of(self._tree.of_nodes)

    def num_elements(self, sizes: Sequence[int]) -> int:
        """What `sum` needs of memory for a unit whose parts, one of each rank, have these numbers of elements."""
        return self._tree.num_elements(self._node, max(sizes))

    def num_bytes(self, sizes: Sequence[int]) -> int:
        """What this rank receives from others."""
        own, mine = sizes[self._ranks.rank], self._tree.of_ranks(self._node)[self._place]
        here = sum(map(len, self._tree.of_ranks(self._node))) - len(mine)
        between = sum(map(len, self._tree.of_nodes)) - len(self._tree.of_nodes[self._node])
        return 4 * here * sum(self._of_place(sizes)) + self._wire.itemsize * between * own

    def sum(self, roots: Sequence[Tensor], sizes: Sequence[int], memory: Tensor) -> None:
        """Have this rank's part of the sum over all ranks at the beginning of `memory`. `roots` are the sums of the
        subtrees that this rank has closed, of a whole unit each."""
        own, of_place = sizes[self._ranks.rank], self._of_place(sizes)
        num_received, num_sent = sum(map(len, self._tree.of_nodes)) * own, sum(of_place)
        num_roots = len(self._tree.of_nodes[self._node])
        sent = [memory[num_received + at * num_sent :][:num_sent] for at in range(num_roots)]
        if self._ranks.ranks_per_node == 1:
            sent = list(roots)
        else:
            free = memory[num_received + num_sent * len(sent) :]
            self._sum_here(roots, sizes, sent, free)
        found, start = list[tuple[Subtree, Tensor]](), 0
        for index, senders in enumerate(self._between):
            taken = memory[start : start + own * len(senders)]
            sends = {node for node, _ in senders}
            out_sizes = [own * (node in sends) for node in range(self._ranks.num_nodes)]
            source = sent[index] if self._node in sends else memory[:0]
            self._exchange(taken, source, out_sizes, of_place if self._node in sends else [0] * len(of_place))
            found += zip((subtree for _, subtree in senders), taken.view(len(senders), own).unbind(), strict=True)
            start += taken.numel()
        sum_subtrees(sorted(found, key=lambda one: one[0]))

    def _sum_here(self, roots: Sequence[Tensor], sizes: Sequence[int], sent: Sequence[Tensor], free: Tensor) -> None:
        """Fill `sent` with this node's sums of the parts of the ranks at this one's place, node after node."""
        per_node, starts, filled = self._ranks.ranks_per_node, [0, *accumulate(sizes)], 0
        for node in range(self._ranks.num_nodes):
            first = node * per_node
            of_node, own = sizes[first : first + per_node], sizes[first + self._place]
            found, start = list[tuple[Subtree, Tensor]](), 0
            for index, senders in enumerate(self._here):
                taken = free[start : start + own * len(senders)]
                sends = {place for place, _ in senders}
                out_sizes = [own * (place in sends) for place in range(per_node)]
                has_one = self._place in sends
                source = roots[index][starts[first] : starts[first + per_node]] if has_one else free[:0]
                in_sizes = of_node if has_one else [0] * per_node
                self._ranks.exchange(taken, source, out_sizes, in_sizes, "d2h node")
                found += zip((subtree for _, subtree in senders), taken.view(len(senders), own).unbind(), strict=True)
                start += taken.numel()
            for target, summed in zip(sent, close_subtrees(sorted(found, key=lambda one: one[0])), strict=True):
                target[filled : filled + own].copy_(summed)
            filled += own

    def _exchange(self, out: Tensor, source: Tensor, out_sizes: Sequence[int], sizes: Sequence[int]) -> None:
        """Between nodes."""
        if self._wire is torch.float32:
            self._ranks.exchange(out, source, out_sizes, sizes, "d2h peers")
            return
        received = torch.empty_like(out, dtype=self._wire)
        self._ranks.exchange(received, source.to(self._wire), out_sizes, sizes, "d2h peers")
        out.copy_(received)

    def _of_place(self, sizes: Sequence[int]) -> list[int]:
        """Of a unit, the parts of the ranks at this one's place."""
        return list(sizes[self._place :: self._ranks.ranks_per_node])

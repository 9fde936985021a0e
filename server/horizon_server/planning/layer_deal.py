"""Which rank computes which layer, where ranks of uneven speed divide a step by layers. Torch-free.

Source: the smooth weighted round robin of nginx (commit 52327e0627f4), which spreads each one's turns evenly.
"""

from __future__ import annotations

from collections.abc import Sequence

from horizon_server.planning.lane_tree import dealt


def deal_layers(num_layers: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """The rank of each layer where the ranks have these speeds: so many for each that the one that takes the longest
    takes as little as can be, and each one's spread evenly over the depth, so that no rank waits long for the layer
    before its own."""
    sizes = dealt(num_layers, speeds)
    ranks, scores = list[int](), [0] * len(sizes)
    for _ in range(num_layers):
        scores = [score + size for score, size in zip(scores, sizes, strict=True)]
        rank = scores.index(max(scores))
        scores[rank] -= num_layers
        ranks.append(rank)
    return tuple(ranks)

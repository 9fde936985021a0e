"""The tree in which lanes are summed: the same whoever computes which lanes, in as many buffers as the plan says."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from horizon_server.engine.lanes import lane_of_each, sum_lanes, sum_subtrees
from horizon_server.planning.lane_tree import Stack, Subtree, dealt, lanes_of_rank, num_buffers, ranges_of, roots_of


@pytest.mark.parametrize("num_lanes", [1, 2, 8, 16])
def test_every_lane_is_some_rank_s(num_lanes: int) -> None:
    for num_ranks in range(1, num_lanes + 1):
        lanes = [lanes_of_rank(rank, num_ranks, num_lanes) for rank in range(num_ranks)]
        assert [lane for of_rank in lanes for lane in of_rank] == list(range(num_lanes))
        assert max(map(len, lanes)) - min(map(len, lanes)) <= 1 and min(map(len, lanes)) > 0


def test_a_rank_closes_the_subtrees_that_are_its_own() -> None:
    assert roots_of(range(8)) == [Subtree(0, 8)]
    assert roots_of(range(4, 8)) == [Subtree(4, 4)]
    # Neighbours that are no siblings stay apart.
    assert roots_of(range(3, 5)) == [Subtree(3), Subtree(4)]
    assert roots_of(range(5)) == [Subtree(0, 4), Subtree(4)]
    assert roots_of(range(5, 8)) == [Subtree(5), Subtree(6, 2)]
    assert roots_of(range(2, 2)) == []


@pytest.mark.parametrize(("num_lanes", "buffers"), [(1, 1), (2, 2), (4, 3), (8, 4), (64, 7)])
def test_a_few_buffers_serve_many_lanes(num_lanes: int, buffers: int) -> None:
    assert num_buffers(range(num_lanes)) == buffers


def test_the_sum_has_the_same_bits_whoever_closes_which_subtree() -> None:
    generator = torch.Generator().manual_seed(0)
    lanes = [torch.randn(100, generator=generator) * 10.0 ** (lane % 4) for lane in range(8)]
    pairs = [left + right for left, right in zip(lanes[::2], lanes[1::2], strict=True)]
    wanted = (pairs[0] + pairs[1]) + (pairs[2] + pairs[3])
    for num_ranks in range(1, 9):
        found: list[tuple[Subtree, torch.Tensor]] = []
        for rank in range(num_ranks):
            stack, sums = Stack(), list[torch.Tensor]()
            for lane in lanes_of_rank(rank, num_ranks, 8):
                sums.append(lanes[lane].clone())
                for right in stack.push(Subtree(lane)):
                    sums[right - 1].add_(sums.pop())
            found += zip(stack.subtrees, sums, strict=True)
        assert torch.equal(sum_subtrees(found), wanted)
    numbers = torch.stack([lane[0].double() for lane in lanes])
    assert sum_lanes(numbers) == ((numbers[0] + numbers[1]) + (numbers[2] + numbers[3])) + (
        (numbers[4] + numbers[5]) + (numbers[6] + numbers[7])
    )


def test_documents_are_in_lanes_of_about_equal_size_in_their_order() -> None:
    sizes = [9, 14, 5, 21, 7, 3, 12, 16, 4, 11]
    lanes = lane_of_each(sizes, 4)
    assert lanes == sorted(lanes) and set(lanes) == {0, 1, 2, 3}
    for lane in range(4):
        of_lane = sum(size for size, found in zip(sizes, lanes, strict=True) if found == lane)
        assert abs(of_lane - sum(sizes) / 4) <= max(sizes)
    # Fewer documents than lanes: some have none.
    assert lane_of_each([10], 8) == [4]
    assert lane_of_each([1, 1], 8) == [2, 6]


@pytest.mark.parametrize("num_lanes", [8, 16, 32])
@pytest.mark.parametrize("speeds", [(1.0, 0.5), (1.0, 1.0, 0.5, 0.5), (1.0, 0.25), (1.0, 0.75), (3.0, 1.0, 2.0)])
def test_lanes_are_dealt_as_well_as_can_be(num_lanes: int, speeds: tuple[float, ...]) -> None:
    def longest(sizes: Sequence[int]) -> float:
        return max(size / speed for size, speed in zip(sizes, speeds, strict=True))

    found = dealt(num_lanes, speeds)
    assert sum(found) == num_lanes and min(found) >= 1
    possible = itertools.product(range(1, num_lanes + 1), repeat=len(speeds) - 1)
    best = min(
        longest((*sizes, num_lanes - sum(sizes))) for sizes in possible if 1 <= num_lanes - sum(sizes) <= num_lanes
    )
    assert longest(found) == best
    assert [len(lanes) for lanes in ranges_of(found)] == found
    if speeds == (1.0, 0.5):
        # Of what the two could do together.
        assert num_lanes / best / sum(speeds) >= {8: 0.85, 16: 0.93, 32: 0.93}[num_lanes]

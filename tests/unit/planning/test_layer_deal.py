"""How layers are dealt to ranks of uneven speed."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from horizon_server.planning.layer_deal import deal_layers


@pytest.mark.parametrize(
    ("num_layers", "speeds", "wanted"),
    [
        (6, (1.0, 0.5), "010010"),
        (8, (1.0, 0.5), "00100010"),
        (8, (1.0, 1.0, 0.5, 0.5), "01201301"),
        (4, (4.0, 2.0, 2.0), "0120"),
        (5, (0.5, 1.0), "10101"),
        (2, (1.0, 100.0), "01"),
    ],
)
def test_who_is_faster_gets_more_layers_in_turn(num_layers: int, speeds: tuple[float, ...], wanted: str) -> None:
    assert "".join(map(str, deal_layers(num_layers, speeds))) == wanted


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_equal_ranks_get_the_layers_in_turn(num_ranks: int) -> None:
    for num_layers in range(num_ranks, 20):
        wanted = tuple(layer % num_ranks for layer in range(num_layers))
        assert deal_layers(num_layers, [2.5] * num_ranks) == wanted


@pytest.mark.parametrize("num_layers", [8, 13, 32])
@pytest.mark.parametrize("speeds", [(1.0, 0.5), (1.0, 0.3, 0.3), (0.2, 1.0, 0.7)])
def test_the_slowest_takes_as_little_as_can_be_and_each_has_its_share_of_any_part(
    num_layers: int, speeds: tuple[float, ...]
) -> None:
    ranks = deal_layers(num_layers, speeds)
    counts = [Counter(ranks)[rank] for rank in range(len(speeds))]
    possible = (
        sizes for sizes in itertools.product(range(1, num_layers + 1), repeat=len(speeds)) if sum(sizes) == num_layers
    )

    def longest(sizes: tuple[int, ...] | list[int]) -> float:
        return max(size / speed for size, speed in zip(sizes, speeds, strict=True))

    assert longest(counts) == min(map(longest, possible))
    for end in range(num_layers + 1):
        so_far = Counter(ranks[:end])
        for rank, count in enumerate(counts):
            assert abs(so_far[rank] - count * end / num_layers) < len(speeds) / 2

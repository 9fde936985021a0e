"""Permutations without a list: bijections of any size, asked for place by place."""

from __future__ import annotations

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horizon_server.store.row_packing import permutation_keys, permuted

seeds = st.integers(0, 2**63 - 1)


@settings(max_examples=150)
@given(size=st.integers(1, 3000), seed=seeds, salt=st.integers(0, 2**40))
def test_every_number_once(size: int, seed: int, salt: int) -> None:
    found = permuted(np.arange(size), size, permutation_keys(seed, 1), salt=np.full(size, salt))
    assert sorted(found.tolist()) == list(range(size))


@settings(max_examples=60)
@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=8), seed=seeds, draw=st.data())
def test_a_place_does_not_depend_on_what_else_is_asked(sizes: list[int], seed: int, draw: st.DataObject) -> None:
    """Several permutations at once, in any order of places, give what each gives alone."""
    keys = permutation_keys(seed)
    places = [(size, salt, place) for salt, size in enumerate(sizes) for place in range(size)]
    chosen = draw.draw(st.permutations(places))
    size, salt, place = (np.array(column) for column in zip(*chosen, strict=True))
    together = permuted(place, size, keys, salt=salt).tolist()
    for (one_size, one_salt, one_place), found in zip(chosen, together, strict=True):
        alone = permuted(np.array([one_place]), one_size, keys, salt=np.array([one_salt]))
        assert alone.tolist() == [found]


def test_large_ranges_are_covered_too() -> None:
    size = 1_000_003
    found = permuted(np.arange(size), size, permutation_keys(0))
    assert np.array_equal(np.bincount(found, minlength=size), np.ones(size, dtype=np.int64))
    beyond = permuted(np.arange(10**12, 10**12 + 1000), 10**12 + 1000, permutation_keys(0))
    assert len(set(beyond.tolist())) == 1000
    assert 0 <= min(beyond.tolist()) < max(beyond.tolist()) < 10**12 + 1000


def test_seeds_epochs_and_salts_give_other_orders() -> None:
    orders = [
        permuted(np.arange(500), 500, permutation_keys(*key), salt=np.full(500, salt)).tolist()
        for key in ((0, 0), (0, 1), (1, 0))
        for salt in (0, 1)
    ]
    assert len({tuple(order) for order in orders}) == 6
    assert orders[0] == permuted(np.arange(500), 500, permutation_keys(0, 0)).tolist()


@pytest.mark.parametrize("size", [4, 5, 24, 97])
def test_every_number_comes_to_every_place_about_equally_often(size: int) -> None:
    """Chi-squared over 4000 seeds: far from a fixed or a shifted order, within five deviations of a random one."""
    num_seeds = 4000
    for place in (0, size // 2, size - 1):
        counts = collections.Counter(
            int(permuted(np.array([place]), size, permutation_keys(seed))[0]) for seed in range(num_seeds)
        )
        expected = num_seeds / size
        chi_squared = sum((counts[number] - expected) ** 2 / expected for number in range(size))
        assert chi_squared < size - 1 + 5 * (2 * (size - 1)) ** 0.5


def test_neighbours_are_torn_apart() -> None:
    found = permuted(np.arange(10_000), 10_000, permutation_keys(3))
    assert np.mean(np.abs(np.diff(found)) < 100) < 0.04  # 2 % by chance
    assert abs(np.corrcoef(np.arange(10_000), found)[0, 1]) < 0.05

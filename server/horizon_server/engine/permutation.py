"""Seeded permutations that need no list: any place of an order is computed by itself, for any number of places.

A Feistel network over pairs of digits of a mixed radix. Each round adds to one digit a hash of the other, which can be undone, so the
whole is a bijection whatever the hash. The pairs cover a few more numbers than asked for; one that lands there is mapped again until it is
back (cycle walking).

Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, methods 2 and 3.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_NUM_ROUNDS = 6

Keys = NDArray[np.uint64]


def permutation_keys(*seeds: int) -> Keys:
    """Return what decides a permutation: other seeds, another order."""
    keys: Keys = np.random.SeedSequence(seeds).generate_state(_NUM_ROUNDS, np.uint64).astype(np.uint64)
    return keys


def permuted(
    places: NDArray[np.int64], size: int | NDArray[np.int64], keys: Keys, *, salt: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Return what is at these places of the permutation of range(size).

    `size` may differ from place to place; equal `salt` (any number) and size mean the same permutation.
    """
    sizes = np.broadcast_to(np.asarray(size, dtype=np.uint64), places.shape)
    salts = np.broadcast_to(np.uint64(0) if salt is None else salt.astype(np.uint64), places.shape)
    found = _one_pass(places.astype(np.uint64), sizes, salts, keys)
    # Ends, because the orbit of a number below its size comes back to it at the latest.
    while len(outside := np.flatnonzero(found >= sizes)):
        found[outside] = _one_pass(found[outside], sizes[outside], salts[outside], keys)
    return found.astype(np.int64)


def _one_pass(
    numbers: NDArray[np.uint64], sizes: NDArray[np.uint64], salts: NDArray[np.uint64], keys: Keys
) -> NDArray[np.uint64]:
    # low * high is the smallest product of about equal factors that covers the size.
    low = np.ceil(np.sqrt(sizes.astype(np.float64))).astype(np.uint64)
    high = (sizes + low - np.uint64(1)) // low
    left, right = numbers // low, numbers % low
    for number, key in enumerate(keys):
        if number % 2:
            left = (left + _hash(right ^ key, salts) % high) % high
        else:
            right = (right + _hash(left ^ key, salts) % low) % low
    return left * low + right


def _hash(numbers: NDArray[np.uint64], salts: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # The finaliser of SplitMix64; arithmetic is modulo 2**64.
    mixed = numbers + salts * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashed: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return hashed

"""Which documents share a row, and permutations that need no list: what a plan of steps is made of.

Packing is best-fit decreasing: the longest document first, each into the row that it leaves fullest. What that does
depends on lengths only, so it is done once for a histogram of them: rows that hold documents of the same lengths are
one pattern, and ten million documents are packed by a few thousand decisions. Which document takes which place is a
permutation within each length, drawn again for every epoch. Permutations need no list: a Feistel network computes any
one place of an order.

Torch-free: the daemon counts the steps of a job with it before a worker exists.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]

_NUM_ROUNDS = 6
# What is permuted; part of the key of its permutation.
ROWS, DOCUMENTS = 1, 2
_ROWS_AT_ONCE = 1 << 16


class SingleRows:
    """Every document is a row of its own, in the order of the dataset."""

    def __init__(self, lengths: NDArray[np.int64]) -> None:
        self._lengths = lengths
        self.num_rows = len(lengths)

    def tokens_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many tokens each of these rows holds."""
        return self._lengths[rows]

    def documents_of(self, rows: NDArray[np.int64], keys: Keys | None) -> list[list[int]]:
        """Return the document of each of these rows; `keys` have nothing to decide."""
        del keys
        return [[document] for document in rows.tolist()]


class PackedRows:
    """Rows of at most `limit` tokens; a longer document is a row of its own."""

    def __init__(self, lengths: NDArray[np.int64], limit: int) -> None:
        counts = np.bincount(lengths)
        self._patterns = _best_fit_decreasing(counts, limit)
        self._class_starts = np.concatenate([[0], np.cumsum(counts)])
        # Sixteen bits sort by radix, ten times as fast.
        keys = lengths.astype(np.uint16) if len(counts) <= 2**16 else lengths
        self._by_length = np.argsort(keys, kind="stable").astype(np.min_scalar_type(len(lengths)))
        self._first_rows = np.cumsum([0, *(pattern.num_rows for pattern in self._patterns)])
        tokens = [sum(length * per_row for length, per_row in pattern.contents) for pattern in self._patterns]
        self._tokens = np.array(tokens, dtype=np.int64)
        # Per pattern, for each of its lengths, how many documents of that length are in the patterns before it.
        self._first_slots: list[list[int]] = []
        taken: defaultdict[int, int] = defaultdict(int)
        for pattern in self._patterns:
            self._first_slots.append([taken[length] for length, _ in pattern.contents])
            for length, per_row in pattern.contents:
                taken[length] += per_row * pattern.num_rows
        self.num_rows = int(self._first_rows[-1])

    def tokens_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many tokens each of these rows holds."""
        return self._tokens[self._pattern_of(rows)]

    def documents_of(self, rows: NDArray[np.int64], keys: Keys | None) -> list[list[int]]:
        """Return the documents of each of these rows, in the order that `keys` decide; None keeps that of the
        dataset."""
        lengths: list[int] = []
        slots: list[int] = []
        ends = [0]
        for row, number in zip(rows.tolist(), self._pattern_of(rows).tolist(), strict=True):
            within = row - int(self._first_rows[number])
            contents = self._patterns[number].contents
            for (length, per_row), first in zip(contents, self._first_slots[number], strict=True):
                lengths += [length] * per_row
                slots += range(first + within * per_row, first + (within + 1) * per_row)
            ends.append(len(slots))
        of_length, at = np.array(lengths), np.array(slots)
        starts = self._class_starts[of_length]
        if keys is not None:
            # Only documents of one length change places, so that every row keeps its number of tokens.
            at = permuted(at, self._class_starts[of_length + 1] - starts, keys, salt=of_length)
        documents = self._by_length[starts + at].tolist()
        return [documents[begin:end] for begin, end in itertools.pairwise(ends)]

    def _pattern_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self._first_rows, rows, side="right") - 1


class EpochSteps:
    """Which rows make up each step of each epoch: rows follow a seeded permutation and are grouped into steps of at
    most `tokens_per_step` tokens (a single longer row makes a step of its own).

    Thread: not thread-safe; it keeps the epoch that it was last asked for.
    """

    def __init__(self, rows: SingleRows | PackedRows, *, tokens_per_step: int, seed: int, shuffle: bool = True) -> None:
        self._rows, self._tokens_per_step, self._seed, self._shuffle = rows, tokens_per_step, seed, shuffle
        self._epoch: tuple[int, list[int]] | None = None  # the one at hand, and the first row of each of its steps
        self._first_steps = [0]  # first_steps[e] is the number of steps before epoch e

    def number(self, epochs: float) -> int:
        """Return how many steps that many epochs have: of a last part, its share of that epoch's steps, at least
        one."""
        fraction, whole = math.modf(epochs)
        return self.before(int(whole)) + (math.ceil(fraction * self.within(int(whole))) if fraction else 0)

    def locate(self, i: int) -> tuple[int, int]:
        """Return the epoch of step i of the run, and which of its steps it is."""
        while self._first_steps[-1] <= i:
            self.before(len(self._first_steps))
        epoch = bisect.bisect_right(self._first_steps, i) - 1
        return epoch, i - self._first_steps[epoch]

    def before(self, epoch: int) -> int:
        """Return the number of steps before an epoch."""
        while len(self._first_steps) <= epoch:
            self._first_steps.append(self._first_steps[-1] + self.within(len(self._first_steps) - 1))
        return self._first_steps[epoch]

    def within(self, epoch: int) -> int:
        """Return the number of steps of an epoch."""
        return len(self._starts(epoch)) - 1

    def rows_of(self, epoch: int, step: int) -> NDArray[np.int64]:
        """Return the rows of a step of an epoch."""
        starts = self._starts(epoch)
        return self._order(epoch, starts[step], starts[step + 1])

    def _starts(self, epoch: int) -> list[int]:
        """Return the first row of each step of an epoch, and the number of its rows."""
        # One epoch is kept: a run asks for its steps one after the other.
        if self._epoch is not None and self._epoch[0] == epoch:
            return self._epoch[1]
        starts, filled, num_rows = [0], 0, self._rows.num_rows
        # In parts, so that the order of ten million rows is never in memory as a whole.
        for begin in range(0, num_rows, _ROWS_AT_ONCE):
            order = self._order(epoch, begin, min(begin + _ROWS_AT_ONCE, num_rows))
            ends = np.cumsum(self._rows.tokens_of(order))
            # Negative where the last part left a step open.
            before = -filled
            while (row := int(np.searchsorted(ends, before + self._tokens_per_step, side="right"))) < len(ends):
                if begin + row == starts[-1]:
                    # The row alone is longer than a step.
                    row += 1
                    if row == len(ends):
                        break
                starts.append(begin + row)
                before = int(ends[row - 1]) if row else 0
            filled = int(ends[-1]) - before
        self._epoch = (epoch, [*starts, num_rows])
        return self._epoch[1]

    def _order(self, epoch: int, begin: int, end: int) -> NDArray[np.int64]:
        places = np.arange(begin, end)
        if not self._shuffle:
            return places
        return permuted(places, self._rows.num_rows, permutation_keys(self._seed, epoch, ROWS))


def rows_of_groups(
    lengths: NDArray[np.int64], *, group_size: int, packing: bool, limit: int
) -> tuple[SingleRows | PackedRows, NDArray[np.int64]]:
    """Return the rows that documents of these lengths go into, and the lengths of their groups; a group stays
    together."""
    group_lengths = lengths.reshape(-1, group_size).sum(1)
    return PackedRows(group_lengths, limit) if packing else SingleRows(group_lengths), group_lengths


@dataclass(frozen=True, kw_only=True)
class _Pattern:
    """`num_rows` rows that hold the same lengths: `contents` are (length, number of documents of it in each row)."""

    num_rows: int
    contents: tuple[tuple[int, int], ...] = ()


def _best_fit_decreasing(counts: NDArray[np.int64], limit: int) -> list[_Pattern]:
    """Rows of at most `limit` tokens for `counts[length]` documents of each length."""
    rooms: list[int] = []  # the room that some row has left: sorted, each once
    by_room: defaultdict[int, list[_Pattern]] = defaultdict(list)

    def put(room: int, pattern: _Pattern) -> None:
        if room not in by_room:
            bisect.insort(rooms, room)
        by_room[room].append(pattern)

    for length in np.flatnonzero(counts)[::-1].tolist():
        count = int(counts[length])
        while count:
            found = bisect.bisect_left(rooms, length)
            if found < len(rooms):
                room = rooms[found]
                pattern = by_room[room].pop()
                # A room without rows must not be found again.
                if not by_room[room]:
                    del by_room[room], rooms[found]
            else:
                room, pattern = max(limit, length), _Pattern(num_rows=count)
            # One after the other they go into the same row while it has room: it is always the fullest that they fit
            # into.
            per_row = min(room // length, count)
            num_rows = min(pattern.num_rows, count // per_row)
            contents = (*pattern.contents, (length, per_row))
            put(room - length * per_row, _Pattern(num_rows=num_rows, contents=contents))
            if pattern.contents and pattern.num_rows > num_rows:
                put(room, _Pattern(num_rows=pattern.num_rows - num_rows, contents=pattern.contents))
            count -= num_rows * per_row
    # In a fixed order: the numbers of the rows follow from it, and a resumed run must find the same ones.
    return [pattern for room in sorted(by_room) for pattern in by_room[room]]


def permutation_keys(*seeds: int) -> Keys:
    """Return what decides a permutation: other seeds, another order."""
    keys: Keys = np.random.SeedSequence(seeds).generate_state(_NUM_ROUNDS, np.uint64).astype(np.uint64)
    return keys


def permuted(
    places: NDArray[np.int64], size: int | NDArray[np.int64], keys: Keys, *, salt: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Return what is at these places of the permutation of range(size).

    `size` may differ from place to place; equal `salt` (any number) and size mean the same permutation.
    Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, methods 2 and 3.
    """
    sizes = np.broadcast_to(np.asarray(size, dtype=np.uint64), places.shape)
    salts = np.broadcast_to(np.uint64(0) if salt is None else salt.astype(np.uint64), places.shape)
    found = _feistel(places.astype(np.uint64), sizes, salts, keys)
    # The pairs of digits cover a few more numbers than asked for; one that lands there is mapped again until it is back
    # (cycle walking). That ends, because the orbit of a number below its size comes back to it at the latest.
    while len(outside := np.flatnonzero(found >= sizes)):
        found[outside] = _feistel(found[outside], sizes[outside], salts[outside], keys)
    return found.astype(np.int64)


def _feistel(
    numbers: NDArray[np.uint64], sizes: NDArray[np.uint64], salts: NDArray[np.uint64], keys: Keys
) -> NDArray[np.uint64]:
    """A bijection whatever the hash: each round adds to one of two digits a hash of the other, which can be undone."""
    # low * high is the smallest product of about equal factors that covers the size.
    low = np.ceil(np.sqrt(sizes.astype(np.float64))).astype(np.uint64)
    high = (sizes + low - np.uint64(1)) // low
    left, right = numbers // low, numbers % low
    for number, key in enumerate(keys):
        changed, other, radix = (left, right, high) if number % 2 else (right, left, low)
        # The finaliser of SplitMix64; arithmetic is modulo 2**64.
        mixed = (other ^ key) + salts * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        changed = (changed + (mixed ^ (mixed >> np.uint64(31))) % radix) % radix
        left, right = (changed, other) if number % 2 else (other, changed)
    return left * low + right

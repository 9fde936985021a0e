"""Documents into rows of limited length, best-fit decreasing: the longest first, each into the row that it leaves fullest.

What best-fit does depends on lengths only, so it is done once for a histogram of them: rows that hold documents of the same lengths are
one pattern, and ten million documents are packed by a few thousand decisions. Which document takes which place is a permutation
within each length, drawn again for every epoch.
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from horizon_server.engine.permutation import Keys, permuted


class SingleRows:
    """Every document is a row of its own."""

    def __init__(self, lengths: NDArray[np.int64]) -> None:
        self._lengths = lengths
        self.num_rows = len(lengths)

    def tokens_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many tokens each of these rows holds."""
        return self._lengths[rows]

    def documents_of(self, rows: NDArray[np.int64], keys: Keys | None) -> list[list[int]]:
        """Return the documents of each of these rows, in the order that `keys` decide; None keeps that of the dataset."""
        del keys  # the order of the rows is that of the documents
        return [[document] for document in rows.tolist()]


class PackedRows:
    """Rows of at most `limit` tokens; a longer document is a row of its own."""

    def __init__(self, lengths: NDArray[np.int64], limit: int) -> None:
        counts = np.bincount(lengths)
        rows = _OpenRows(limit)
        for length in np.flatnonzero(counts)[::-1].tolist():
            rows.place(length, int(counts[length]))
        self._patterns = list(rows.patterns())
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
        """Return the documents of each of these rows, in the order that `keys` decide; None keeps that of the dataset."""
        lengths: list[int] = []
        slots: list[int] = []
        ends = [0]
        for row, number in zip(rows.tolist(), self._pattern_of(rows).tolist(), strict=True):
            within = row - int(self._first_rows[number])
            for (length, per_row), first in zip(
                self._patterns[number].contents, self._first_slots[number], strict=True
            ):
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


@dataclass(frozen=True, kw_only=True)
class _Pattern:
    """`num_rows` rows that hold the same lengths: `contents` are (length, number of documents of it in each row)."""

    num_rows: int
    contents: tuple[tuple[int, int], ...] = ()


class _OpenRows:
    """Rows that documents may still go into, by the room they have left."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rooms: list[int] = []  # sorted, each once
        self._by_room: defaultdict[int, list[_Pattern]] = defaultdict(list)

    def place(self, length: int, count: int) -> None:
        """Place `count` documents of a length that is not greater than any before."""
        while count:
            found = bisect.bisect_left(self._rooms, length)
            if found < len(self._rooms):
                room = self._rooms[found]
                same_room = self._by_room[room]
                pattern = same_room.pop()
                # A room without rows must not be found again.
                if not same_room:
                    del self._by_room[room], self._rooms[found]
            else:
                room, pattern = max(self._limit, length), _Pattern(num_rows=count)
            # One after the other they go into the same row while it has room: it is always the fullest that they fit into.
            per_row = min(room // length, count)
            num_rows = min(pattern.num_rows, count // per_row)
            contents = (*pattern.contents, (length, per_row))
            self._put(room - length * per_row, _Pattern(num_rows=num_rows, contents=contents))
            if pattern.contents and pattern.num_rows > num_rows:
                self._put(room, _Pattern(num_rows=pattern.num_rows - num_rows, contents=pattern.contents))
            count -= num_rows * per_row

    def patterns(self) -> Iterable[_Pattern]:
        """Return every row."""
        # In a fixed order: the numbers of the rows follow from it, and a resumed run must find the same ones.
        return itertools.chain.from_iterable(self._by_room[room] for room in sorted(self._by_room))

    def _put(self, room: int, pattern: _Pattern) -> None:
        if room not in self._by_room:
            bisect.insort(self._rooms, room)
        self._by_room[room].append(pattern)

"""Rows from a histogram of lengths: exactly what best-fit decreasing gives, document by document."""

from __future__ import annotations

import collections
import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from horizon_server.store.row_packing import Keys, PackedRows, SingleRows, permutation_keys

lengths_lists = st.lists(st.integers(1, 30), min_size=1, max_size=120)


def documents_of(rows: PackedRows | SingleRows, keys: Keys | None = None) -> list[list[int]]:
    return rows.documents_of(np.arange(rows.num_rows), keys)


def best_fit_decreasing(lengths: list[int], limit: int) -> collections.Counter[tuple[int, ...]]:
    """One document at a time, each into the fullest row that it fits into."""
    rows: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in rows if sum(row) + length <= limit]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            rows.append([length])
    return collections.Counter(tuple(sorted(row)) for row in rows)


@settings(max_examples=200)
@given(lengths=lengths_lists, limit=st.integers(8, 60), seed=st.none() | st.integers(0, 9))
def test_rows_are_those_of_best_fit_decreasing(lengths: list[int], limit: int, seed: int | None) -> None:
    rows = PackedRows(np.array(lengths), limit)
    found = documents_of(rows, None if seed is None else permutation_keys(seed))
    assert sorted(document for row in found for document in row) == list(range(len(lengths)))
    tokens = [sum(lengths[document] for document in row) for row in found]
    assert rows.tokens_of(np.arange(rows.num_rows)).tolist() == tokens
    assert all(total <= limit or len(row) == 1 for total, row in zip(tokens, found, strict=True))
    expected = best_fit_decreasing(lengths, limit)
    # Rows that are equally full can differ in what fills them, so the sums are compared.
    assert sorted(tokens) == sorted(sum(row) for row in expected.elements())


@settings(max_examples=60)
@given(lengths=lengths_lists, keys=st.tuples(st.integers(0, 99), st.integers(0, 99)), draw=st.data())
def test_any_rows_can_be_asked_for(lengths: list[int], keys: tuple[int, int], draw: st.DataObject) -> None:
    for rows in (PackedRows(np.array(lengths), 40), SingleRows(np.array(lengths))):
        whole = documents_of(rows, permutation_keys(*keys))
        chosen = draw.draw(st.lists(st.integers(0, rows.num_rows - 1), min_size=1, max_size=10))
        assert rows.documents_of(np.array(chosen), permutation_keys(*keys)) == [whole[row] for row in chosen]


def test_other_keys_share_rows_otherwise() -> None:
    lengths = np.random.default_rng(0).integers(10, 200, 2000)
    rows = PackedRows(lengths, 512)
    first, second = ({frozenset(row) for row in documents_of(rows, permutation_keys(key))} for key in (0, 1))
    assert len(first & second) < 0.02 * rows.num_rows


def test_without_keys_documents_of_one_length_keep_their_order() -> None:
    assert documents_of(PackedRows(np.array([3, 3, 3, 3, 3]), 6), None) == [[0, 1], [2, 3], [4]]


def test_two_million_documents_are_packed_full_and_at_once() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5.2, 0.6, 2_000_000), 2, 1024).astype(np.int64)
    started_s = time.process_time()
    rows = PackedRows(lengths, 1024)
    assert time.process_time() - started_s < 10  # a fraction of a second; one by one it takes far longer
    assert lengths.sum() / (rows.num_rows * 1024) > 0.997

"""Rows in memory become one file of JSON lines, whoever holds them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import date
from typing import Any

import pytest

from horizon_client.errors import BadFile, InvalidRequest
from horizon_client.memory_data import as_file, is_in_memory

ROWS: list[dict[str, Any]] = [{"prompt": "one", "completion": "1"}, {"prompt": "zwei \u00e9", "completion": None}]


def written(rows: Any) -> list[Any]:
    with as_file(rows, "some data") as path:
        assert path.name == "some-data.jsonl"
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert not path.exists(), "the file is temporary"
    return lines


def test_lists_and_generators_of_mappings() -> None:
    assert written(ROWS) == ROWS
    assert written(row for row in ROWS) == ROWS


@pytest.mark.parametrize("library", ["datasets", "pandas", "pyarrow", "polars"])
def test_tables_of_other_libraries(library: str) -> None:
    module = pytest.importorskip(library, reason=f"{library} is not installed")
    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    table = {
        "datasets": lambda: module.Dataset.from_dict(columns),
        "pandas": lambda: module.DataFrame(ROWS),
        "pyarrow": lambda: module.table(columns),
        "polars": lambda: module.DataFrame(columns),
    }[library]()
    assert is_in_memory(table)
    assert written(table) == ROWS


def test_values_of_numpy_and_pandas_are_plain() -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = pandas.DataFrame({"n": [1, 2], "x": [0.5, float("nan")], "when": pandas.to_datetime(["2026-01-02", None])})
    frame["chat"] = [[{"role": "user", "content": "a"}], []]
    assert written(frame) == [
        {"n": 1, "x": 0.5, "when": "2026-01-02T00:00:00", "chat": [{"role": "user", "content": "a"}]},
        {"n": 2, "x": None, "when": None, "chat": []},
    ]


def test_a_large_frame_is_read_in_parts() -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = pandas.DataFrame({"text": [f"row {i}" for i in range(2500)]})
    assert [row["text"] for row in written(frame)] == list(frame["text"])


def test_rows_are_not_held_in_memory() -> None:
    alive = 0
    most = 0

    class Row(dict[str, str]):
        def __init__(self) -> None:
            nonlocal alive, most
            super().__init__(text="a")
            alive += 1
            most = max(most, alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def rows() -> Iterator[Row]:
        for _ in range(1000):
            yield Row()

    assert len(written(rows())) == 1000
    assert most <= 2


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "a"}, "b"], r"rows\[1\] is str; each row must be a mapping"),
        ([{"text": {1, 2}}], r"rows\[0\] cannot be written as JSON: a value is of type set"),
        ([{"text": float("inf")}], r"rows\[0\] cannot be written as JSON"),
        ({"train": [], "test": []}, r"the rows are a mapping with the keys train, test; give one of its parts"),
    ],
)
def test_what_is_no_row_is_refused_with_its_number(rows: Any, message: str) -> None:
    assert is_in_memory(rows)
    with pytest.raises(InvalidRequest, match=message):
        written(rows)


def test_no_rows_are_refused() -> None:
    with pytest.raises(BadFile, match="no rows to push"):
        written(iter(()))


@pytest.mark.parametrize("value", ["train.jsonl", ["a.jsonl", "b.jsonl"], None, [], 3, date(2026, 1, 1)])
def test_names_and_paths_are_not_rows(value: object) -> None:
    assert not is_in_memory(value)

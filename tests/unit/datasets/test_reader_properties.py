"""Whatever the bytes: rows or a sentence, and the rows are those that the library would read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.datasets.written_files import CONTAINERS, inspect, put

from horizon_formats.rows import read_rows
from horizon_server.errors import InvalidData

names = st.sampled_from(["a.jsonl", "a.json", "a.txt", "a", "a.parquet", "a.jsonl.gz", "a.json.zst"])
heads = st.sampled_from(
    [b"", b"[", b"{", b"PAR1", b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"\xef\xbb\xbf", b'[{"text":"a"},']
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner), max_leaves=5
)


@given(name=names, head=heads, tail=st.binary(max_size=200), fmt=st.sampled_from(["auto", "messages", "tokens"]))
def test_no_bytes_break_the_reader(
    tmp_path_factory: pytest.TempPathFactory, name: str, head: bytes, tail: bytes, fmt: str
) -> None:
    file = put(tmp_path_factory.getbasetemp(), f"fuzz-{name}", head + tail)
    try:
        report = inspect(file, fmt)
    except InvalidData as error:
        assert error.message.isprintable()
    else:
        assert report.num_rows > 0


@given(data=st.data(), name=st.sampled_from(["a.parquet", "a.jsonl.gz", "a.jsonl.zst", "array.json"]))
def test_no_flipped_byte_breaks_the_reader(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, name: str
) -> None:
    content = bytearray(CONTAINERS[name]())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file = put(tmp_path_factory.getbasetemp(), f"flip-{name}", bytes(content))
    try:
        inspect(file)
    except InvalidData as error:
        assert file.name in error.message


@given(
    rows=st.lists(st.dictionaries(st.text(max_size=8), values, max_size=4), min_size=1, max_size=5),
    indent=st.sampled_from([None, 0, 3]),
    ascii_only=st.booleans(),
)
def test_an_array_is_what_the_library_reads(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps(rows, indent=indent, ensure_ascii=ascii_only)
    file = put(tmp_path_factory.getbasetemp(), "same.json", text.encode("utf-8", "surrogatepass"))
    found = list(read_rows(file))
    # Bytes that are not UTF-8 end the array.
    assert len(found) == len(rows) or (found and "UTF-8" in str(found[-1].violation))
    for row, expected in zip(found, rows, strict=False):
        if row.violation is None:
            assert json.dumps(row.columns) == json.dumps(expected)
        else:
            assert any(reason in row.violation.description for reason in ("NaN", "Infinity", "UTF-8"))

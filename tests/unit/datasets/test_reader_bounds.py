"""Files made to hurt: bombs, lines without end, rows that are too long. Refused in bounded memory and time."""

from __future__ import annotations

import gzip
import io
import json
import random
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.unit.datasets.written_files import inspect, parquet, put, zstd_frame

from horizon_formats.files import MAX_EXPANSION, MAX_ROW_BYTES
from horizon_server.datasets.reading import StoredFile
from horizon_server.errors import InvalidData


@pytest.mark.parametrize("compress", [gzip.compress, zstd_frame], ids=["gzip", "zstd"])
@pytest.mark.parametrize("name", ["bomb.jsonl", "bomb.json", "bomb.txt"])
def test_a_bomb_is_refused_before_it_has_grown(tmp_path: Path, compress: Callable[[bytes], bytes], name: str) -> None:
    part = b" " * (64 * 2**20) if name != "bomb.txt" else (b"spam" * 20 + b"\n") * (12 * 2**16)
    member = compress((b"[" if name == "bomb.json" else b"") + part)
    bomb = member + compress(part) * 8
    file = put(tmp_path, f"{name}{'.gz' if compress is gzip.compress else '.zst'}", bomb)
    assert max(MAX_ROW_BYTES, len(bomb) * MAX_EXPANSION) < 9 * 59 * 2**20
    tracemalloc.start()
    began = time.process_time()
    try:
        with pytest.raises(InvalidData, match=r"expands to more than \d+ bytes, .* push it uncompressed or in parts"):
            inspect(file, "text")
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 8 * MAX_ROW_BYTES
    assert time.process_time() - began < 60


def test_a_file_has_a_largest_size_when_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = put(tmp_path, "rows.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 100))
    inspect(file, "text")
    monkeypatch.setattr("horizon_formats.files.MAX_EXPANDED_BYTES", 1000)
    with pytest.raises(InvalidData, match="expands to more than 1000 bytes"):
        inspect(file, "text")


def test_a_table_that_repeats_one_large_value_is_refused(tmp_path: Path) -> None:
    value = "x" * (1024 * 1024)
    table = pa.table({"text": pa.DictionaryArray.from_arrays(pa.array([0] * 20_000, pa.int32()), pa.array([value]))})
    sink = io.BytesIO()
    pq.write_table(table.slice(0, 1000), sink)  # a gigabyte of text in a few kilobytes
    assert len(sink.getvalue()) < 2**20
    with pytest.raises(InvalidData, match="expands to more than"):
        inspect(put(tmp_path, "t.parquet", sink.getvalue()))


@pytest.mark.parametrize("name", ["line.jsonl", "line.json", "line.txt"])
def test_one_line_of_a_gigabyte_takes_bounded_memory(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with path.open("wb") as stream:
        stream.write({"line.jsonl": b'{"text": "', "line.json": b'[{"text": "', "line.txt": b"x"}[name])
        stream.truncate(2**30)  # a hole: reads as zeros, takes no disk
    tracemalloc.start()
    report = inspect(StoredFile.at(path), "text")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.num_violations == 1
    assert peak < 10 * MAX_ROW_BYTES
    words = {
        "line.jsonl": "line.jsonl:1 is longer than 16 MiB",
        "line.json": "line.json:row 1 ",
        "line.txt": "line.txt:1 holds a NUL",
    }
    assert report.violations[0].description.startswith(words[name])


def test_an_array_element_over_the_limit_is_one_bad_row_or_ends_the_array(tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"text": "x" * MAX_ROW_BYTES}, {"text": "b"}]
    report = inspect(put(tmp_path, "a.json", json.dumps(rows).encode()))
    assert [v.description for v in report.violations] == ["a.json:row 2 is longer than 16 MiB; split the row"]
    assert report.num_rows == 3
    rows[1]["text"] *= 3
    report = inspect(put(tmp_path, "a.json", json.dumps(rows).encode()))
    assert [v.description for v in report.violations] == [
        "a.json:row 2 is longer than 16 MiB; split the row; nothing after it was read"
    ]


def test_a_table_cell_over_the_limit_is_one_bad_row(tmp_path: Path) -> None:
    noise = random.Random(0).randbytes(MAX_ROW_BYTES // 2).hex()
    report = inspect(put(tmp_path, "a.parquet", parquet([{"text": "a"}, {"text": noise + "x"}, {"text": "b"}])))
    assert [v.description for v in report.violations] == ["a.parquet:row 2 is longer than 16 MiB; split the row"]
    assert report.num_rows == 3

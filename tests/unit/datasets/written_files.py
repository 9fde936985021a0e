"""Data files for tests: the same rows in every container, and the reader under test."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from horizon_server.datasets.data_file import DataFile
from horizon_server.datasets.formats import DatasetFormat
from horizon_server.datasets.validation import ValidationReport, inspect_file

ROWS = [{"prompt": f"{n} + {n}? \u00e9\U0001f600", "completion": str(n + n)} for n in range(500)]


def zstd_frame(content: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(content, asbytes=True))


def lines(rows: list[dict[str, Any]], end: str = "\n") -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + end for row in rows).encode()


def parquet(rows: list[dict[str, Any]], **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink, **options)
    return sink.getvalue()


def put(folder: Path, name: str, content: bytes) -> DataFile:
    path = folder / name.replace("/", "_")
    path.write_bytes(content)
    return DataFile.at(path)


def inspect(file: DataFile, fmt: str = "auto", **field_map: str) -> ValidationReport:
    return inspect_file(file, dataset_format=DatasetFormat(fmt), field_map=field_map)


CONTAINERS: dict[str, Callable[[], bytes]] = {
    "a.jsonl": lambda: lines(ROWS),
    "crlf.jsonl": lambda: lines(ROWS, "\r\n"),
    "bom.jsonl": lambda: b"\xef\xbb\xbf" + lines(ROWS),
    "array.json": lambda: json.dumps(ROWS).encode(),
    "pretty.json": lambda: b"\xef\xbb\xbf\n" + json.dumps(ROWS, indent=2, ensure_ascii=False).encode(),
    "a.jsonl.gz": lambda: gzip.compress(lines(ROWS)),
    "members.jsonl.gz": lambda: gzip.compress(lines(ROWS[:7])) + gzip.compress(lines(ROWS[7:])),
    "unnamed": lambda: gzip.compress(lines(ROWS)),
    "bom.json.gz": lambda: gzip.compress(b"\xef\xbb\xbf" + json.dumps(ROWS).encode()),
    "a.jsonl.zst": lambda: zstd_frame(lines(ROWS)),
    "frames.jsonl.zst": lambda: zstd_frame(lines(ROWS[:7])) + zstd_frame(lines(ROWS[7:])),
    "array.json.zst": lambda: zstd_frame(json.dumps(ROWS).encode()),
    "a.parquet": lambda: parquet(ROWS),
    "groups.parquet": lambda: parquet(ROWS, row_group_size=7, compression="zstd"),
}

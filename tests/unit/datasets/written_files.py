"""Data files for tests: the same rows in every container, and the reader under test."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from horizon_formats.checks import DatasetCheck, DatasetReport, check_files, resolve_format
from horizon_formats.formats import DatasetFormat
from horizon_formats.problems import FieldViolation
from horizon_server.datasets.reading import StoredFile, server_errors

ROWS = [{"prompt": f"{n} + {n}? \u00e9\U0001f600", "completion": str(n + n)} for n in range(500)]


def zstd_frame(content: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(content, asbytes=True))


def lines(rows: list[dict[str, Any]], end: str = "\n") -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + end for row in rows).encode()


def parquet(rows: list[dict[str, Any]], **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink, **options)
    return sink.getvalue()


def put(folder: Path, name: str, content: bytes) -> StoredFile:
    path = folder / name.replace("/", "_")
    path.write_bytes(content)
    return StoredFile.at(path)


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What the check of one file has found."""

    format: DatasetFormat
    num_rows: int
    num_blank_lines: int
    violations: list[FieldViolation]
    num_violations: int

    @property
    def described(self) -> dict[str, str]:
        """The problems by their places, without the name of the file."""
        return {v.field.partition(":")[2]: v.description.partition(":")[2] for v in self.violations}


def inspect(file: StoredFile, fmt: str = "auto", **field_map: str) -> Inspection:
    """Read one file as a dataset's check does, and return its problems instead of raising them."""
    with server_errors():
        check = DatasetCheck(DatasetFormat(fmt), field_map)
        for _ in check.read(file):
            pass
        found, _ = resolve_format(file, DatasetFormat(fmt), field_map)
    return Inspection(
        format=found,
        num_rows=check.num_rows,
        num_blank_lines=check.num_blank_lines,
        violations=check.violations.kept,
        num_violations=check.violations.total,
    )


def checked(*files: StoredFile, fmt: str = "auto", field_map: dict[str, str] | None = None) -> DatasetReport:
    """Check files as one dataset; bad rows raise."""
    with server_errors():
        return check_files(files, name="", dataset_format=DatasetFormat(fmt), field_map=field_map or {})


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

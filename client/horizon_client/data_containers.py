"""What a local data file is: JSON lines, a JSON array, text - plain or in gzip - or something that only the server reads.

Decides as the server does: by the first bytes and, where they leave it open, by the name.
"""

from __future__ import annotations

import codecs
import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import BinaryIO, cast

from horizon_client.errors import BadFile

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".txt")
COMPRESSED_SUFFIXES = {".gz": "gzip", ".zst": "zstd"}

_MAGIC = {"gzip": b"\x1f\x8b", "zstd": b"\x28\xb5\x2f\xfd"}
_PARQUET_MAGIC = b"PAR1"
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_TEXT_SUFFIXES = (".txt", ".text", ".md")
_TABLE_SUFFIXES = (".csv", ".tsv", ".xls", ".xlsx")
_HEAD_BYTES = 64 * 1024


class Container(Enum):
    """What the bytes of a file are, as far as it is looked into here."""

    JSON_LINES = "JSON lines"
    JSON_ARRAY = "a JSON array"
    PLAIN_TEXT = "plain text"
    UNREAD = "Parquet or zstd"


def container_of(path: Path) -> Container:
    """Tell what the file is.

    Raises:
        BadFile: when the name promises what the bytes do not keep; OSError, EOFError, zlib.error as `open_expanded`.
    """
    with path.open("rb") as file:
        magic = file.read(4)
    promised = COMPRESSED_SUFFIXES.get(path.suffix.lower())
    if promised and not magic.startswith(_MAGIC[promised]):
        raise BadFile(f"{path} is not a {promised} file, as its name says; rename it or compress it again")
    suffix = plain_suffix(path)
    if magic.startswith(_MAGIC["zstd"]):
        return Container.UNREAD
    with open_expanded(path) as file:
        head = file.read(_HEAD_BYTES).removeprefix(codecs.BOM_UTF8)
    if not head:
        raise BadFile(f"{path} is empty; it must hold at least one row")
    if head.startswith(_PARQUET_MAGIC):
        return Container.UNREAD
    if suffix == ".parquet":
        raise BadFile(f"{path} is not a Parquet file, as its name says: it does not begin with PAR1")
    if suffix in _TABLE_SUFFIXES:
        raise BadFile(f"{path} is a {suffix} table, which is not read; write it as Parquet or as JSON lines")
    if suffix in _TEXT_SUFFIXES:
        return Container.PLAIN_TEXT
    begins = head.lstrip(b" \t\r\n")[:1]
    if begins == b"[" and suffix in _JSON_SUFFIXES:
        return Container.JSON_ARRAY
    return Container.JSON_LINES if begins == b"{" or suffix in _JSON_SUFFIXES else Container.PLAIN_TEXT


def plain_suffix(path: Path) -> str:
    """Return the ending of the name without that of a compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED_SUFFIXES:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


@contextmanager
def open_expanded(path: Path) -> Iterator[BinaryIO]:
    """Open a file with gzip taken off. Reading raises OSError, EOFError or zlib.error where that is damaged."""
    with path.open("rb") as file:
        compressed = file.read(2) == _MAGIC["gzip"]
        file.seek(0)
        if not compressed:
            yield file
            return
        with gzip.GzipFile(fileobj=file) as expanded:
            yield cast("BinaryIO", expanded)

"""What the bytes of a data file are: JSON lines, a JSON array, a Parquet table or plain text.

Decides by the first bytes and, where they leave it open, by the name. Must not know formats or rows.
"""

from __future__ import annotations

import codecs
from enum import Enum
from pathlib import Path

from horizon_server.datasets.data_file import DataFile
from horizon_server.datasets.expansion import COMPRESSED_SUFFIXES, COMPRESSIONS, compression_of, open_expanded
from horizon_server.errors import InvalidData

PARQUET_MAGIC = b"PAR1"

_HEAD_BYTES = 64 * 1024
_PLAIN_SUFFIXES = (".txt", ".text", ".md")
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_TABLE_SUFFIXES = (".csv", ".tsv", ".xls", ".xlsx", ".arrow", ".feather", ".orc", ".avro")
_FOREIGN = {
    b"PK\x03\x04": "a zip file",
    b"%PDF": "a PDF",
    b"BZh": "bzip2-compressed",
    b"\xfd7zXZ": "xz-compressed",
    b"ARROW1": "an Arrow file",
}


class Container(Enum):
    """What the bytes of a file are."""

    JSON_LINES = "JSON lines"
    JSON_ARRAY = "a JSON array"
    PARQUET = "a Parquet table"
    PLAIN_TEXT = "plain text"


def container_of(file: DataFile) -> Container:
    """Tell what the file is, once expanded.

    Raises: InvalidData for an empty file, and for containers that are not read.
    """
    compression = compression_of(file)
    with open_expanded(file) as stream:
        head = stream.read(_HEAD_BYTES).removeprefix(codecs.BOM_UTF8)
    if not head:
        raise InvalidData(f"{file.name} is empty; it must hold at least one row")
    suffix = _inner_suffix(file.name)
    if head.startswith(PARQUET_MAGIC) or suffix == ".parquet":
        return _parquet(file, head, compression)
    _refuse_foreign(file, head, suffix)
    if suffix in _PLAIN_SUFFIXES:
        return Container.PLAIN_TEXT
    begins = head.lstrip(b" \t\r\n")[:1]
    if begins == b"[" and suffix in _JSON_SUFFIXES:
        return Container.JSON_ARRAY
    return Container.JSON_LINES if begins == b"{" or suffix in _JSON_SUFFIXES else Container.PLAIN_TEXT


def _inner_suffix(name: str) -> str:
    path = Path(name.lower())
    return Path(path.stem).suffix if path.suffix in COMPRESSED_SUFFIXES else path.suffix


def _parquet(file: DataFile, head: bytes, compression: str | None) -> Container:
    if compression:
        raise InvalidData(
            f"{file.name} is a {compression}-compressed Parquet file; Parquet is compressed within, so expand it"
        )
    if not head.startswith(PARQUET_MAGIC):
        raise InvalidData(f"{file.name} is not a Parquet file, as its name says: it does not begin with PAR1")
    return Container.PARQUET


def _refuse_foreign(file: DataFile, head: bytes, suffix: str) -> None:
    for magic, kind in COMPRESSIONS.items():
        if head.startswith(magic):
            raise InvalidData(f"{file.name} is compressed twice; expand it once ({kind} is inside)")
    for magic, kind in _FOREIGN.items():
        if head.startswith(magic):
            raise InvalidData(
                f"{file.name} is {kind}; send JSON lines, a JSON array, Parquet or text, plain or in gzip or zstd"
            )
    if suffix in _TABLE_SUFFIXES:
        raise InvalidData(f"{file.name} is a {suffix} table, which is not read; write it as Parquet or as JSON lines")

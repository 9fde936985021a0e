"""Data files as a stream of rows: lines of JSON, or plain text, in bounded memory.

Owns bytes, lines and encodings. Must not know what a row of a format must hold, nor models, tokens or jobs. Free of
torch and transformers: the daemon validates uploads with it and the preparation child reads with it, so both see the
same rows.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

from horizon_server.datasets.formats import DatasetFormat, detect_format
from horizon_server.datasets.values import json_kind
from horizon_server.datasets.violations import ViolationTally
from horizon_server.errors import FieldViolation, InvalidData, NotAvailableYet

MAX_LINE_BYTES = 16 * 1024 * 1024

_TEXT_BLOCK_BYTES = 1024 * 1024
_PLAIN_SUFFIXES = (".txt", ".text", ".md")
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_FOREIGN = {b"\x1f\x8b": "gzip-compressed", b"\x28\xb5\x2f\xfd": "zstd-compressed", b"PAR1": "a Parquet file"}


class Container(Enum):
    """What the bytes of a file are."""

    JSON_LINES = "JSON lines"
    PLAIN_TEXT = "plain text"


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """One file of a dataset: where its bytes are, and the name its user knows it by."""

    path: Path
    name: str

    @classmethod
    def at(cls, path: Path, *, name: str | None = None) -> DataFile:
        """Return the file at `path`, called by its own name unless another is given."""
        return cls(path=path, name=name or path.name)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One non-blank line: its columns, or the reason why it has none."""

    number: int
    columns: Mapping[str, Any]
    num_bytes: int = 0
    violation: FieldViolation | None = None
    unit: str = "line"
    """What is counted: lines of a text, or the rows of a table or array."""

    @property
    def path(self) -> str:
        """Where it is in its file, as violations name it: `line[17]`."""
        return f"{self.unit}[{self.number}]"

    def refusal(self, problem: str, *, field: str = "") -> FieldViolation:
        """Return the violation that says `problem` of the row, or of one of its fields."""
        path = f"{self.path}.{field}" if field else self.path
        return FieldViolation(field=path, description=f"{path} {problem}")


@dataclass(frozen=True, kw_only=True)
class TextPiece:
    """A piece of a plain text; `violation` says why bytes of line `number` could not be read."""

    number: int
    text: str
    violation: FieldViolation | None = None


def container_of(file: DataFile) -> Container:
    """Tell JSON lines from plain text: by the file's name where that says it, else by its first character.

    Raises: InvalidData for an empty file, NotAvailableYet for containers that this version does not read.
    """
    with file.path.open("rb") as stream:
        head = stream.read(4096).removeprefix(codecs.BOM_UTF8)
    for magic, kind in _FOREIGN.items():
        if head.startswith(magic):
            raise NotAvailableYet(
                f"{file.name} is {kind}, which this version does not read; send plain JSON lines or text"
            )
    if not head:
        raise InvalidData(f"{file.name} is empty; it must hold at least one row")
    suffix = Path(file.name).suffix.lower()
    if suffix in _PLAIN_SUFFIXES:
        return Container.PLAIN_TEXT
    if head.lstrip().startswith(b"[") and suffix in _JSON_SUFFIXES:
        raise NotAvailableYet(
            f"{file.name} is a JSON array, which this version does not read; write one object per line"
        )
    if suffix in _JSON_SUFFIXES or head.lstrip().startswith(b"{"):
        return Container.JSON_LINES
    return Container.PLAIN_TEXT


def resolve_format(
    file: DataFile, dataset_format: DatasetFormat, field_map: Mapping[str, str]
) -> tuple[DatasetFormat, Container]:
    """Return what the file is, deciding `auto` by its first readable row.

    Raises: InvalidData when it fits no format, several, or not the one asked for.
    """
    container = container_of(file)
    if container is Container.PLAIN_TEXT:
        if dataset_format not in (DatasetFormat.AUTO, DatasetFormat.TEXT):
            raise InvalidData(f"{file.name} is plain text, but format {dataset_format} needs one JSON object per line")
        if field_map:
            raise InvalidData(f"{file.name} is plain text and has no columns to map; leave --map out")
        return DatasetFormat.TEXT, container
    if dataset_format is not DatasetFormat.AUTO:
        return dataset_format, container
    tally = ViolationTally()
    for row in read_rows(file):
        if row.violation is None:
            try:
                return detect_format(row.columns.keys(), field_map), container
            except InvalidData as error:
                raise InvalidData(f"{file.name}, line {row.number}: {error.message}") from None
        tally.add([row.violation])
    tally.refuse(file.name)
    raise InvalidData(f"{file.name} holds no rows; it must hold at least one")


def read_rows(file: DataFile) -> Iterator[Row]:
    """Yield the non-blank lines of a JSON lines file, each parsed or with the reason why it could not be."""
    with file.path.open("rb") as stream:
        for number, offset, line in _read_lines(stream):
            if line is None:
                yield _refused(number, f"is longer than {MAX_LINE_BYTES // 2**20} MiB; split the row")
            elif line.strip():
                yield _parse(number, offset, line)


def read_text(file: DataFile) -> Iterator[TextPiece]:
    """Yield a plain text in pieces of at most 1 MiB that never split a character.

    A line with bytes that are not UTF-8 is yielded once, with a violation, and its text is left out.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    with file.path.open("rb") as stream:
        offset = _skip_byte_order_mark(stream)
        number, bad_line = 1, 0
        while True:
            piece = stream.readline(_TEXT_BLOCK_BYTES)
            pending = len(decoder.getstate()[0])
            try:
                yield TextPiece(number=number, text=decoder.decode(piece, final=not piece))
            except UnicodeDecodeError as error:
                decoder.reset()
                if bad_line != number:
                    violation = _not_utf8(number, offset - pending + error.start, error)
                    yield TextPiece(number=number, text="", violation=violation)
                bad_line = number
            if not piece:
                return
            offset += len(piece)
            number += piece.endswith(b"\n")


def _read_lines(stream: BinaryIO) -> Iterator[tuple[int, int, bytes | None]]:
    offset = _skip_byte_order_mark(stream)
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        start, size = offset, len(line)
        too_long = size > MAX_LINE_BYTES and not line.endswith(b"\n")
        while too_long and not line.endswith(b"\n") and (line := stream.readline(_TEXT_BLOCK_BYTES)):
            size += len(line)
        offset += size
        yield number, start, None if too_long else line


def _skip_byte_order_mark(stream: BinaryIO) -> int:
    if stream.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:
        return len(codecs.BOM_UTF8)
    stream.seek(0)
    return 0


def _parse(number: int, offset: int, line: bytes) -> Row:
    try:
        columns = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Row(number=number, columns={}, violation=_not_utf8(number, offset + error.start, error))
    except json.JSONDecodeError as error:
        return _refused(number, f"is not JSON: {error.msg} at column {error.colno}; write one JSON object per line")
    except (RecursionError, ValueError) as error:
        return _refused(number, f"is not JSON that can be read: {error}")
    if not isinstance(columns, dict):
        return _refused(number, f"is a JSON {json_kind(columns)}; each line must be one JSON object")
    return Row(number=number, columns=columns, num_bytes=len(line))


def _refused(number: int, problem: str) -> Row:
    path = f"line[{number}]"
    return Row(number=number, columns={}, violation=FieldViolation(field=path, description=f"{path} {problem}"))


def _not_utf8(number: int, offset: int, error: UnicodeDecodeError) -> FieldViolation:
    path = f"line[{number}]"
    byte = error.object[error.start]
    sentence = f"{path} is not UTF-8: byte 0x{byte:02x} at byte offset {offset} of the file; save the file as UTF-8"
    return FieldViolation(field=path, description=sentence)

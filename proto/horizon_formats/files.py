"""One data file: its bytes with any compression taken off, its container, and the limits on what is read from it."""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horizon_formats.problems import FieldViolation, InvalidFile, ServerOnly, writable

if TYPE_CHECKING:
    from typing_extensions import Self

# In bytes of a row's JSON or of its table cells. The longest row bounds the memory of every reader, so there must be
# one.
MAX_ROW_BYTES = 16 * 2**20
TOO_LONG = f"is longer than {MAX_ROW_BYTES // 2**20} MiB; split the row"

# Bytes that one compressed byte may become: data that people write stays below 50, and a bomb reaches 1000 with gzip.
MAX_EXPANSION = 200
MAX_EXPANDED_BYTES = 64 * 2**30

BLOCK_BYTES = 2**20

# Endings (compression aside) of the files that are taken from a pushed folder. Narrower than what is read when a file
# is named one by one: a folder's README.md is not data.
SENT_FROM_FOLDERS = (".jsonl", ".ndjson", ".json", ".parquet", ".txt")
COMPRESSED_SUFFIXES = {".gz": "gzip", ".zst": "zstd"}

_COMPRESSIONS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_PARQUET_MAGIC = b"PAR1"
# Known by their first bytes, so that the message names what the file is; as plain text each would be a thousand bad
# lines.
_FOREIGN = {
    b"PK\x03\x04": "a zip file",
    b"%PDF": "a PDF",
    b"BZh": "bzip2-compressed",
    b"\xfd7zXZ": "xz-compressed",
    b"ARROW1": "an Arrow file",
}
_PLAIN_SUFFIXES = (".txt", ".text", ".md")
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_TABLE_SUFFIXES = (".csv", ".tsv", ".xls", ".xlsx", ".arrow", ".feather", ".orc", ".avro")
_HEAD_BYTES = 64 * 1024


@dataclass(slots=True, kw_only=True)
class Row:
    """One row: its columns, or the reason why it has none."""

    file: str
    number: int
    columns: Mapping[str, Any]
    num_bytes: int = 0
    violation: FieldViolation | None = None
    unit: str = "line"  # what is counted: lines of a text, or the rows of a table or array

    @property
    def place(self) -> str:
        """How every message spells a line or row of a file: `chats.jsonl:17`, `table.parquet:row 3`."""
        return f"{self.file}:{self.number}" if self.unit == "line" else f"{self.file}:{self.unit} {self.number}"

    def refusal(self, problem: str, *, field: str = "") -> FieldViolation:
        """Return the violation that states `problem` about the row, or about one of its fields."""
        place = self.place
        if not field:
            return FieldViolation(field=place, description=f"{place} {problem}")
        # A field is a path in the user's data, which may hold what UTF-8 cannot.
        return FieldViolation(field=writable(f"{place}:{field}"), description=writable(f"{place}: {field} ") + problem)

    @classmethod
    def refused(cls, file: str, number: int, problem: str, *, unit: str = "line") -> Row:
        """Return a row that could not be read, for this reason."""
        row = cls(file=file, number=number, columns={}, unit=unit)
        row.violation = row.refusal(problem)
        return row


@dataclass(slots=True, kw_only=True)
class Skip:
    """Rows still to pass over, counted over all files of a dataset; each reader takes off those that it has passed."""

    left: int = 0


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """One file of a dataset: where its bytes are, and the name by which its user knows it."""

    path: Path
    name: str

    @classmethod
    def at(cls, path: Path, *, name: str | None = None) -> Self:
        """Return the file at `path`, called by its own name unless another is given."""
        return cls(path=path, name=name or path.name)

    # The server overrides what follows: it has Arrow. Any, as the streams of gzip and Arrow share no type but `read`
    # and `close`.

    def open_zstd(self) -> Any:
        """Return the expanded bytes of a zstd file, as a stream."""
        raise ServerOnly

    def table_columns(self) -> list[str]:
        """Return the names of a Parquet table's columns."""
        raise ServerOnly

    def table_rows(self, columns: Collection[str] | None, skip: Skip) -> Iterator[Row]:
        """Yield the rows of a Parquet table, with these columns (those that the table has) or with all."""
        raise ServerOnly


class Container(Enum):
    """What the bytes of a file are."""

    JSON_LINES = "JSON lines"
    JSON_ARRAY = "a JSON array"
    PARQUET = "a Parquet table"
    PLAIN_TEXT = "plain text"


def container_of(file: DataFile) -> Container:
    """Return what the file is, once expanded: by its first bytes and, where they leave it open, by its name.

    Raises: InvalidFile for an empty file, and for containers that are not supported.
    """
    compression = _compression_of(file)
    with open_expanded(file) as (stream, _):
        head = stream.read(_HEAD_BYTES)
    if not head:
        raise InvalidFile(f"{file.name} is empty; it must hold at least one row")
    suffix = plain_suffix(file.name)
    if head.startswith(_PARQUET_MAGIC) or suffix == ".parquet":
        if compression:
            # Its footer is at the end, so it would have to be expanded to disk first.
            raise InvalidFile(
                f"{file.name} is a {compression}-compressed Parquet file; Parquet is compressed inside, so expand it"
            )
        if not head.startswith(_PARQUET_MAGIC):
            raise InvalidFile(f"{file.name} is not a Parquet file, as its name says: it does not begin with PAR1")
        return Container.PARQUET
    for magic, kind in _COMPRESSIONS.items():
        if head.startswith(magic):
            raise InvalidFile(f"{file.name} is compressed twice; expand it once ({kind} is inside)")
    for magic, kind in _FOREIGN.items():
        if head.startswith(magic):
            raise InvalidFile(
                f"{file.name} is {kind}; send JSON lines, a JSON array, Parquet or text, plain or in gzip or zstd"
            )
    if suffix in _TABLE_SUFFIXES:
        # Some of these are text: read as such, every line of a CSV would be trained as prose.
        raise InvalidFile(
            f"{file.name} is a {suffix} table, which is not supported; write it as Parquet or as JSON lines"
        )
    if suffix in _PLAIN_SUFFIXES:
        return Container.PLAIN_TEXT
    first = head.lstrip(b" \t\r\n")[:1]
    if first == b"[" and suffix in _JSON_SUFFIXES:
        return Container.JSON_ARRAY
    return Container.JSON_LINES if first == b"{" or suffix in _JSON_SUFFIXES else Container.PLAIN_TEXT


def plain_suffix(name: str) -> str:
    """Return the ending of a file's name in lower case, without that of a compression."""
    path = Path(name.lower())
    return Path(path.stem).suffix if path.suffix in COMPRESSED_SUFFIXES else path.suffix


def _compression_of(file: DataFile) -> str | None:
    with file.path.open("rb") as stream:
        head = stream.read(4)
    found = next((kind for magic, kind in _COMPRESSIONS.items() if head.startswith(magic)), None)
    promised = COMPRESSED_SUFFIXES.get(Path(file.name).suffix.lower())
    if promised and head and found != promised:
        raise InvalidFile(f"{file.name} is not {promised}-compressed, as its name says; rename it or compress it again")
    return found


@contextmanager
def open_expanded(file: DataFile) -> Iterator[tuple[io.BufferedReader, int]]:
    """Open the bytes of the file as they were before compression, past any byte order mark; also gives the mark's
    length.

    Raises: InvalidFile, also while reading, when the compression is not the one that the name promises, is damaged, or
    expands beyond its allowance.
    """
    compression = _compression_of(file)
    raw: io.RawIOBase
    if compression is None:
        raw = io.FileIO(file.path)
    else:
        source = gzip.GzipFile(file.path, "rb") if compression == "gzip" else file.open_zstd()
        raw = _Expanded(source, file, compression)
    stream: io.BufferedReader = io.BufferedReader(raw, BLOCK_BYTES)
    with stream:
        has_mark = stream.peek(len(codecs.BOM_UTF8)).startswith(codecs.BOM_UTF8)
        # Positions in messages count from the first byte of the file, so the mark's bytes are not forgotten.
        yield stream, len(stream.read(len(codecs.BOM_UTF8))) if has_mark else 0


class Allowance:
    """How far one file may still expand."""

    def __init__(self, file: DataFile) -> None:
        self._name = file.name
        # A small file is always allowed one row of the largest size: a row of one letter repeated is no bomb.
        self._limit = min(max(file.path.stat().st_size * MAX_EXPANSION, MAX_ROW_BYTES), MAX_EXPANDED_BYTES)
        self._left = self._limit

    def take(self, num_bytes: int) -> None:
        """Count bytes that have come out. Raises: InvalidFile once there are more than the file may hold."""
        self._left -= num_bytes
        if self._left < 0:
            raise InvalidFile(
                f"{self._name} expands to more than {self._limit} bytes, the limit for a file of its size "
                f"({MAX_EXPANSION} times its bytes, {MAX_EXPANDED_BYTES // 2**30} GiB at most); push it uncompressed "
                "or in parts"
            )


class _Expanded(io.RawIOBase):
    """Reads from a decompressor, counts, and explains what is wrong with the compression."""

    def __init__(self, source: Any, file: DataFile, compression: str) -> None:
        super().__init__()
        self._source = source
        self._file = file
        self._compression = compression
        self._allowance = Allowance(file)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        try:
            piece = self._source.read(len(buffer))
        except (OSError, EOFError, zlib.error) as error:
            # An OSError with a number is the disk's; decompressors raise theirs without one. BadGzipFile is an OSError
            # too.
            if isinstance(error, OSError) and error.errno is not None and not isinstance(error, gzip.BadGzipFile):
                raise
            raise InvalidFile(
                f"{self._file.name} is damaged: its {self._compression} data cannot be expanded ({error}); compress it "
                "again"
            ) from error
        self._allowance.take(len(piece))
        buffer[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        if not self.closed:
            self._source.close()
        super().close()

"""The bytes of a data file, with gzip or zstd around them taken off, and never more of them than the file can honestly hold.

Owns the compressions and the limit on what a small file may grow to. Must not know what the bytes mean.
"""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path
from typing import BinaryIO, Protocol

from horizon_server.datasets.data_file import MAX_ROW_BYTES, DataFile
from horizon_server.errors import InvalidData

MAX_EXPANSION = 200
"""Bytes that one compressed byte may become; data that people write stays below 50."""
MAX_EXPANDED_BYTES = 64 * 2**30

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
COMPRESSIONS = {GZIP_MAGIC: "gzip", ZSTD_MAGIC: "zstd"}
COMPRESSED_SUFFIXES = {".gz": "gzip", ".zst": "zstd"}

_BUFFER_BYTES = 1024 * 1024


class Allowance:
    """How far one file may still expand. Small files are always allowed one row of the largest size."""

    def __init__(self, file: DataFile) -> None:
        self._name = file.name
        self._limit = min(max(file.path.stat().st_size * MAX_EXPANSION, MAX_ROW_BYTES), MAX_EXPANDED_BYTES)
        self._left = self._limit

    def take(self, num_bytes: int) -> None:
        """Count bytes that have come out.

        Raises: InvalidData once there are more than the file may hold.
        """
        self._left -= num_bytes
        if self._left < 0:
            raise InvalidData(
                f"{self._name} expands to more than {self._limit} bytes, the most that is read from a file of its size "
                f"({MAX_EXPANSION} times its bytes, {MAX_EXPANDED_BYTES // 2**30} GiB at most); push it uncompressed or in parts"
            )


def compression_of(file: DataFile) -> str | None:
    """Return `gzip` or `zstd` by the file's first bytes, or None.

    Raises: InvalidData when the name promises a compression that the bytes do not keep.
    """
    with file.path.open("rb") as stream:
        head = stream.read(4)
    found = next((kind for magic, kind in COMPRESSIONS.items() if head.startswith(magic)), None)
    promised = COMPRESSED_SUFFIXES.get(Path(file.name).suffix.lower())
    if promised and head and found != promised:
        raise InvalidData(f"{file.name} is not {promised}-compressed, as its name says; rename it or compress it again")
    return found


def open_expanded(file: DataFile) -> BinaryIO:
    """Return a stream over the bytes of the file as they were before compression.

    Raises: InvalidData, also while reading, when the compression is damaged or expands beyond its allowance.
    """
    compression = compression_of(file)
    if compression is None:
        return file.path.open("rb", buffering=_BUFFER_BYTES)
    source = gzip.GzipFile(file.path, "rb") if compression == "gzip" else _open_zstd(file.path)
    return io.BufferedReader(_Expanded(source, file, compression), _BUFFER_BYTES)


class _Source(Protocol):
    def read(self, size: int, /) -> bytes: ...

    def close(self) -> None: ...


class _Expanded(io.RawIOBase):
    """Reads from a decompressor, counting, and says in a sentence what is wrong with the compression."""

    def __init__(self, source: _Source, file: DataFile, compression: str) -> None:
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
            if isinstance(error, OSError) and error.errno is not None and not isinstance(error, gzip.BadGzipFile):
                raise
            raise InvalidData(
                f"{self._file.name} is damaged: its {self._compression} data cannot be expanded ({error}); compress it again"
            ) from error
        self._allowance.take(len(piece))
        buffer[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        if not self.closed:
            self._source.close()
        super().close()


def _open_zstd(path: Path) -> _Source:
    # Arrow reads Parquet for us and brings this decoder, which refuses windows above 128 MiB.
    import pyarrow

    stream: _Source = pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")
    return stream

"""Local files to push: their size, their sha256, and whether they have changed since they were read."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from horizon_client.errors import BadFile
from horizon_client.transfer.reporter import Progress, Reporter

PIECE_BYTES = 4 * 2**20
"""Local files are read in pieces of this size, so that an interrupt is noticed between two of them."""


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A local file and the path it will have in the dataset or model."""

    source: Path
    path: str
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, source: Path, path: str) -> SourceFile:
        """Return the file at `source`, which will be `path` on the server.

        Raises:
            BadFile: when it cannot be read or is empty.
        """
        try:
            status = source.stat()
            with source.open("rb"):  # may fail although stat works, and should fail before the first file is sent
                pass
        except OSError as error:
            raise BadFile(f"cannot read {source}: {error.strerror}") from error
        if status.st_size == 0:
            raise BadFile(f"{source} is empty")
        return cls(source=source, path=path, size_bytes=status.st_size, mtime_ns=status.st_mtime_ns)

    def require_unchanged(self) -> None:
        """Refuse a file that was written to in the meantime.

        Raises:
            BadFile: when its size or modification time differs.
        """
        try:
            status = self.source.stat()
        except OSError as error:
            raise BadFile(f"cannot read {self.source}: {error.strerror}") from error
        if (status.st_size, status.st_mtime_ns) != (self.size_bytes, self.mtime_ns):
            raise BadFile(f"{self.source} was changed while it was being pushed; run the same command again")


@dataclass(frozen=True, kw_only=True)
class HashedFile:
    """A local file and the sha256 of its content."""

    file: SourceFile
    sha256: str


async def hash_files(files: Sequence[SourceFile], reporter: Reporter) -> list[HashedFile]:
    """Return the files with their sha256, reading each once."""
    total = sum(file.size_bytes for file in files)
    done = 0
    hashed: list[HashedFile] = []
    for file in files:
        digest = hashlib.sha256()

        def report(num_bytes: int, name: str = file.path) -> None:
            nonlocal done
            done += num_bytes
            reporter.progress(Progress(phase="hash", name=name, done_bytes=done, total_bytes=total))

        await in_pieces(_hashing(file.source, digest.update), report)
        file.require_unchanged()
        hashed.append(HashedFile(file=file, sha256=digest.hexdigest()))
    return hashed


def content_digest(files: Sequence[HashedFile], *qualifiers: str) -> str:
    """Return one hash over the paths and contents of all files."""
    lines = [f"{file.file.path}\0{file.sha256}" for file in files]
    return hashlib.sha256("\n".join([*qualifiers, *sorted(lines)]).encode()).hexdigest()


async def in_pieces(steps: Iterator[int], on_bytes: Callable[[int], None]) -> None:
    """Run a generator that yields the bytes it has processed, each step in a thread, so that the event loop runs in between."""
    while (num_bytes := await asyncio.to_thread(next, steps, None)) is not None:
        on_bytes(num_bytes)


def _hashing(source: Path, update: Callable[[bytes], object]) -> Iterator[int]:
    try:
        with source.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                update(piece)
                yield len(piece)
    except OSError as error:
        raise BadFile(f"cannot read {source}: {error.strerror}") from error

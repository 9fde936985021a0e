"""Local files to push: their size, their sha256, and whether they have changed since they were read."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from horizon_client.errors import BadFile
from horizon_client.transfer.reporter import Phase, Progress, Reporter

PIECE_BYTES = 4 * 2**20
"""Local files are read in pieces of this size, so that an interrupt is noticed between two of them."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an error of the operating system into one that names the file.

    Raises:
        BadFile: when the file cannot be read.
    """
    try:
        yield
    except OSError as error:
        raise BadFile(f"cannot read {path}: {error.strerror}") from error


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
        # open may fail although stat works, and should fail before the first file is sent
        with reading(source), source.open("rb"):
            status = source.stat()
        if status.st_size == 0:
            raise BadFile(f"{source} is empty")
        return cls(source=source, path=path, size_bytes=status.st_size, mtime_ns=status.st_mtime_ns)

    def require_unchanged(self) -> None:
        """Refuse a file that was written to in the meantime.

        Raises:
            BadFile: when its size or modification time differs.
        """
        with reading(self.source):
            status = self.source.stat()
        if (status.st_size, status.st_mtime_ns) != (self.size_bytes, self.mtime_ns):
            raise BadFile(f"{self.source} was changed while it was being pushed; run the same command again")


@dataclass(frozen=True, kw_only=True)
class HashedFile:
    """A local file and the sha256 of its content."""

    file: SourceFile
    sha256: str


async def read_through(
    files: Sequence[SourceFile],
    read: Callable[[SourceFile], Iterator[int]],
    phase: Phase,
    on_progress: Callable[[Progress], None],
) -> None:
    """Read all files; `read` yields the bytes that it has processed of one, and each of its steps runs in a thread.

    Raises:
        BadFile: naming the first file that cannot be read.
    """
    total = sum(file.size_bytes for file in files)
    done = 0
    for file in files:
        steps = read(file)
        while True:
            # only around the step: an error of `on_progress`, the caller's code, is not an error of the file
            with reading(file.source):
                num_bytes = await asyncio.to_thread(next, steps, None)
            if num_bytes is None:
                break
            done = min(done + num_bytes, total)  # a file may grow while it is read
            on_progress(Progress(phase=phase, name=file.path, done_bytes=done, total_bytes=total))


async def hash_files(files: Sequence[SourceFile], reporter: Reporter) -> list[HashedFile]:
    """Return the files with their sha256, reading each once."""
    hashed: list[HashedFile] = []

    def read(file: SourceFile) -> Iterator[int]:
        digest = hashlib.sha256()
        with file.source.open("rb") as content:
            while piece := content.read(PIECE_BYTES):
                digest.update(piece)
                yield len(piece)
        file.require_unchanged()
        hashed.append(HashedFile(file=file, sha256=digest.hexdigest()))

    await read_through(files, read, "hash", reporter.progress)
    return hashed


def content_digest(files: Sequence[HashedFile], *qualifiers: str) -> str:
    """Return one hash over the paths and contents of all files."""
    lines = [f"{file.file.path}\0{file.sha256}" for file in files]
    return hashlib.sha256("\n".join([*qualifiers, *sorted(lines)]).encode()).hexdigest()

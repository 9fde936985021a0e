"""Local files about to be pushed: which they are, their sha256, and whether they stayed the same meanwhile. Knows no format."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from horizon_client.errors import BadFile
from horizon_client.progress import PIECE_BYTES, OnProgress, Progress, in_pieces


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A local file and the path it will have in the dataset or model."""

    source: Path
    path: str
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, source: Path, path: str) -> SourceFile:
        """Look at `source`.

        Raises:
            BadFile: when it is not a readable file with something in it.
        """
        try:
            status = source.stat()
            with source.open("rb"):
                pass
        except OSError as error:
            raise BadFile(f"cannot read {source}: {error.strerror}") from error
        if status.st_size == 0:
            raise BadFile(f"{source} is empty")
        return cls(source=source, path=path, size_bytes=status.st_size, mtime_ns=status.st_mtime_ns)

    def require_unchanged(self) -> None:
        """Refuse to go on with a file that was written to since it was looked at.

        Raises:
            BadFile: when its size or time differ.
        """
        try:
            status = self.source.stat()
        except OSError as error:
            raise BadFile(f"cannot read {self.source} any more: {error.strerror}") from error
        if (status.st_size, status.st_mtime_ns) != (self.size_bytes, self.mtime_ns):
            raise BadFile(f"{self.source} was changed while it was being pushed; run the same command again")


@dataclass(frozen=True, kw_only=True)
class HashedFile:
    """A local file with the name of its content."""

    file: SourceFile
    sha256: str


async def hash_files(files: Sequence[SourceFile], on_progress: OnProgress) -> list[HashedFile]:
    """Return the files with their sha256, reading each once."""
    total = sum(file.size_bytes for file in files)
    done = 0
    hashed: list[HashedFile] = []
    for file in files:
        digest = hashlib.sha256()

        def report(num_bytes: int, name: str = file.path) -> None:
            nonlocal done
            done += num_bytes
            on_progress(Progress(phase="hash", name=name, done_bytes=done, total_bytes=total))

        await in_pieces(_hashing(file.source, digest.update), report)
        file.require_unchanged()
        hashed.append(HashedFile(file=file, sha256=digest.hexdigest()))
    return hashed


def content_digest(files: Sequence[HashedFile], *qualifiers: str) -> str:
    """Return one short-enough name for the content of all files."""
    lines = [f"{file.file.path}\0{file.sha256}" for file in files]
    return hashlib.sha256("\n".join([*qualifiers, *sorted(lines)]).encode()).hexdigest()


def _hashing(source: Path, update: Callable[[bytes], object]) -> Iterator[int]:
    try:
        with source.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                update(piece)
                yield len(piece)
    except OSError as error:
        raise BadFile(f"cannot read {source}: {error.strerror}") from error

"""Brings the files of one checkpoint into a local folder: ranged, resumed from `.part` files, verified by sha256, renamed when whole.

Never writes outside the folder, whatever paths the server lists, and never replaces a different file unasked. Knows no model format.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import BinaryIO, TypeAlias

from horizon_client.connection import Backoff, RetryPolicy
from horizon_client.errors import (
    BadFile,
    CorruptDownload,
    FileConflict,
    HorizonClientError,
    ServerFailed,
    Unavailable,
    Violation,
)
from horizon_client.progress import PIECE_BYTES, OnNotice, OnProgress, Progress, in_pieces
from horizon_client.resources import FileEntry

ReadFile: TypeAlias = Callable[[str, int], AsyncIterator[tuple[int, bytes]]]
"""(path, offset) -> pieces as (offset, data)."""

TRAINER_PREFIX = "trainer/"


class CheckpointDownload:
    """One pull into one folder."""

    def __init__(
        self, read_file: ReadFile, folder: Path, *, retry: RetryPolicy, on_progress: OnProgress, on_notice: OnNotice
    ) -> None:
        self._read_file = read_file
        self._folder = folder
        self._retry = retry
        self._on_progress = on_progress
        self._on_notice = on_notice
        self._done_bytes = 0
        self._total_bytes = 0

    async def fetch(self, files: Sequence[FileEntry], *, force: bool) -> int:
        """Bring all files and return how many bytes travelled; identical files that are there already are left alone.

        Raises:
            FileConflict: when different files are in the way and `force` is not given; nothing is fetched then.
            CorruptDownload: when a file does not have the listed sha256.
            BadFile: when the folder cannot be written.
        """
        targets = {entry.path: self._target(entry.path) for entry in files}
        self._total_bytes = sum(entry.size_bytes for entry in files)
        try:
            wanted = [entry for entry in files if not await self._is_there(entry, targets[entry.path])]
            if not force:
                self._refuse_overwriting([targets[entry.path] for entry in wanted])
            return sum([await self._fetch_file(entry, targets[entry.path]) for entry in wanted])
        except OSError as error:
            if isinstance(error, HorizonClientError):
                raise
            raise BadFile(f"cannot write below {self._folder}: {error.strerror} ({error.filename})") from error

    def _target(self, listed: str) -> Path:
        """Return where a listed path goes.

        Raises:
            ServerFailed: when it would lead out of the folder.
        """
        pure = PurePosixPath(listed)
        parts = listed.split("/")
        plain = all(part not in ("", ".", "..") for part in parts) and not any(c in listed for c in "\\\0:")
        if not plain or pure.is_absolute() or PureWindowsPath(listed).is_absolute():
            raise ServerFailed(
                f"the server lists the path {listed!r:.100}, which leads out of the folder; nothing was written"
            )
        target = self._folder.joinpath(*parts)
        if not target.parent.resolve().is_relative_to(self._folder.resolve()):
            raise ServerFailed(f"{target.parent} is a link that leads out of {self._folder}; nothing was written")
        return target

    async def _is_there(self, entry: FileEntry, target: Path) -> bool:
        if _file_size(target) != entry.size_bytes:
            return False
        digest = hashlib.sha256()
        await in_pieces(_hashing(target, entry.size_bytes, digest.update), lambda _: None)
        same = digest.hexdigest() == entry.sha256
        if same:
            self._advance(entry, entry.size_bytes)
        return same

    def _refuse_overwriting(self, targets: Sequence[Path]) -> None:
        taken = [target for target in targets if target.is_symlink() or target.exists()]
        if taken:
            raise FileConflict(
                f"{taken[0]} exists and is different; choose another folder, or pass --force (force=True) to replace it",
                violations=[Violation(field=str(target), description="exists and is different") for target in taken],
            )

    async def _fetch_file(self, entry: FileEntry, target: Path) -> int:
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.part")
        resumed = part.exists()
        received, digest = await self._fill_part(entry, part)
        if digest != entry.sha256 and resumed:
            part.unlink()
            self._on_notice(
                f"what was left of an earlier download of {entry.path} does not fit; fetching it from the start"
            )
            self._done_bytes -= entry.size_bytes
            again, digest = await self._fill_part(entry, part)
            received += again
        if digest != entry.sha256:
            part.unlink()
            raise CorruptDownload(
                f"{entry.path} arrived damaged: its sha256 is {digest[:12]}, not {entry.sha256[:12]}; pull it again"
            )
        part.replace(target)
        return received

    async def _fill_part(self, entry: FileEntry, part: Path) -> tuple[int, str]:
        """Fill `part` to the listed size; return the bytes that travelled and the sha256 of the whole."""
        digest = hashlib.sha256()
        offset = _usable_part_bytes(part, entry.size_bytes)
        if offset:
            await in_pieces(_hashing(part, offset, digest.update), lambda _: None)
            self._advance(entry, offset)
        start, backoff = offset, Backoff(self._retry)
        with part.open("ab") as file:
            while offset < entry.size_bytes:
                before = offset
                try:
                    async for at, data in self._read_file(entry.path, offset):
                        _require_fit(entry, at, data, offset)
                        await asyncio.to_thread(_append, file, data, digest.update)
                        offset += len(data)
                        self._advance(entry, len(data))
                    problem: HorizonClientError = Unavailable(
                        f"{entry.path} ended at byte {offset} of {entry.size_bytes}"
                    )
                except Unavailable as error:
                    problem = error
                if offset > before:
                    backoff.succeeded()
                if offset < entry.size_bytes:
                    await self._pause(backoff, problem, entry)
            file.flush()
            await asyncio.to_thread(os.fsync, file.fileno())
        return offset - start, digest.hexdigest()

    async def _pause(self, backoff: Backoff, problem: HorizonClientError, entry: FileEntry) -> None:
        wait_s = backoff.wait_s(problem)
        if wait_s is None:
            raise problem
        self._on_notice(f"the download of {entry.path} was cut ({problem.message}); going on in {wait_s:.1f} s")
        await asyncio.sleep(wait_s)

    def _advance(self, entry: FileEntry, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        self._on_progress(
            Progress(phase="download", name=entry.path, done_bytes=self._done_bytes, total_bytes=self._total_bytes)
        )


def _require_fit(entry: FileEntry, at: int, data: bytes, offset: int) -> None:
    if at != offset or offset + len(data) > entry.size_bytes:
        raise CorruptDownload(
            f"the server sent bytes {at}..{at + len(data)} of {entry.path} where byte {offset} was due"
        )


def _file_size(path: Path) -> int | None:
    """Return the size of a plain file; None for anything else, links among them."""
    return path.stat().st_size if path.is_file() and not path.is_symlink() else None


def _usable_part_bytes(part: Path, whole_bytes: int) -> int:
    """Return how much of an earlier download may be kept, and remove what may not."""
    size = _file_size(part)
    if size is None or size > whole_bytes:
        part.unlink(missing_ok=True)
        return 0
    return size


def _append(file: BinaryIO, data: bytes, update: Callable[[bytes], object]) -> None:
    file.write(data)
    update(data)


def _hashing(path: Path, num_bytes: int, update: Callable[[bytes], object]) -> Iterator[int]:
    with path.open("rb") as file:
        while num_bytes > 0 and (piece := file.read(min(PIECE_BYTES, num_bytes))):
            update(piece)
            num_bytes -= len(piece)
            yield len(piece)

"""One partial upload on its way to disk: a piece is written and hashed while the next one arrives, and synced while
others follow."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from horizon_server.blobs.concurrency import in_thread
from horizon_server.durable import is_out_of_space
from horizon_server.errors import DiskFull, InvalidUpload

# The most that is on its way to the disk, and so the most that is lost when the power fails.
SYNC_EVERY_BYTES = 32 * 2**20

_REHASH_BLOCK_BYTES = 4 * 2**20
_THEN = "what is durable of this upload is kept: free space there, then push again to continue"


class Disk:
    """What uploads need from the disk; a test gives one that fails."""

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write some of `data` and return how much."""
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        """Make what was written durable."""
        os.fsync(descriptor)


@contextmanager
def disk_full_reported(then: str = _THEN) -> Iterator[None]:
    """Turn the system's "no space left" into an error that says what the caller can do.

    Raises:
        DiskFull: when the block failed for lack of space.
    """
    try:
        yield
    except OSError as error:
        if not is_out_of_space(error):
            raise
        raise DiskFull(f"the node's disk is full; {then}", retry_after_s=60.0) from error


class Part:
    """The file of a partial upload; `hash` is that of everything in it.

    `committed_bytes` are durable; bytes above may be lost.

    Thread: every method blocks, and only `sync` may run while another thread uses the part.
    """

    def __init__(self, path: Path, *, disk: Disk) -> None:
        self.path = path
        self.hash = hashlib.sha256()
        self.size_bytes = self.committed_bytes = 0
        self._disk = disk
        self._descriptor = -1
        self._sync_failed = False

    def open(self, offset: int) -> None:
        """Open the file at `offset`. One below what has arrived is taken: the bytes above it are sent again.

        Whether or not it succeeds, `close` must be called.

        Raises:
            InvalidUpload: when the offset is beyond what has arrived.
        """
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self.size_bytes = os.fstat(self._descriptor).st_size
        if not 0 <= offset <= self.size_bytes:
            raise InvalidUpload(
                f"the upload cannot continue at byte {offset}: {self.size_bytes} bytes have arrived; "
                "ask for the blob's status and send from there"
            )
        if offset < self.size_bytes:
            os.ftruncate(self._descriptor, offset)
        # Read again, although a hash could be kept: this finds bytes that went bad on disk (ADR 0007).
        while block := os.read(self._descriptor, _REHASH_BLOCK_BYTES):
            self.hash.update(block)
        self.size_bytes = self.committed_bytes = offset

    def append(self, data: bytes) -> None:
        """Write `data` at the end."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._disk.write(self._descriptor, rest) :]
        self.hash.update(data)
        # Only now, so that a failure in the middle of a piece ends the part at the last whole one.
        self.size_bytes += len(data)

    def sync(self) -> None:
        """Make everything durable that was written before this call."""
        # Taken before the sync: another thread may append meanwhile, and those bytes are not covered.
        size_bytes = self.size_bytes
        if self.committed_bytes == size_bytes:
            return
        try:
            self._disk.sync(self._descriptor)
        except OSError:
            self._sync_failed = True
            raise
        self.committed_bytes = size_bytes

    def settle(self) -> None:
        """After a failure, end at the last whole piece where it can be made durable, else at the last durable byte."""
        os.ftruncate(self._descriptor, self.size_bytes)
        # A sync that failed is not tried again: the system forgets what it could not write, and the next one succeeds
        # without it.
        if not self._sync_failed:
            with suppress(OSError):
                self.sync()
        os.ftruncate(self._descriptor, self.committed_bytes)
        self.size_bytes = self.committed_bytes

    def close(self) -> None:
        """Give the descriptor back, where there is one. The file stays, unless nothing is in it."""
        if self._descriptor < 0:
            return
        os.close(self._descriptor)
        self._descriptor = -1
        if self.size_bytes == 0:
            self.path.unlink(missing_ok=True)


class PartWriter:
    """Writes one part in the loop's threads; it ends at `given_bytes` once everything is written.

    Whatever happens, `finish` must be awaited: it keeps all that `put` was given.

    Thread: belongs to one event loop.
    """

    def __init__(self, part: Part) -> None:
        self._part = part
        self.given_bytes = part.size_bytes
        self._writing: asyncio.Future[None] | None = None
        self._syncing: asyncio.Future[None] | None = None
        self._held = b""

    async def put(self, data: bytes) -> None:
        """Write `data` after what is being written; returns before it is written.

        Raises:
            OSError: why an earlier piece could not be written, or made durable.
        """
        self.given_bytes += len(data)
        # Held before anything is awaited, so that `finish` writes this piece even if the caller is cancelled here.
        self._held = data
        await _ended(self._writing)
        self._write_held()
        if self._part.size_bytes - self._part.committed_bytes >= SYNC_EVERY_BYTES:
            await _ended(self._syncing)
            self._syncing = asyncio.get_running_loop().run_in_executor(None, self._part.sync)

    async def finish(self) -> None:
        """Write what is held, and make everything durable. Where that fails, the part ends at what is.

        Raises:
            OSError: why it failed.
        """
        try:
            await _ended(self._writing)
            self._write_held()
            await _ended(self._writing)
            await _ended(self._syncing)
            await in_thread(self._part.sync)
        except OSError:
            # Whatever comes of them: the file may be cut only when no thread touches it any more.
            for work in (self._writing, self._syncing):
                with suppress(OSError):
                    await _ended(work)
            await in_thread(self._part.settle)
            raise

    def _write_held(self) -> None:
        if data := self._held:
            self._held = b""
            self._writing = asyncio.get_running_loop().run_in_executor(None, self._part.append, data)


async def _ended(work: asyncio.Future[None] | None) -> None:
    if work is not None:
        # Not awaited itself: cancelling the caller would cancel the future, although its thread continues.
        await asyncio.wait([work])
        work.result()

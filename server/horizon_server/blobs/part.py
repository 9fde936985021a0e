"""One partial upload on disk: appended to, made durable in steps, hashed as it grows.

Everything here blocks.

Thread: one at a time, but for `sync`; `PartWriter` sees to that.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from horizon_server.blobs.disk import Disk
from horizon_server.errors import InvalidUpload

_REHASH_BLOCK_BYTES = 4 * 2**20


class Part:
    """A partial upload open for writing. `committed_bytes` are durable; bytes above may be lost."""

    def __init__(self, path: Path, descriptor: int, disk: Disk) -> None:
        self.path = path
        self._descriptor = descriptor
        self._disk = disk
        self._hash = hashlib.sha256()
        self._sync_failed = False
        self.size_bytes = os.fstat(descriptor).st_size
        self.committed_bytes = self.size_bytes

    @classmethod
    def open(cls, path: Path, *, offset: int, disk: Disk) -> Part:
        """Open the part at `path`, making it when there is none, at `offset`.

        An offset below what has arrived is taken: the bytes above it are sent again.

        Raises:
            InvalidUpload: when the offset is beyond what has arrived.
        """
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        part = cls(path, descriptor, disk)
        try:
            part._seek_to(offset)
        except BaseException:
            part.close()
            raise
        return part

    def append(self, data: bytes) -> None:
        """Write `data` at the end."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._disk.write(self._descriptor, rest) :]
        self._hash.update(data)
        self.size_bytes += len(data)

    def sync(self) -> None:
        """Make everything durable that was written before this call.

        Thread: may run while another thread appends.
        """
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
        """After a failure, end at the last whole piece where it can be made durable, else at the last durable byte.

        A sync that failed is not tried again: the system forgets what it could not write, and the next one succeeds without it.
        """
        os.ftruncate(self._descriptor, self.size_bytes)
        if not self._sync_failed:
            with suppress(OSError):
                self.sync()
        os.ftruncate(self._descriptor, self.committed_bytes)
        self.size_bytes = self.committed_bytes

    def sha256(self) -> str:
        """Return the sha256 of everything written, in hexadecimal."""
        return self._hash.hexdigest()

    def close(self) -> None:
        """Give the descriptor back. The file stays, unless nothing is in it."""
        os.close(self._descriptor)
        if self.size_bytes == 0:
            self.path.unlink(missing_ok=True)

    def _seek_to(self, offset: int) -> None:
        if not 0 <= offset <= self.size_bytes:
            raise InvalidUpload(
                f"the upload cannot continue at byte {offset}: {self.size_bytes} bytes have arrived; "
                "ask for the blob's status and send from there"
            )
        if offset < self.size_bytes:
            os.ftruncate(self._descriptor, offset)
        while block := os.read(self._descriptor, _REHASH_BLOCK_BYTES):
            self._hash.update(block)
        self.size_bytes = self.committed_bytes = offset

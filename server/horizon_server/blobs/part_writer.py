"""Pieces of an upload on their way to disk: one is written and hashed while the next arrives, and both while earlier ones become durable.

The work is done in the loop's threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from horizon_server.blobs.part import Part
from horizon_server.blobs.threads import in_thread

SYNC_EVERY_BYTES = 32 * 2**20
"""The most that is on its way to the disk, and so the most that is lost when the power fails."""


class PartWriter:
    """Writes one part. Whatever happens, `finish` must be awaited: it keeps all that `put` was given.

    Thread: belongs to one event loop.
    """

    def __init__(self, part: Part) -> None:
        self._part = part
        self._given_bytes = part.size_bytes
        self._writing: asyncio.Future[None] | None = None
        self._syncing: asyncio.Future[None] | None = None
        self._held = b""

    @property
    def given_bytes(self) -> int:
        """Where the part ends once everything is written."""
        return self._given_bytes

    async def put(self, data: bytes) -> None:
        """Write `data` after what is being written; returns before it is written.

        Raises:
            OSError: why an earlier piece could not be written, or made durable.
        """
        self._given_bytes += len(data)
        self._held = data
        await _ended(self._writing)
        self._write_held()
        if self._part.size_bytes - self._part.committed_bytes >= SYNC_EVERY_BYTES:
            await _ended(self._syncing)
            self._syncing = _start(self._part.sync)

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
            self._writing = _start(lambda: self._part.append(data))


def _start(call: Callable[[], None]) -> asyncio.Future[None]:
    return asyncio.get_running_loop().run_in_executor(None, call)


async def _ended(work: asyncio.Future[None] | None) -> None:
    """Wait for `work`, which continues when the waiting is cancelled."""
    if work is not None:
        await asyncio.wait([work])
        work.result()

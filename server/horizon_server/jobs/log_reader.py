"""Reads a log file in bounded pieces, and keeps reading while it grows."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

PIECE_BYTES = 64 * 1024
POLL_S = 0.3


async def read_log(
    path: Path, *, offset: int, grows: Callable[[], Awaitable[bool]] | None
) -> AsyncIterator[tuple[int, bytes]]:
    """Yield (offset, bytes) from `offset` to the end; with `grows`, wait for more as long as it returns true."""
    while True:
        more = grows is not None and await grows()
        while piece := await asyncio.to_thread(_read, path, offset):
            yield offset, piece
            offset += len(piece)
        if not more:
            return
        await asyncio.sleep(POLL_S)


def _read(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            if (
                offset >= os.fstat(file.fileno()).st_size
            ):  # before the seek, which some file systems refuse far beyond the end
                return b""
            file.seek(offset)
            return file.read(PIECE_BYTES)
    except FileNotFoundError:
        return b""

"""Reads a log file in bounded pieces, and goes on reading while it grows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

PIECE_BYTES = 64 * 1024
POLL_S = 0.3


async def read_log(
    path: Path, *, offset: int, going_on: Callable[[], Awaitable[bool]] | None
) -> AsyncIterator[tuple[int, bytes]]:
    """Yield (offset, bytes) from `offset` to the end; with `going_on`, wait for more as long as it says so."""
    while True:
        more = going_on is not None and await going_on()
        while piece := await asyncio.to_thread(_read, path, offset):
            yield offset, piece
            offset += len(piece)
        if not more:
            return
        await asyncio.sleep(POLL_S)


def _read(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(PIECE_BYTES)
    except FileNotFoundError:
        return b""

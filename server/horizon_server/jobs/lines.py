"""What a worker reports, stored in its order while the lines that follow are read."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from horizon_server.events import AttemptReady, Payload, ReferencesDone

Report = tuple[Payload | AttemptReady | ReferencesDone, int]
"""What a worker says besides turns, with its number in the worker's journal."""

# More stay in the worker's journal until these are stored.
MOST_UNSTORED = 100


class LineStore:
    """Stores reports one after the other, so that the end of a turn is read while the steps before it are being stored.

    Thread: belongs to one event loop.
    """

    def __init__(self, store: Callable[[Report], Awaitable[None]], *, most: int = MOST_UNSTORED) -> None:
        self._store = store
        self._most = most
        self._lines: deque[Report] = deque()
        self._task: asyncio.Task[None] | None = None
        self.is_full = False
        """Whether no more lines are read before these are stored."""

    async def add(self, line: Report) -> None:
        """Store a line, soon or now where too many wait. Raises what an earlier one could not be stored for."""
        if self._task is not None and self._task.done():
            await self._task
        self._lines.append(line)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._store_all())
        if len(self._lines) >= self._most:
            self.is_full = True
            try:
                await self._task
            finally:
                self.is_full = False

    async def flush(self) -> None:
        """Return once all lines are stored. Raises what one of them could not be stored for."""
        if self._task is not None:
            await self._task

    async def _store_all(self) -> None:
        while self._lines:
            await self._store(self._lines[0])
            self._lines.popleft()

"""The spare worker: one process that has loaded its libraries before a job needs it, in memory that no job has."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

from horizon_server.worker_link.spare import Spare

SPARE_BYTES = 512 * 2**20
"""What a spare worker takes at most, most of it for the libraries of torch and transformers."""

PAUSE_S = 60.0
"""After one that ended by itself: a node on which it cannot live is not to start one after the other."""

log = structlog.get_logger(__name__)


class SpareWorker:
    """Keeps one spare worker while there is room for it. Thread: belongs to one event loop.

    Args:
        module: what `python -m` runs as a worker; empty where none is kept.
        folder: of all jobs.
        environment: of the first one. Later ones have the variables of the worker that was started last.
        free_bytes: host memory that jobs and other children leave, all jobs but the one of that id.
    """

    def __init__(
        self, module: str, folder: Path, *, environment: Mapping[str, str], free_bytes: Callable[[str], int]
    ) -> None:
        self._module, self._folder = module, folder
        self._environment, self._free_bytes = dict(environment), free_bytes
        self._spare: Spare | None = None
        self._is_closed, self._not_before_s = not module, 0.0
        # Held while one is started or ended.
        self._lock = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Of the process that waits, None where none does."""
        return None if self._spare is None else self._spare.pid

    async def tend(self, *, yields: bool) -> None:
        """Start one where none is there and memory is free; with `yields` it lets those that train come first."""
        async with self._lock:
            if self._spare is not None and not self._spare.is_running:
                log.warning("the spare worker has ended by itself; the next one is started after a pause")
                await self._end()
                self._not_before_s = time.monotonic() + PAUSE_S
            elif self._spare is not None and not yields and not self._spare.is_useful:
                await self._end()  # nobody trains any more, and it cannot take back what it has yielded
            is_wanted = not self._is_closed and self._spare is None and time.monotonic() >= self._not_before_s
            if not is_wanted or self._free_bytes("") < SPARE_BYTES:
                return
            try:
                self._spare = await asyncio.to_thread(
                    Spare.start, self._module, self._folder, self._environment, yields=yields
                )
            except OSError as error:
                log.warning("no spare worker could be started", why=str(error))

    async def take(self, environment: Mapping[str, str]) -> Spare | None:
        """Return the spare worker for an attempt, where there is one with these variables."""
        async with self._lock:
            self._environment = dict(environment)
            spare = self._spare
            if spare is None:
                return None
            if spare.environment != self._environment:
                await self._end()
            elif spare.is_useful:
                self._spare = None
                return spare
            return None

    async def make_room(self, job_id: str, num_bytes: int) -> None:
        """End it where a job that takes its memory now does not fit beside it."""
        async with self._lock:
            if self._spare is not None and num_bytes > self._free_bytes(job_id) - SPARE_BYTES:
                await self._end()

    async def close(self) -> None:
        """End it; from now on there is none."""
        async with self._lock:
            self._is_closed = True
            await self._end()

    async def _end(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            await asyncio.to_thread(spare.end)

"""Long work that continues when the caller who asked for it hangs up, and that a second caller joins."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

ResultT = TypeVar("ResultT")


class SharedCalls(Generic[ResultT]):
    """Runs one call per key at a time, and at most `at_once` in all.

    Thread: one event loop.
    """

    def __init__(self, *, at_once: int = 2) -> None:
        self._slots = asyncio.Semaphore(at_once)
        self._running: dict[str, asyncio.Task[ResultT]] = {}

    async def join(self, key: str, work: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Return the result of the call under `key`, starting it when there is none."""
        task = self._running.get(key)
        if task is None:
            task = asyncio.create_task(self._run(work))
            self._running[key] = task
            task.add_done_callback(lambda done: self._forget(key, done))
        return await asyncio.shield(task)

    def runs(self, key: str) -> bool:
        """Whether a call under `key` is under way."""
        return key in self._running

    async def close(self) -> None:
        """Stop everything that still runs."""
        tasks: list[asyncio.Task[Any]] = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, work: Callable[[], Awaitable[ResultT]]) -> ResultT:
        async with self._slots:
            return await work()

    def _forget(self, key: str, task: asyncio.Task[ResultT]) -> None:
        del self._running[key]
        if not task.cancelled():
            task.exception()  # seen, even where every caller has hung up

"""The queue when it is empty: what is done then, and that news end it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from horizon_server.jobs.folders import JobFolders
from horizon_server.jobs.scheduler import Scheduler
from horizon_server.records.job import JobRecord, JobState


class EmptyStore:
    """A store without jobs."""

    async def in_states(self, states: Sequence[JobState]) -> list[JobRecord]:
        return []


async def test_an_idle_chore_runs_while_the_queue_is_empty_and_ends_with_news(tmp_path: Path) -> None:
    started: asyncio.Queue[int] = asyncio.Queue()
    ended: list[int] = []
    number = iter(range(10))

    async def chore() -> None:
        mine = next(number)
        await started.put(mine)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(mine)

    store: Any = SimpleNamespace(store=EmptyStore())
    observer: Any = None
    make_attempt: Any = None
    scheduler = Scheduler(
        store,
        observer=observer,
        folders=JobFolders(tmp_path),
        make_attempt=make_attempt,
        max_attempts=1,
        orphan_grace_s=0,
        when_idle=chore,
    )
    running = asyncio.create_task(scheduler.run())
    assert await started.get() == 0
    scheduler.wake()
    assert (await started.get(), ended) == (1, [0]), "news end the chore before the queue is looked at again"
    await scheduler.drain(1.0)
    await running
    assert ended == [0, 1]

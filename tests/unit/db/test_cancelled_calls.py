"""Clients hang up in the middle of database calls, some of them twice."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sqlalchemy import text

from horizon_server.db.database import Database

SLOW = text("WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c WHERE x < 200000) SELECT count(*) FROM c")


async def test_a_call_that_is_cancelled_twice_leaves_no_task_behind(tmp_path: Path) -> None:
    """Such a task could not be cancelled, and the event loop would never end."""
    database = await Database.open(tmp_path / "horizon.db")
    before = asyncio.all_tasks()

    async def call() -> None:
        async with database.reading() as session:
            await session.connection()
            running.set()
            await session.execute(SLOW)

    for num_turns in range(1, 8):
        running = asyncio.Event()
        task = asyncio.create_task(call())
        await running.wait()
        for turns in (3, num_turns, 1):
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
    assert asyncio.all_tasks() == before
    async with database.reading() as session:
        assert (await session.execute(text("SELECT 1"))).scalar() == 1
    await database.close()

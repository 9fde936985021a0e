"""Clients hang up in the middle of database calls, some of them twice."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import select, text

from horizon_server.db.database import Database
from horizon_server.db.tables import UserRow

SLOW = text("WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c WHERE x < 2000000) SELECT count(*) FROM c")


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


async def test_a_write_that_is_cancelled_gives_its_lock_back(tmp_path: Path) -> None:
    """A closed connection keeps its lock while anything holds on to a cursor, as the traceback of a cancelled call
    does: the database was locked until Python collected that, and with it the journal of the running job."""
    database = await Database.open(tmp_path / "horizon.db")
    kept = []

    async def write(name: str) -> None:
        async with database.session() as session:
            session.add(UserRow(name=name, role="user", project="p", created_s=0))
            await session.flush()
            under_way.set()
            while True:
                (await session.execute(select(UserRow))).all()

    gc.disable()
    try:
        for round_number in range(30):
            under_way = asyncio.Event()
            task = asyncio.create_task(write(f"user-{round_number}"))
            await under_way.wait()
            for _ in range(round_number):
                await asyncio.sleep(0)  # each round ends at another point of the call
            task.cancel()
            await asyncio.wait([task])
            kept.append(task)
        async with asyncio.timeout(240):
            async with database.session() as session:
                session.add(UserRow(name="ada", role="user", project="p", created_s=0))
    finally:
        gc.enable()
    await database.close()
    with sqlite3.connect(tmp_path / "horizon.db", timeout=0) as other:
        assert other.execute("SELECT name FROM users").fetchall() == [("ada",)]


async def test_a_cancelled_call_leaves_nothing_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Callers hang up and daemons end while a connection goes back to its pool, too."""
    database = await Database.open(tmp_path / "horizon.db")

    async def write() -> None:
        async with database.session() as session:
            await session.execute(select(UserRow))

    async def read() -> None:
        async with database.reading() as session:
            await session.execute(select(UserRow))

    for call in (write, read):
        for delay_us in range(0, 6000, 25):
            task = asyncio.create_task(call())
            await asyncio.sleep(delay_us / 1e6)
            task.cancel()
            await asyncio.wait([task])
    assert [record.getMessage() for record in caplog.records] == []
    await write()
    await database.close()

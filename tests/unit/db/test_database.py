"""The database: migrations equal the tables, transactions are whole, two processes may write."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, select, text
from sqlalchemy.pool import AsyncAdaptedQueuePool

from horizon_server.db.database import NUM_READERS, Database
from horizon_server.db.tables import RequestRow, Table, UserRow
from horizon_server.errors import BadSetting, InvalidSpec, RequestIdReused


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = await Database.open(tmp_path / "horizon.db")
    yield opened
    await opened.close()


async def test_migrations_make_exactly_the_tables(database: Database, tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'horizon.db'}")
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Table.metadata) == []
    engine.dispose()


async def test_opening_twice_changes_nothing(database: Database, tmp_path: Path) -> None:
    async with database.session() as session:
        session.add(UserRow(name="ada", role="user", project="ada", created_s=0))
    again = await Database.open(tmp_path / "horizon.db")
    async with again.reading() as session:
        assert await session.scalar(select(UserRow.name)) == "ada"
    await again.close()


async def test_it_is_in_wal_mode_and_holds_foreign_keys(database: Database) -> None:
    async with database.reading() as session:
        assert await session.scalar(text("PRAGMA journal_mode")) == "wal"
        assert await session.scalar(text("PRAGMA foreign_keys")) == 1


async def test_a_block_that_raises_leaves_nothing(database: Database) -> None:
    with pytest.raises(ZeroDivisionError):
        async with database.session() as session:
            session.add(UserRow(name="ada", role="user", project="ada", created_s=0))
            await session.flush()
            raise ZeroDivisionError
    async with database.reading() as session:
        assert await session.scalar(select(UserRow.name)) is None


async def test_many_writers_do_not_pass_each_other(database: Database) -> None:
    async def add(i: int) -> None:
        async with database.session() as session:
            session.add(UserRow(name=f"u{i}", role="user", project="p", created_s=0))

    await asyncio.gather(*(add(i) for i in range(40)))
    async with database.reading() as session:
        assert len(list(await session.scalars(select(UserRow.name)))) == 40


async def test_another_process_can_write_meanwhile(database: Database, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "horizon_server", "user", "add", "bob", "--state-dir", str(tmp_path)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    async with database.reading() as session:
        assert await session.scalar(select(UserRow.name)) == "bob"


async def test_a_request_is_remembered_with_its_body(database: Database) -> None:
    request_id = str(uuid.uuid4())
    async with database.session() as session:
        first = await RequestRow.of(session, user="ada", request_id=request_id, method="M", body={"a": 1})
        assert not first.resource_id
        first.resource_id = "r1"
    async with database.session() as session:
        again = await RequestRow.of(session, user="ada", request_id=request_id, method="M", body={"a": 1})
        assert again.resource_id == "r1"
        others = await RequestRow.of(session, user="bob", request_id=request_id, method="M", body={"a": 2})
        assert not others.resource_id
    for method, body in (("M", {"a": 2}), ("N", {"a": 1})):
        with pytest.raises(RequestIdReused):
            async with database.session() as session:
                await RequestRow.of(session, user="ada", request_id=request_id, method=method, body=body)


async def test_a_request_id_that_is_no_uuid_is_refused(database: Database) -> None:
    with pytest.raises(InvalidSpec, match="must be a UUID"):
        async with database.session() as session:
            await RequestRow.of(session, user="ada", request_id="1", method="M", body={})


async def test_a_newer_database_is_refused_in_one_message(database: Database, tmp_path: Path) -> None:
    async with database.session() as session:
        await session.execute(text("UPDATE alembic_version SET version_num = '0099'"))
    with pytest.raises(BadSetting, match=r"horizon.db was made by a newer version of horizon-train.*update") as caught:
        await Database.open(tmp_path / "horizon.db")
    assert "\n" not in caught.value.message


async def test_writes_do_not_wait_for_reads(database: Database) -> None:
    """Every reader is taken, for as long as the test likes: a write lands all the same."""
    taken, over = asyncio.Semaphore(0), asyncio.Event()

    async def read() -> None:
        async with database.reading() as session:
            await session.execute(text("SELECT 1"))
            taken.release()
            await over.wait()

    readers = [asyncio.create_task(read()) for _ in range(50)]
    async with asyncio.timeout(240):
        for _ in range(NUM_READERS):
            await taken.acquire()
        async with database.session() as session:
            session.add(UserRow(name="ada", role="user", project="ada", created_s=0))
        assert not any(task.done() for task in readers)
        over.set()
        await asyncio.gather(*readers)


async def test_reads_wait_for_their_turn_however_long(database: Database) -> None:
    """At the pool they would wait too, but give up after its time."""
    pool = database._reader.sync_engine.pool
    assert isinstance(pool, AsyncAdaptedQueuePool)
    pool._timeout = 0.0
    taken, over = asyncio.Semaphore(0), asyncio.Event()

    async def read() -> int:
        async with database.reading() as session:
            taken.release()
            await over.wait()
            return int(await session.scalar(text("SELECT 1")) or 0)

    readers = [asyncio.create_task(read()) for _ in range(3 * NUM_READERS)]
    async with asyncio.timeout(240):
        for _ in range(NUM_READERS):
            await taken.acquire()
        over.set()
        assert await asyncio.gather(*readers) == [1] * len(readers)

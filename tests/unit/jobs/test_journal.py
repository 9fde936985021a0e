"""Watching: nothing is missed or doubled, whenever a watcher comes, and it ends with the job."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from horizon_server.db.database import Database
from horizon_server.db.jobs import JobStore
from horizon_server.errors import Draining
from horizon_server.events import JobEvent, Message
from horizon_server.jobs.journal import Journal, Lifecycle
from horizon_server.records.job import JobRecord, JobState
from horizon_server.spec import parse_job_spec
from horizon_server.telemetry.metrics import Metrics

SPEC = parse_job_spec({"name": "one", "model": "m", "dataset": "d"})


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[Journal]:
    database = await Database.open(tmp_path / "horizon.db")
    yield Journal(JobStore(database), Metrics(), Lifecycle())
    await database.close()


async def submitted(journal: Journal) -> JobRecord:
    record = JobRecord(
        job_id="j1", owner="ada", spec=SPEC, model_id="m", dataset_id="d", eval_dataset_id="", job_state=JobState.QUEUED
    )
    return await journal.create(record, request_id=str(uuid.uuid4()))


async def collect(journal: Journal, after: int = 0) -> list[int]:
    return [event.sequence async for event in journal.follow("j1", after)]


async def test_a_watcher_sees_everything_once_and_ends_with_the_job(journal: Journal) -> None:
    job = await submitted(journal)
    early = asyncio.create_task(collect(journal))
    late_from_2 = asyncio.create_task(collect(journal, 2))
    for i in range(20):
        await journal.append("j1", Message(level="info", text=str(i)))
        await asyncio.sleep(0)
    await journal.move(job, JobState.CANCELLED)
    assert await asyncio.wait_for(early, 240) == list(range(1, 23))
    assert await asyncio.wait_for(late_from_2, 240) == list(range(3, 23))
    assert await asyncio.wait_for(collect(journal), 240) == list(range(1, 23))
    assert await asyncio.wait_for(collect(journal, 22), 240) == []


async def test_closing_ends_watches_with_draining_after_what_is_stored(journal: Journal) -> None:
    await submitted(journal)
    seen: list[JobEvent] = []
    first = asyncio.Event()

    async def watch() -> None:
        async for event in journal.follow("j1", 0):
            seen.append(event)
            first.set()

    watching = asyncio.create_task(watch())
    await asyncio.wait_for(first.wait(), 240)
    await journal.append("j1", Message(level="info", text="last"))
    journal._lifecycle.close()
    journal.end_watches()
    with pytest.raises(Draining):
        await asyncio.wait_for(watching, 240)
    assert [event.sequence for event in seen] == [1, 2]


async def test_what_is_stored_while_a_watch_reads_is_delivered_before_draining(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    await submitted(journal)
    read = journal.store.events_after

    async def read_then_close(job_id: str, after: int, limit: int) -> list[JobEvent]:
        events = await read(job_id, after, limit)
        if not journal._lifecycle.closed:
            await journal.append(job_id, Message(level="info", text="last"))
            journal._lifecycle.close()
            journal.end_watches()
        return events

    monkeypatch.setattr(journal.store, "events_after", read_then_close)
    numbers = (event.sequence async for event in journal.follow("j1", 0))
    assert [await anext(numbers), await anext(numbers)] == [1, 2]
    with pytest.raises(Draining):
        await anext(numbers)


async def test_a_watcher_that_leaves_is_forgotten(journal: Journal) -> None:
    await submitted(journal)
    watching = asyncio.create_task(collect(journal))
    await asyncio.sleep(0.05)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert not journal._watched


async def test_watchers_get_one_event_that_is_read_for_none_of_them(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await submitted(journal)
    seen: list[list[JobEvent]] = [[] for _ in range(20)]

    async def watch(mine: list[JobEvent]) -> None:
        async for event in journal.follow("j1", 0):
            mine.append(event)
            arrived.release()

    async def all_have_another() -> None:
        async with asyncio.timeout(240):
            for _ in seen:
                await arrived.acquire()

    arrived = asyncio.Semaphore(0)
    watching = [asyncio.create_task(watch(mine)) for mine in seen]
    await all_have_another()
    num_reads = 0
    read = journal.store.events_after

    async def counted(job_id: str, after: int, limit: int) -> list[JobEvent]:
        nonlocal num_reads
        num_reads += 1
        return await read(job_id, after, limit)

    # A watcher may still be on its way to its first wait, with nothing at hand.
    await journal.append("j1", Message(level="info", text="first"))
    await all_have_another()
    monkeypatch.setattr(journal.store, "events_after", counted)
    for i in range(30):
        await journal.append("j1", Message(level="info", text=str(i)))
    await journal.move(job, JobState.CANCELLED)
    await asyncio.wait_for(asyncio.gather(*watching), 240)
    assert num_reads == 0
    assert [[event.sequence for event in mine] for mine in seen] == [list(range(1, 34))] * 20
    assert all(mine[-1] is seen[0][-1] for mine in seen)


async def test_a_watcher_that_is_far_back_misses_nothing(journal: Journal) -> None:
    job = await submitted(journal)
    numbers = (event.sequence async for event in journal.follow("j1", 0))
    first = [await anext(numbers)]
    for i in range(450):  # more than are at hand
        await journal.append("j1", Message(level="info", text=str(i)))
    assert len(journal._watched["j1"]._last) <= 200
    await journal.move(job, JobState.CANCELLED)
    assert first + [number async for number in numbers] == list(range(1, 453))


async def test_what_is_stored_without_the_journal_is_read_by_those_who_watch(journal: Journal) -> None:
    job = await submitted(journal)
    watching = asyncio.create_task(collect(journal))
    for i in range(10):
        await journal.append("j1", Message(level="info", text=str(i)))
        await journal.store.append("j1", Message(level="info", text="by another way"))
    await journal.move(job, JobState.CANCELLED)
    assert await asyncio.wait_for(watching, 240) == list(range(1, 23))

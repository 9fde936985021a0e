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
    assert await asyncio.wait_for(early, 60) == list(range(1, 23))
    assert await asyncio.wait_for(late_from_2, 60) == list(range(3, 23))
    assert await asyncio.wait_for(collect(journal), 60) == list(range(1, 23))
    assert await asyncio.wait_for(collect(journal, 22), 60) == []


async def test_closing_ends_watches_with_draining_after_what_is_stored(journal: Journal) -> None:
    await submitted(journal)
    seen: list[JobEvent] = []
    first = asyncio.Event()

    async def watch() -> None:
        async for event in journal.follow("j1", 0):
            seen.append(event)
            first.set()

    watching = asyncio.create_task(watch())
    await asyncio.wait_for(first.wait(), 60)
    await journal.append("j1", Message(level="info", text="last"))
    journal._lifecycle.close()
    journal.end_watches()
    with pytest.raises(Draining):
        await asyncio.wait_for(watching, 60)
    assert [event.sequence for event in seen] == [1, 2]


async def test_a_watcher_that_leaves_is_forgotten(journal: Journal) -> None:
    await submitted(journal)
    watching = asyncio.create_task(collect(journal))
    await asyncio.sleep(0.05)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert not journal._watchers

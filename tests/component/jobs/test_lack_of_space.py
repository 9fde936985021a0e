"""A database that cannot be written: attempts wait for it, users are told, and a drain does not wait forever."""

from __future__ import annotations

import errno
import json
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Connection, event, text
from tests.component.jobs.conftest import ADA, held
from tests.conftest import MakeDaemon
from tests.daemon_parts import DaemonParts

from horizon_server.errors import DatabaseUnavailable, DiskFull, DriveFailed
from horizon_server.events import Message, StepDone
from horizon_server.jobs import bases as bases_module
from horizon_server.jobs import journal as journal_module
from horizon_server.records.job import JobState

S = JobState


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module.Journal.__init__, "__kwdefaults__", {"retry_s": 0.05})


@asynccontextmanager
async def full_disk(daemon: DaemonParts, job_id: str) -> AsyncIterator[None]:
    """Let SQLite find the disk full: its own bound on pages gives the error of a full disk."""
    async with daemon.database.session() as session:
        pages = await session.scalar(text("PRAGMA page_count"))
        await session.execute(text(f"PRAGMA max_page_count = {pages}"))
    most = [pages]

    def bound(connection: Connection) -> None:  # which is one of several
        connection.exec_driver_sql(f"PRAGMA max_page_count = {most[0]}")

    event.listen(daemon.database._plain, "begin", bound)
    for size in (3000, 300, 1):  # what is free inside the file is used up first
        with pytest.raises(DiskFull):
            while True:
                await daemon.parts.journal.store.append(job_id, Message(level="info", text="x" * size))
    try:
        yield
    finally:
        most[0] = 2**30
        async with daemon.database._writer.connect() as connection:
            await connection.exec_driver_sql(f"PRAGMA max_page_count = {2**30}")


async def test_a_worker_learns_how_much_of_the_disk_to_leave_free(make_daemon: MakeDaemon, state_dir: Path) -> None:
    async with make_daemon(state_dir, min_free_bytes=12345) as daemon:
        job = await daemon.submit(ADA, "job")
        await daemon.until(job.job_id, S.SUCCEEDED)
    request = json.loads((state_dir / "jobs" / job.job_id / "attempt-1/request.json").read_bytes())
    assert request["min_free_bytes"] == 12345


async def test_a_full_disk_costs_a_run_time_and_no_step(daemon: DaemonParts) -> None:
    job = await held(daemon)
    async with full_disk(daemon, job.job_id):
        daemon.release("held")
        with pytest.raises(DiskFull, match="free space there"):
            await daemon.services.jobs.cancel(ADA, job.job_id)
        with pytest.raises(DiskFull):
            await daemon.submit(ADA, "other")
        assert (await daemon.services.jobs.get(ADA, job.job_id)).job_state is S.RUNNING, "reads still work"
        assert daemon.parts.scheduler.attempt(job.job_id) is not None, "the attempt waits"
    done = await daemon.until(job.job_id, S.SUCCEEDED)
    assert (done.attempt, done.step) == (1, 4)
    steps = [e.payload.step for e in await daemon.events(job.job_id) if isinstance(e.payload, StepDone)]
    assert steps == [1, 2, 3, 4]


async def test_another_process_that_writes_for_long_ends_no_attempt(daemon: DaemonParts) -> None:
    job = await held(daemon)
    async with daemon.database.session() as session:
        await session.execute(text("PRAGMA busy_timeout = 20"))
    other = sqlite3.connect(daemon.settings.database_path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    daemon.release("held")
    with pytest.raises(DatabaseUnavailable, match="locked"):
        await daemon.services.jobs.pause(ADA, job.job_id)
    other.execute("COMMIT")
    other.close()
    assert (await daemon.until(job.job_id, S.SUCCEEDED)).attempt == 1


async def test_a_drain_with_a_full_disk_ends_and_the_next_daemon_settles_the_job(daemon: DaemonParts) -> None:
    job = await held(daemon)
    async with full_disk(daemon, job.job_id):
        await daemon.drain(5.0)
        assert (await daemon.job(job.job_id)).job_state is S.RUNNING


async def test_a_job_waits_for_room_on_drives_until_another_one_has_ended(
    daemon: DaemonParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await held(daemon)
    bases = daemon.parts.scheduler.runtime.bases
    bases._on_drives.add(first.job_id)

    @contextmanager
    def lent(folders: object, sizes: object) -> Iterator[dict[str, int]]:
        if bases._on_drives:
            raise DriveFailed("/nvme0 (tier_dirs) cannot be used: it is full") from OSError(errno.ENOSPC, "full")
        yield {}

    monkeypatch.setattr(bases_module, "lent_files", lent)
    second = await daemon.submit(ADA, "second")
    waits = await daemon.until(second.job_id, S.QUEUED, attempt=1)
    assert waits.reason == "WAITS_FOR_MEMORY"
    assert waits.message == "it waits for other jobs on drives: /nvme0 (tier_dirs) cannot be used: it is full"
    daemon.release("held")
    await daemon.until(first.job_id, S.SUCCEEDED)
    assert (await daemon.until(second.job_id, S.SUCCEEDED)).reason != "DRIVE_FAILED"

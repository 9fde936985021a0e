"""What a daemon finds of the last one: jobs on the device continue where they were, and none is lost or run forever."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest
from tests.conftest import MakeDaemon
from tests.daemon_parts import DaemonParts, Script
from tests.unit.jobs.conftest import ADA, held

from horizon_server.jobs.attempt import start_time_of
from horizon_server.records.job import JobState

S = JobState


async def test_a_job_whose_daemon_died_keeps_its_place_and_continues(make_daemon: MakeDaemon, state_dir: Path) -> None:
    async with make_daemon(state_dir) as daemon:
        job = await held(daemon, checkpoint_every=1)
        waiting = await daemon.submit(ADA, "waiting")
        await daemon.crash()
        assert (await daemon.job(job.job_id)).job_state is S.RUNNING
    async with make_daemon(state_dir, queue=False) as daemon:
        await daemon.parts.scheduler.recover()
        found = await daemon.job(job.job_id)
        assert (found.job_state, found.reason, found.queue_position) == (S.QUEUED, "DAEMON_DIED", 1)
        daemon.release("held")
        daemon.start_queue()
        await daemon.until(waiting.job_id, S.SUCCEEDED)
        done = await daemon.job(job.job_id)
        assert (done.job_state, done.attempt, done.step) == (S.SUCCEEDED, 2, 4)
        exposition, _ = daemon.parts.metrics.render()
        assert b'horizon_worker_restarts_total{reason="DAEMON_DIED"} 1.0' in exposition
        assert b'horizon_jobs{state="SUCCEEDED"} 2.0' in exposition
        assert b'horizon_jobs{state="RUNNING"} 0.0' in exposition


@pytest.mark.parametrize(("wanted", "state"), [("cancel", S.CANCELLED), ("pause", S.PAUSED)])
@pytest.mark.parametrize("before_the_crash", [True, False])
async def test_what_was_asked_before_or_after_the_death_is_carried_out(
    make_daemon: MakeDaemon, state_dir: Path, wanted: str, state: JobState, before_the_crash: bool
) -> None:
    async def ask(daemon: DaemonParts) -> None:
        await getattr(daemon.services.jobs, wanted)(ADA, job.job_id)

    async with make_daemon(state_dir) as daemon:
        job = await held(daemon, deaf=True)
        if before_the_crash:
            await ask(daemon)
        await daemon.crash()
    async with make_daemon(state_dir, queue=False) as daemon:
        if not before_the_crash:
            await ask(daemon)
        assert (await daemon.job(job.job_id)).job_state is S.STOPPING
        started_s = time.time()
        daemon.start_queue()
        found = await daemon.until(job.job_id, state)
        assert (found.ended_s >= started_s) == (state is S.CANCELLED), (
            "a cancelled job has an end time, a paused one none"
        )


async def _crash_once(make_daemon: MakeDaemon, state_dir: Path, job_id: str, *, until_step: int) -> None:
    async with make_daemon(state_dir, max_attempts=3) as daemon:
        await daemon.until(job_id, S.RUNNING, step=until_step)
        await daemon.crash()


async def test_deaths_count_in_a_row_and_a_step_further_than_ever_ends_the_row(
    make_daemon: MakeDaemon, state_dir: Path
) -> None:
    """Three reboots in three weeks must not fail a healthy job."""
    async with make_daemon(state_dir, queue=False) as daemon:
        job = await daemon.submit(ADA, "long", Script(num_steps=9, checkpoint_every=1, hold_at=2))
    for step in range(2, 7):
        await _crash_once(make_daemon, state_dir, job.job_id, until_step=step - 1)
        async with make_daemon(state_dir, queue=False) as daemon:
            daemon.script("long", Script(num_steps=9, checkpoint_every=1, hold_at=step + 1))
    async with make_daemon(state_dir, max_attempts=3) as daemon:
        daemon.release("long")
        assert (await daemon.until(job.job_id, S.SUCCEEDED)).attempt == 6


async def test_a_job_that_kills_its_daemon_again_and_again_fails(make_daemon: MakeDaemon, state_dir: Path) -> None:
    """Steps that are only done again are no progress."""
    async with make_daemon(state_dir, queue=False) as daemon:
        job = await daemon.submit(ADA, "deadly", Script(num_steps=4, hold_at=3))
    for attempt in (1, 2, 3):
        async with make_daemon(state_dir, max_attempts=3) as daemon:
            await daemon.until(job.job_id, S.RUNNING, step=2, attempt=attempt)
            await daemon.crash()
    async with make_daemon(state_dir, max_attempts=3) as daemon:
        failed = await daemon.until(job.job_id, S.FAILED)
        assert (failed.reason, failed.ended_s > 0, failed.attempt) == ("DAEMON_DIED", True, 3)
        assert "died 3 times in a row" in failed.message
        await daemon.services.jobs.resume(ADA, job.job_id)
        await daemon.until(job.job_id, S.RUNNING, step=2, attempt=4)
        await daemon.crash()
    async with make_daemon(state_dir, max_attempts=3) as daemon:
        daemon.release("deadly")
        done = await daemon.until(job.job_id, S.SUCCEEDED)
        assert done.attempt == 5, "deaths before a user resumed it do not count"


async def test_a_worker_that_outlives_its_daemon_for_too_long_is_killed_before_its_job_runs_again(
    make_daemon: MakeDaemon, state_dir: Path
) -> None:
    async with make_daemon(state_dir) as daemon:
        job = await held(daemon)
        await daemon.crash()
    orphan = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(600)")
    attempt = state_dir / "jobs" / job.job_id / "attempt-1"
    (attempt / "pid").write_text(f"{orphan.pid} {start_time_of(orphan.pid)}")
    async with make_daemon(state_dir, drain_timeout_s=0.2) as daemon:
        daemon.release("held")
        done = await daemon.until(job.job_id, S.SUCCEEDED)
    assert (await orphan.wait(), done.attempt) == (-9, 2)

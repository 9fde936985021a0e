"""What a daemon finds of the last one: jobs on the device continue where they were, and none is lost or run forever."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.component.jobs.conftest import ADA, held
from tests.conftest import MakeDaemon
from tests.daemon_parts import WAIT_S, DaemonParts, Script
from tests.support.processes import processes_of

from horizon_server.events import StepDone
from horizon_server.planning.machine import Accelerator
from horizon_server.records.job import JobState
from horizon_server.worker_link.daemon_end import Worker
from horizon_server.worker_link.protocol import WorkerGreeting

S = JobState


async def until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end_s
        await asyncio.sleep(0.01)


async def test_a_job_whose_daemon_and_worker_died_keeps_its_place_and_continues(
    make_daemon: MakeDaemon, state_dir: Path
) -> None:
    async with make_daemon(state_dir) as daemon:
        job = await held(daemon, checkpoint_every=1)
        await daemon.set_node("cordoned")
        waiting = await daemon.submit(ADA, "waiting")
        await daemon.crash()
        assert (await daemon.job(job.job_id)).job_state is S.RUNNING
    async with make_daemon(state_dir, queue=False, max_restarts=2) as daemon:
        await daemon.settle()
        found = await daemon.job(job.job_id)
        assert (found.job_state, found.reason, found.queue_position) == (S.QUEUED, "RESTARTED", 1)
        assert (await daemon.job(waiting.job_id)).queue_position == 2
        daemon.release("held")
        await daemon.set_node("open")
        daemon.start_queue()
        await daemon.until(waiting.job_id, S.SUCCEEDED)
        done = await daemon.until(job.job_id, S.SUCCEEDED)
        assert (done.job_state, done.attempt, done.step) == (S.SUCCEEDED, 2, 4)
        exposition, _ = daemon.parts.metrics.render()
        assert b'horizon_worker_restarts_total{reason="DAEMON_DIED"} 1.0' in exposition
        assert b'horizon_jobs{state="SUCCEEDED"} 2.0' in exposition
        assert b'horizon_jobs{state="RUNNING"} 0.0' in exposition


async def test_a_daemon_that_died_while_it_prepared_is_no_failure_of_the_job(
    make_daemon: MakeDaemon, state_dir: Path
) -> None:
    unprepared = {"sequence_length": 200 + len(str(state_dir))}
    async with make_daemon(state_dir) as daemon:
        job = await daemon.submit(ADA, "preparing", train=unprepared)
        await daemon.until(job.job_id, S.PREPARING)
        await daemon.vanish()
    for _ in range(2):
        async with make_daemon(state_dir, queue=False) as daemon:
            await daemon.settle()
            found = await daemon.job(job.job_id)
            assert (found.job_state, found.reason) == (S.QUEUED, "DAEMON_RESTARTED")
            assert found.message == "the daemon ended before this attempt had a worker; the preparation starts again"
            assert (found.num_restarts, found.last_failure, found.not_before_s) == (0, "", 0.0)
    async with make_daemon(state_dir) as daemon:
        done = await daemon.until(job.job_id, S.SUCCEEDED)
        assert (done.attempt, done.num_restarts) == (2, 0)
        exposition, _ = daemon.parts.metrics.render()
        assert b"horizon_worker_restarts_total{" not in exposition


@pytest.mark.parametrize(("wanted", "state"), [("cancel", S.CANCELLED), ("pause", S.PAUSED)])
async def test_what_was_asked_while_it_prepared_is_carried_out(
    make_daemon: MakeDaemon, state_dir: Path, wanted: str, state: JobState
) -> None:
    async with make_daemon(state_dir) as daemon:
        job = await daemon.submit(ADA, "preparing", train={"sequence_length": 200 + len(str(state_dir))})
        await daemon.until(job.job_id, S.PREPARING)
        await daemon.vanish()
    async with make_daemon(state_dir, queue=False) as daemon:
        await getattr(daemon.services.jobs, wanted)(ADA, job.job_id)
        await daemon.settle()
        assert (await daemon.job(job.job_id)).job_state is state


async def test_a_worker_whose_daemon_died_trains_on_and_is_taken_over(make_daemon: MakeDaemon, state_dir: Path) -> None:
    async with make_daemon(state_dir) as daemon:
        job = await daemon.submit(ADA, "long", Script(num_steps=60, step_s=0.05, hold_at=4, checkpoint_every=100))
        await daemon.until(job.job_id, S.RUNNING, step=3)
        await daemon.vanish()
        assert (await daemon.job(job.job_id)).step == 3
        daemon.release("long")
        journal = state_dir / "jobs" / job.job_id / "attempt-1/journal.jsonl"
        await until(lambda: b'"step":9,' in journal.read_bytes())
    async with make_daemon(state_dir) as daemon:
        done = await daemon.until(job.job_id, S.SUCCEEDED)
        assert (done.attempt, done.step, done.num_restarts) == (1, 60, 0)
        events = [event.payload for event in await daemon.events(job.job_id)]
        assert [event.step for event in events if isinstance(event, StepDone)] == list(range(1, 61))


async def test_a_worker_that_dies_before_the_new_daemon_has_its_memory_is_followed_by_one_with_new_memory(
    make_daemon: MakeDaemon, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_daemon(state_dir) as daemon:
        job = await daemon.submit(ADA, "long", Script(num_steps=6, hold_at=4, checkpoint_every=2))
        await daemon.until(job.job_id, S.RUNNING, step=3)
        await daemon.vanish()
    connect = Worker.connect

    async def dies(worker: Worker, *, after: int, wants_planes: bool) -> tuple[WorkerGreeting, dict[str, int]]:
        if wants_planes:
            worker.num_lines = after
            worker.kill()
            await worker.wait()
            raise ConnectionResetError
        return await connect(worker, after=after, wants_planes=wants_planes)

    monkeypatch.setattr(Worker, "connect", dies)
    async with make_daemon(state_dir, max_restarts=1) as daemon:
        await daemon.until(job.job_id, S.RUNNING, attempt=2)
        daemon.release("long")
        done = await daemon.until(job.job_id, S.SUCCEEDED)
        assert (done.attempt, done.step) == (2, 6)
    request = json.loads((state_dir / "jobs" / job.job_id / "attempt-2/request.json").read_bytes())
    assert request["planes"].keys() == request["plan"]["plane_bytes"].keys() != set()


async def test_what_a_worker_reported_before_it_ended_is_not_lost(make_daemon: MakeDaemon, state_dir: Path) -> None:
    async with make_daemon(state_dir) as daemon:
        job = await daemon.submit(ADA, "short", Script(num_steps=9, hold_at=5))
        await daemon.until(job.job_id, S.RUNNING, step=4)
        await daemon.vanish()
        daemon.release("short")
        await until(lambda: not processes_of("tests.scripted_worker", state_dir))
        assert (await daemon.job(job.job_id)).step == 4
    async with make_daemon(state_dir, queue=False) as daemon:
        await daemon.settle()
        done = await daemon.job(job.job_id)
        assert (done.job_state, done.attempt, done.step) == (S.SUCCEEDED, 1, 9)
        steps = [event.payload.step for event in await daemon.events(job.job_id) if isinstance(event.payload, StepDone)]
        assert steps == list(range(1, 10))


async def test_a_worker_of_another_version_checkpoints_and_is_replaced(
    make_daemon: MakeDaemon, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_daemon(state_dir) as daemon:
        job = await daemon.submit(ADA, "old", Script(num_steps=12, hold_at=6))
        await daemon.until(job.job_id, S.RUNNING, step=5)
        await daemon.vanish()
    for module in (
        "protocol",
        "daemon_end",
    ):  # the next workers are started with the old version, and both ends compare
        monkeypatch.setattr(f"horizon_server.worker_link.{module}.PROTOCOL", 0)
    async with make_daemon(state_dir, queue=False) as daemon:
        await daemon.settle()
        found = await daemon.job(job.job_id)
        assert (found.job_state, found.reason) == (S.QUEUED, "WORKER_REPLACED")
        assert [one.step for one in await daemon.services.jobs.checkpoints(ADA, job.job_id)] == [5]


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
    async with make_daemon(state_dir, max_restarts=2) as daemon:
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
    async with make_daemon(state_dir, max_restarts=2) as daemon:
        daemon.release("long")
        assert (await daemon.until(job.job_id, S.SUCCEEDED)).attempt == 6


async def test_a_job_that_kills_its_daemon_again_and_again_fails(make_daemon: MakeDaemon, state_dir: Path) -> None:
    """Steps that are only done again are no progress."""
    async with make_daemon(state_dir, queue=False) as daemon:
        job = await daemon.submit(ADA, "deadly", Script(num_steps=4, hold_at=3))
    for attempt in (1, 2, 3):
        async with make_daemon(state_dir, max_restarts=2) as daemon:
            await daemon.until(job.job_id, S.RUNNING, step=2, attempt=attempt)
            await daemon.crash()
    async with make_daemon(state_dir, max_restarts=2) as daemon:
        failed = await daemon.until(job.job_id, S.FAILED)
        assert (failed.reason, failed.ended_s > 0, failed.attempt) == ("DAEMON_DIED", True, 3)
        assert "restarted 2 times without progress" in failed.message
        await daemon.services.jobs.resume(ADA, job.job_id)
        await daemon.until(job.job_id, S.RUNNING, step=2, attempt=4)
        await daemon.crash()
    async with make_daemon(state_dir, max_restarts=2) as daemon:
        daemon.release("deadly")
        done = await daemon.until(job.job_id, S.SUCCEEDED)
        assert done.attempt == 5, "deaths before a user resumed it do not count"


async def test_a_job_stays_on_the_kind_of_device_that_it_was_planned_on(
    make_daemon: MakeDaemon, state_dir: Path
) -> None:
    async with make_daemon(state_dir, queue=False) as daemon:
        job = await daemon.submit(ADA, "planned")
        assert (job.spec.device, job.plan and job.plan.execution.device_kind) == ("auto", "host")
        # As after a restart on which the driver was found.
        daemon.services.jobs.planner._accelerators = (Accelerator(index=0, name="H100", memory_bytes=80 << 30),)
        assert daemon.services.jobs.planner._execution(job.spec).device_kind == "cuda"
        daemon.start_queue()
        done = await daemon.until(job.job_id, S.SUCCEEDED)
        assert done.plan is not None and done.plan.execution.device_kind == "host"

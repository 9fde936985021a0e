"""The spare worker: a process that waits for the next attempt, and is that attempt's worker from then on."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.component.jobs.conftest import ADA, held
from tests.conftest import MakeDaemon
from tests.daemon_parts import WAIT_S, DaemonParts, Script

from horizon_server.jobs.spare_worker import PAUSE_S, SPARE_BYTES, SpareWorker
from horizon_server.records.job import JobRecord, JobState
from horizon_server.settings import child_environment
from horizon_server.worker_link.protocol import PID_FILE


@pytest.fixture
async def sparing(make_daemon: MakeDaemon, state_dir: Path) -> AsyncIterator[DaemonParts]:
    async with make_daemon(state_dir, spare_worker=True, look_every_s=0.05, max_restarts=3) as daemon:
        yield daemon


def spare_of(daemon: DaemonParts) -> SpareWorker:
    return daemon.parts.scheduler.runtime.spare


async def waiting_pid(daemon: DaemonParts) -> int:
    end_s = time.monotonic() + WAIT_S
    while (pid := spare_of(daemon).pid) is None:
        assert time.monotonic() < end_s
        await asyncio.sleep(0.01)
    return pid


def worker_pid(daemon: DaemonParts, job: JobRecord) -> int:
    folder = daemon.parts.services.jobs.folders.log(job.job_id, job.attempt).parent
    return int((folder / PID_FILE).read_text("ascii").split()[0])


async def test_a_job_is_served_by_the_process_that_waited_and_another_one_waits_then(sparing: DaemonParts) -> None:
    pid = await waiting_pid(sparing)
    job = await held(sparing)
    assert worker_pid(sparing, job) == pid
    assert await waiting_pid(sparing) != pid
    sparing.release("held")
    done = await sparing.until(job.job_id, JobState.SUCCEEDED)
    assert (done.step, done.attempt) == (4, 1)
    # Its output is in the attempt's log, as that of any worker.
    log = sparing.parts.services.jobs.folders.log(job.job_id, 1).read_text("utf-8")
    assert "checkpoint of step 4 written" in log


async def test_a_job_whose_spare_worker_was_killed_starts_without(sparing: DaemonParts) -> None:
    pid = await waiting_pid(sparing)
    os.kill(pid, signal.SIGKILL)
    job = await sparing.submit(ADA, "job", Script())
    done = await sparing.until(job.job_id, JobState.SUCCEEDED)
    assert done.step == 3
    assert worker_pid(sparing, done) != pid


async def test_a_worker_that_was_spare_outlives_its_daemon(make_daemon: MakeDaemon, state_dir: Path) -> None:
    async with make_daemon(state_dir, spare_worker=True, look_every_s=0.05) as daemon:
        pid = await waiting_pid(daemon)
        job = await held(daemon)
        await daemon.vanish()
    async with make_daemon(state_dir) as later:
        later.release("held")
        done = await later.until(job.job_id, JobState.SUCCEEDED)
        assert (worker_pid(later, done), done.attempt) == (pid, 1)


async def test_the_spare_worker_ends_with_the_daemon(make_daemon: MakeDaemon, state_dir: Path) -> None:
    async with make_daemon(state_dir, spare_worker=True, look_every_s=0.05) as daemon:
        pid = await waiting_pid(daemon)
    assert not Path(f"/proc/{pid}").exists()


async def test_memory_that_a_job_needs_is_not_the_spare_workers(tmp_path: Path) -> None:
    free = [SPARE_BYTES - 1]
    spare = SpareWorker(
        "tests.scripted_worker", tmp_path, environment=child_environment(), free_bytes=lambda _: free[0]
    )
    await spare.tend(yields=False)
    assert spare.pid is None
    free[0] = 2 * SPARE_BYTES
    await spare.tend(yields=False)
    assert spare.pid is not None
    await spare.make_room("job", SPARE_BYTES)
    assert spare.pid is not None
    await spare.make_room("job", SPARE_BYTES + 1)
    assert spare.pid is None
    await spare.close()


async def test_after_one_that_ended_by_itself_the_next_one_starts_later(tmp_path: Path) -> None:
    spare = SpareWorker(
        "tests.scripted_worker", tmp_path, environment=child_environment(), free_bytes=lambda _: 2 * SPARE_BYTES
    )
    await spare.tend(yields=False)
    assert spare.pid is not None
    os.kill(spare.pid, signal.SIGKILL)
    await asyncio.to_thread(os.waitid, os.P_PID, spare.pid, os.WEXITED | os.WNOWAIT)
    await spare.tend(yields=False)
    await spare.tend(yields=False)
    assert spare.pid is None
    spare._not_before_s -= PAUSE_S
    await spare.tend(yields=False)
    assert spare.pid is not None
    await spare.close()


async def test_a_worker_with_other_variables_than_the_spare_one_is_started_without_it(tmp_path: Path) -> None:
    environment = child_environment()
    spare = SpareWorker(
        "tests.scripted_worker", tmp_path, environment=environment, free_bytes=lambda _: 2 * SPARE_BYTES
    )
    await spare.tend(yields=False)
    assert await spare.take({**environment, "CUDA_VISIBLE_DEVICES": "GPU-1"}) is None
    assert spare.pid is None
    await spare.tend(yields=False)
    taken = await spare.take({**environment, "CUDA_VISIBLE_DEVICES": "GPU-1"})
    assert taken is not None
    taken.end()
    await spare.close()

"""Jobs that share a device through a daemon, turn by turn, leave the checkpoints of the same jobs alone, byte for
byte."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.conftest import MakeDaemon
from tests.daemon_parts import WAIT_S, DaemonParts
from tests.support.held_device import HeldDevice

from horizon_server.jobs.attempt import WORKER_MODULE
from horizon_server.records.account import Principal
from horizon_server.records.job import JobRecord, JobState

STEPS = {"one": 30, "other": 26}
USERS = {name: Principal(name=name, role="user", project=name) for name in STEPS}


@pytest.fixture
async def daemon(make_daemon: MakeDaemon, tmp_path: Path) -> AsyncIterator[DaemonParts]:
    # Slices that are shorter than a step: every step's end is a hand-over where another job waits.
    async with make_daemon(tmp_path / "state", worker_module=WORKER_MODULE, time_slice_s=0.01, num_threads=1) as daemon:
        for user in USERS.values():
            await daemon.services.accounts.add_user(user.name)
            await daemon.dataset(user)
        yield daemon


async def submit(daemon: DaemonParts, name: str) -> JobRecord:
    train = {"max_steps": STEPS[name], "compile": "off", "seed": len(name), "warmup_steps": 2}
    return await daemon.submit(USERS[name], name, train=train)


async def checkpoint(daemon: DaemonParts, job: JobRecord) -> dict[str, bytes]:
    """Every file of a job's last checkpoint: weights, moments, and the state of the trainer."""
    await daemon.until(job.job_id, JobState.SUCCEEDED)
    folder = daemon.state_dir / "jobs" / job.job_id / "checkpoints" / f"step-{STEPS[job.spec.name]:08d}"
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert any(name.startswith("trainer/exp_avg_sq") for name in files), sorted(files)
    return files


def num_handovers(daemon: DaemonParts) -> int:
    samples = (sample for family in daemon.parts.metrics.registry.collect() for sample in family.samples)
    return int(sum(one.value for one in samples if one.name == "horizon_device_handover_seconds_count"))


async def until_handovers(daemon: DaemonParts, number: int) -> None:
    end_s = time.monotonic() + WAIT_S
    while num_handovers(daemon) < number:
        assert time.monotonic() < end_s, "the jobs do not take turns"
        await asyncio.sleep(0.01)


async def test_interleaved_jobs_have_the_bytes_of_each_alone(daemon: DaemonParts) -> None:
    alone = {name: await checkpoint(daemon, await submit(daemon, name)) for name in STEPS}
    assert num_handovers(daemon) == 0
    # Both are loaded before either begins, so that they take turns from the first step on.
    device = daemon.parts.scheduler.turns["host"]
    async with HeldDevice(device) as held:
        jobs = {name: await submit(daemon, name) for name in STEPS}
        await held.until_wanted_by(len(jobs))
    # About two for each step while both are there. How they are spread over the steps depends on how long each of them
    # took.
    await until_handovers(daemon, 6)
    await daemon.until(jobs["one"].job_id, step=2)
    # One of them is taken out of memory and loaded again, while the other one waits between two of its steps.
    async with HeldDevice(device) as held:
        before = num_handovers(daemon)
        await daemon.services.jobs.pause(USERS["one"], jobs["one"].job_id)
        paused = await daemon.until(jobs["one"].job_id, JobState.PAUSED)
        assert 2 <= paused.step < STEPS["one"]
        await daemon.services.jobs.resume(USERS["one"], jobs["one"].job_id)
        await held.until_wanted_by(len(jobs))
    interleaved = {name: await checkpoint(daemon, job) for name, job in jobs.items()}
    assert num_handovers(daemon) - before >= 6
    for name, files in alone.items():
        assert interleaved[name].keys() == files.keys()
        assert [path for path in files if interleaved[name][path] != files[path]] == [], name

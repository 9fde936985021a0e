"""Jobs that share a device through a daemon, turn by turn, leave the checkpoints of the same jobs alone, byte for
byte."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest
from tests.conftest import MakeDaemon
from tests.daemon_parts import DaemonParts
from tests.support.held_device import HeldDevice
from tests.support.resting import Resting

from horizon_server.records.account import Principal
from horizon_server.records.job import JobRecord, JobState

STEPS = {"one": 30, "other": 26}
USERS = {name: Principal(name=name, role="user", project=name) for name in STEPS}


@pytest.fixture
async def daemon(make_daemon: MakeDaemon, tmp_path: Path) -> AsyncIterator[DaemonParts]:
    # Slices that are shorter than a step: every step's end is a hand-over where another job waits.
    async with make_daemon(
        tmp_path / "state", worker_module="tests.support.resting", time_slice_s=0.01, num_threads=1
    ) as daemon:
        for user in USERS.values():
            await daemon.services.accounts.add_user(user.name)
            await daemon.dataset(user)
        yield daemon


async def submit(daemon: DaemonParts, name: str) -> JobRecord:
    train = {"max_steps": STEPS[name], "compile": "off", "seed": len(name), "warmup_steps": 2}
    return await daemon.submit(USERS[name], name, train=train)


async def checkpoint(daemon: DaemonParts, job: JobRecord) -> dict[str, bytes]:
    """Every file of a job's last checkpoint but those that name the job, and the list of all files' hashes: weights,
    moments, and the state of the trainer."""
    await daemon.until(job.job_id, JobState.SUCCEEDED)
    folder = daemon.state_dir / "jobs" / job.job_id / "checkpoints" / f"step-{STEPS[job.spec.name]:08d}"
    files = {
        str(path.relative_to(folder)): content
        for path in folder.rglob("*")
        if path.is_file() and path.name != "manifest.json" and job.job_id.encode() not in (content := path.read_bytes())
    }
    assert any(name.startswith("trainer/exp_avg_sq") for name in files), sorted(files)
    return files


def num_handovers(daemon: DaemonParts) -> int:
    samples = (sample for family in daemon.parts.metrics.registry.collect() for sample in family.samples)
    return int(sum(one.value for one in samples if one.name == "horizon_device_handover_seconds_count"))


async def handed_over(daemon: DaemonParts, jobs: Iterable[JobRecord], number: int, step: int) -> int:
    """Let all jobs do step after step, from `step` on, until the device was handed over so often; return where they
    rest.

    None of them is ahead by more than a step, so that each step takes a hand-over: a job that nobody interrupts, as its
    daemon waits for a processor, would do all of its steps.
    """
    while True:
        Resting(daemon.state_dir).after(step)
        for job in jobs:
            await daemon.until(job.job_id, step=step)
        if num_handovers(daemon) >= number:
            return step
        step += 1
        assert step < min(STEPS.values()), "the jobs do not take turns"


async def test_interleaved_jobs_have_the_bytes_of_each_alone(daemon: DaemonParts) -> None:
    alone = {name: await checkpoint(daemon, await submit(daemon, name)) for name in STEPS}
    assert num_handovers(daemon) == 0
    # Both are loaded before either begins, so that they take turns from the first step on.
    device, resting = daemon.parts.scheduler.turns["host"], Resting(daemon.state_dir)
    resting.after(1)
    async with HeldDevice(device) as held:
        jobs = {name: await submit(daemon, name) for name in STEPS}
        await held.until_wanted_by(len(jobs))
    step = await handed_over(daemon, jobs.values(), 6, 2)
    # One of them is taken out of memory and loaded again, while the other one waits between two of its steps.
    async with HeldDevice(device) as held:
        before = num_handovers(daemon)
        await daemon.services.jobs.pause(USERS["one"], jobs["one"].job_id)
        paused = await daemon.until(jobs["one"].job_id, JobState.PAUSED)
        assert paused.step == step
        await daemon.services.jobs.resume(USERS["one"], jobs["one"].job_id)
        resting.after(step + 1)
        await held.until_wanted_by(len(jobs))
    await handed_over(daemon, jobs.values(), before + 6, step + 1)
    resting.go_on()
    interleaved = {name: await checkpoint(daemon, job) for name, job in jobs.items()}
    for name, files in alone.items():
        assert interleaved[name].keys() == files.keys()
        assert [path for path in files if interleaved[name][path] != files[path]] == [], name

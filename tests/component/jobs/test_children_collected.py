"""A daemon collects every process that it has started, however that ended."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
from tests.component.jobs.conftest import ADA, held
from tests.conftest import MakeDaemon
from tests.daemon_parts import WAIT_S, Script
from tests.support.processes import zombies_of

from horizon_server.jobs import attempt, recovery
from horizon_server.records.job import JobState

S = JobState


async def until_collected(before: set[int]) -> None:
    end_s = time.monotonic() + WAIT_S
    # asyncio collects its children in a thread each.
    while left := zombies_of(os.getpid()) - before:
        assert time.monotonic() < end_s, left
        await asyncio.sleep(0.05)


async def test_workers_that_ended_died_were_killed_or_replaced_are_collected(
    make_daemon: MakeDaemon, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "PAUSES_S", (0.1,))
    monkeypatch.setattr(attempt, "CANCEL_GRACE_S", 0.2)
    before = zombies_of(os.getpid())
    # On a busy machine a worker may be silent for as long while it starts, and is started again.
    async with make_daemon(state_dir, max_restarts=10, silence_limit_s=6.0) as daemon:
        scripts = {
            "ends": Script(),
            "fails": Script(fail_at=2),
            "exits": Script(exit_at=2),
            "killed": Script(die_at=2, checkpoint_every=1),
            "hangs": Script(hang_at=2),
        }
        jobs = {name: await daemon.submit(ADA, name, script) for name, script in scripts.items()}
        ends = {name: (await daemon.until(job.job_id, S.SUCCEEDED, S.FAILED)).job_state for name, job in jobs.items()}
        assert ends == dict.fromkeys(scripts, S.SUCCEEDED) | {"fails": S.FAILED}
        deaf = await held(daemon, deaf=True)
        await daemon.services.jobs.cancel(ADA, deaf.job_id)
        await daemon.until(deaf.job_id, S.CANCELLED)
        await until_collected(before)


async def test_workers_of_an_earlier_daemon_leave_nothing_in_the_process_of_the_tests(
    make_daemon: MakeDaemon, state_dir: Path
) -> None:
    before = zombies_of(os.getpid())
    async with make_daemon(state_dir) as daemon:
        job = await held(daemon)
        await daemon.vanish()
    async with make_daemon(state_dir) as daemon:
        daemon.release("held")
        await daemon.until(job.job_id, S.SUCCEEDED)
        await held(daemon, name="again")
        await daemon.crash()
    await until_collected(before)

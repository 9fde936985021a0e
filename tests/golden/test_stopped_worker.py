"""A worker that is stopped by a signal makes no progress: another one takes its place, and the job's losses are the
same."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.conftest import MakeDaemon
from tests.daemon_parts import DaemonParts
from tests.support.processes import processes_of
from tests.support.resting import Resting

from horizon_server.events import StepDone
from horizon_server.jobs import recovery, turns
from horizon_server.records.job import JobRecord, JobState

# The real worker, which rests where the test wants to stop it: it would be over before, on a busy machine.
WORKER = "tests.support.resting"
TRAIN = {"max_steps": 40, "compile": "off"}


async def losses(daemon: DaemonParts, job: JobRecord) -> set[tuple[int, float]]:
    steps = [event.payload for event in await daemon.events(job.job_id) if isinstance(event.payload, StepDone)]
    # Where it is stopped in the middle of an update, steps are done again, with the same losses.
    return {(step.step, step.loss) for step in steps}


async def test_a_stopped_worker_is_replaced_and_the_losses_are_the_same(
    make_daemon: MakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "PAUSES_S", (0.1,))
    # The first step of a process is the longest by far, and a busy machine makes it longer.
    monkeypatch.setattr(turns, "SILENT_STEPS", 2.0)
    settings = {"worker_module": WORKER, "max_restarts": 1, "silence_limit_s": 5.0, "num_threads": 1}
    async with make_daemon(tmp_path / "state", **settings) as daemon:
        ada = await daemon.user("ada")
        await daemon.dataset(ada)
        whole = await daemon.submit(ada, "whole", train=TRAIN)
        await daemon.until(whole.job_id, JobState.SUCCEEDED)
        Resting(daemon.state_dir).after(3)
        job = await daemon.submit(ada, "stopped", train=TRAIN)
        await daemon.until(job.job_id, JobState.RUNNING, step=3)
        [pid] = processes_of(f"{WORKER}\0", tmp_path)
        os.kill(pid, signal.SIGSTOP)
        Resting(daemon.state_dir).go_on()
        done = await daemon.until(job.job_id, JobState.SUCCEEDED)
        assert (done.attempt, done.step) == (2, 40)
        assert done.last_failure.startswith("WORKER_SILENT@")
        assert await losses(daemon, job) == await losses(daemon, whole)

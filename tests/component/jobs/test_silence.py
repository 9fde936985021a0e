"""A worker that lives and makes no progress is killed and its job continues; one that is slow, or waits, is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.component.jobs.conftest import ADA
from tests.conftest import MakeDaemon
from tests.daemon_parts import DaemonParts, Script

from horizon_server.events import Message, StateChanged, StepDone
from horizon_server.jobs import recovery
from horizon_server.jobs.turns import FIRST_STEP_S, SILENT_STEPS, Participant
from horizon_server.records.job import JobRecord, JobState
from horizon_server.scheduling.state import Job

S = JobState
# Longer than a worker of a busy machine may have to wait for the processor. A scripted step reports 0.1 s, of which 20
# are less.
LIMIT_S = 6.0
JOB = Job(
    job_id="job_1",
    user="ada",
    project="ada",
    priority=0,
    order=0,
    since_s=0.0,
    device="host",
    host_bytes=1,
    device_bytes=1,
)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "PAUSES_S", (0.1,))


async def require_killed_for_silence(daemon: DaemonParts, job: JobRecord) -> list[StepDone]:
    """Return the steps that were reported."""
    payloads = [event.payload for event in await daemon.events(job.job_id)]
    warnings = [one.text for one in payloads if isinstance(one, Message) and one.level == "warning"]
    assert any(text.startswith("the worker made no progress for ") for text in warnings), warnings
    [restart] = [one for one in payloads if isinstance(one, StateChanged) and one.reason == "RESTARTED"]
    assert "s, and was killed (after step " in restart.message and "; it is restarted in 0.1 s" in restart.message
    exposition, _ = daemon.parts.metrics.render()
    assert b'horizon_worker_restarts_total{reason="WORKER_SILENT"} 1.0' in exposition
    return [one for one in payloads if isinstance(one, StepDone)]


@pytest.mark.parametrize("is_adopted", [False, True])
async def test_a_worker_that_hangs_is_killed_and_its_job_continues(
    make_daemon: MakeDaemon, state_dir: Path, is_adopted: bool
) -> None:
    script = Script(num_steps=6, checkpoint_every=1, hold_at=2, hang_at=3)
    if is_adopted:
        async with make_daemon(state_dir) as daemon:
            job = await daemon.submit(ADA, "hangs", script)
            await daemon.until(job.job_id, S.RUNNING, step=1)
            await daemon.vanish()
    async with make_daemon(state_dir, max_restarts=1, silence_limit_s=LIMIT_S) as daemon:
        if not is_adopted:
            job = await daemon.submit(ADA, "hangs", script)
        daemon.release("hangs")
        done = await daemon.until(job.job_id, S.SUCCEEDED)
        assert (done.attempt, done.step) == (2, 6)
        steps = await require_killed_for_silence(daemon, job)
        assert [step.step for step in steps] == list(range(1, 7))


async def test_one_that_is_slow_or_waits_for_its_turn_is_never_killed(make_daemon: MakeDaemon, state_dir: Path) -> None:
    async with make_daemon(state_dir, silence_limit_s=LIMIT_S, time_slice_s=60.0) as daemon:
        slow = await daemon.submit(ADA, "slow", Script(num_steps=3, slow_at=2, slow_s=1.5 * LIMIT_S))
        await daemon.until(slow.job_id, S.RUNNING, step=1)
        waits = await daemon.submit(ADA, "waits", Script(num_steps=3))
        for job in (slow, waits):
            done = await daemon.until(job.job_id, S.SUCCEEDED)
            assert (done.attempt, done.num_restarts) == (1, 0)


def test_nothing_is_expected_of_a_worker_that_waits_and_without_a_limit_of_none() -> None:
    participant = Participant(
        job=JOB, send=lambda _: None, charge=lambda _: None, is_storing=lambda: False, on_overrun=lambda *_: None
    )
    assert participant.silence_limit_s(1.0) == FIRST_STEP_S, "the first step may load, compile and try for minutes"
    participant.step_s = 100.0
    assert participant.silence_limit_s(1.0) == 1000.0
    participant.longest_step_s = 3.0
    assert (participant.silence_limit_s(1.0), participant.silence_limit_s(90.0)) == (SILENT_STEPS * 3.0, 90.0)
    assert participant.silence_limit_s(0.0) is None
    participant.waits = True
    assert participant.silence_limit_s(1.0) is None

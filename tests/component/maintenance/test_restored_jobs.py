"""What becomes of the jobs that ran when a backup was made, once it is restored."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from pathlib import Path

import pytest
from tests.conftest import MakeDaemon
from tests.daemon_parts import Script

from horizon_server.maintenance.backup import make_backup
from horizon_server.maintenance.check import check_state_dir
from horizon_server.maintenance.restore import restore
from horizon_server.records.job import JobState, StopRequest


@pytest.fixture
def make_daemon(make_daemon: MakeDaemon) -> MakeDaemon:
    return partial(make_daemon, prepared=None, queue=False)


async def test_a_job_that_ran_when_the_backup_was_made_continues(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    async with make_daemon(tmp_path / "state", queue=True) as daemon:
        ada = await daemon.user("ada")
        await daemon.dataset(ada, "chats")
        script = Script(num_steps=4, checkpoint_every=2, hold_at=4)
        job = await daemon.submit(ada, "long", script)
        await daemon.until(job.job_id, JobState.RUNNING, step=3)
        backup = await asyncio.to_thread(make_backup, daemon.state_dir, tmp_path / "backup")
        assert backup.problems == ()
        daemon.release("long")
        await daemon.until(job.job_id, JobState.SUCCEEDED)
    restore(tmp_path / "backup", tmp_path / "restored")
    async with make_daemon(tmp_path / "restored", queue=False, max_restarts=0) as again:
        restored = await again.job(job.job_id)
        assert (restored.job_state, restored.reason, restored.attempt) == (JobState.QUEUED, "RESTORED", 1)
        assert re.fullmatch(
            r"the node was restored from a backup of [-\d]{10} [:\d]{8} UTC; it continues from its newest checkpoint",
            restored.message,
        )
        again.script("long", Script(num_steps=4, checkpoint_every=2))
        again.start_queue()
        ended = await again.until(job.job_id, JobState.SUCCEEDED)
        # A restart that counts would be refused with this setting
        assert (ended.step, ended.attempt, ended.num_restarts) == (4, 2, 0)
        events = await again.events(job.job_id)
        assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert check_state_dir(tmp_path / "restored", full=True).is_good


async def test_a_restore_carries_out_what_a_user_had_ordered(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    async with make_daemon(tmp_path / "state") as daemon:
        ada = await daemon.user("ada")
        await daemon.dataset(ada, "chats")
        jobs = {
            wanted: await daemon.job_in(JobState.STOPPING, ada, name=f"job-{wanted.name.lower()}")
            for wanted in (StopRequest.CANCEL, StopRequest.PAUSE, StopRequest.NOTHING)
        }
        for wanted, job in jobs.items():
            await daemon.parts.journal.store.set(job.job_id, wanted=wanted)
        make_backup(daemon.state_dir, tmp_path / "backup")
    result = restore(tmp_path / "backup", tmp_path / "restored")
    assert result.num_requeued == 3
    async with make_daemon(tmp_path / "restored") as again:
        found = {wanted: (await again.job(job.job_id)) for wanted, job in jobs.items()}
        assert [found[wanted].job_state for wanted in jobs] == [JobState.CANCELLED, JobState.PAUSED, JobState.QUEUED]
        assert all(job.wanted is StopRequest.NOTHING for job in found.values())
        assert found[StopRequest.CANCEL].ended_s > 0
    assert check_state_dir(tmp_path / "restored", full=True).is_good


async def test_a_job_whose_worker_left_its_reports_is_not_set_back(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    """Where only the database is put back, the daemon reads what the worker has done since the backup."""
    state = tmp_path / "state"
    async with make_daemon(state) as daemon:
        ada = await daemon.user("ada")
        await daemon.dataset(ada, "chats")
        job = await daemon.job_in(JobState.RUNNING, ada)
        make_backup(state, tmp_path / "backup")
    daemon.write_log(job, b"")
    (state / "jobs" / job.job_id / "attempt-1" / "journal.jsonl").write_bytes(b"")
    assert restore(tmp_path / "backup", state, replace=True).num_requeued == 0
    async with make_daemon(state) as again:
        assert (await again.job(job.job_id)).job_state is JobState.RUNNING

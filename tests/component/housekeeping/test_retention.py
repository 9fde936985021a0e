"""Checkpoints of ended jobs go when their days are over or beyond what a user may keep: announced first, and taken back
by their owner."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest
from tests.component.housekeeping.conftest import ended_job
from tests.daemon_parts import DaemonParts

from horizon_server.errors import InUse, NotAllowed, NotFound, QuotaExceeded, WrongJobState
from horizon_server.events import Message
from horizon_server.records.account import Principal
from horizon_server.records.job import CHECKPOINTS_BEING_DELETED, JobRecord, JobState
from horizon_server.services.housekeeping.retention import due_deletions
from horizon_server.store.manifest import is_complete, read_manifest

S = JobState
DAY = 86400.0


async def messages(daemon: DaemonParts, job: JobRecord) -> list[str]:
    return [event.payload.text for event in await daemon.events(job.job_id) if isinstance(event.payload, Message)]


async def due_now(daemon: DaemonParts, job: JobRecord) -> None:
    await daemon.parts.journal.store.set(job.job_id, deletion_s=time.time() - 1)


def steps(daemon: DaemonParts, job: JobRecord) -> list[int]:
    return daemon.parts.scheduler.runtime.folders.checkpoints(job.job_id).steps()


async def test_after_its_days_a_jobs_checkpoints_are_announced_and_then_deleted(
    daemon: DaemonParts, ada: Principal
) -> None:
    job = await ended_job(daemon, ada, checkpoint={"keep_days": 30})
    await daemon.parts.sweep.run()
    announced = await daemon.job(job.job_id)
    assert announced.deletion_s == pytest.approx(job.ended_s + 30 * DAY)
    [warning] = await messages(daemon, job)
    assert "its checkpoints (0.0 MiB) will be deleted on" in warning
    assert f"horizon job keep {job.job_id}" in warning
    await daemon.parts.sweep.run()
    assert await messages(daemon, job) == [warning], "once"
    await due_now(daemon, job)
    found, _ = await daemon.parts.sweep.run(dry_run=True)
    assert [(one.kind, one.size_bytes) for one in found] == [("checkpoints", 300)]
    assert steps(daemon, job) == [5]
    await daemon.parts.sweep.run()
    assert steps(daemon, job) == []
    assert "its 1 checkpoints (0.0 MiB) were deleted as announced" in (await messages(daemon, job))[-1]
    left = await daemon.job(job.job_id)
    assert (left.deletion_s, left.job_state) == (None, S.SUCCEEDED), "the job itself stays"


async def test_nothing_goes_without_the_notice_where_the_daemon_was_stopped_meanwhile(
    daemon: DaemonParts, ada: Principal
) -> None:
    job = await ended_job(daemon, ada, ended_s=time.time() - 100 * DAY, checkpoint={"keep_days": 30})
    await daemon.parts.sweep.run()
    announced = await daemon.job(job.job_id)
    assert announced.deletion_s == pytest.approx(time.time() + 7 * DAY, abs=60)
    assert steps(daemon, job) == [5]


async def test_without_keep_days_and_limit_everything_stays(daemon: DaemonParts, ada: Principal) -> None:
    job = await ended_job(daemon, ada, ended_s=time.time() - 1000 * DAY)
    found, _ = await daemon.parts.sweep.run()
    assert found == []
    assert (await daemon.job(job.job_id)).deletion_s is None


async def test_beyond_what_a_user_may_keep_the_oldest_go_first(daemon: DaemonParts, ada: Principal) -> None:
    old, middle, new = [
        await ended_job(daemon, ada, name, ended_s=time.time() - age * DAY)
        for name, age in (("old", 30), ("middle", 20), ("new", 10))
    ]
    await daemon.allow("user", "ada", retained_bytes=700)
    await daemon.parts.sweep.run()
    marked = [(await daemon.job(job.job_id)).deletion_s for job in (old, middle, new)]
    assert marked[0] == pytest.approx(time.time() + 7 * DAY, abs=60)
    assert marked[1:] == [None, None]
    assert "that ada may keep of ended jobs" in (await messages(daemon, old))[-1]

    kept = await daemon.services.retention.keep(ada, old.job_id)
    assert (kept.deletion_s, kept.keep_files) == (None, True)
    await daemon.parts.sweep.run()
    assert (await daemon.job(old.job_id)).deletion_s is None
    assert (await daemon.job(middle.job_id)).deletion_s is not None, "another goes in its place"

    await daemon.services.retention.keep(ada, new.job_id)
    with pytest.raises(QuotaExceeded, match="the jobs that ada keeps take"):
        await daemon.services.retention.keep(ada, middle.job_id)

    await daemon.allow("user", "ada", retained_bytes=1000)
    await daemon.parts.sweep.run()
    assert (await daemon.job(middle.job_id)).deletion_s is None
    assert "the deletion of its checkpoints is cancelled" in (await messages(daemon, middle))[-1]
    quotas = dict(zip(("user", "project"), await daemon.services.sharing.quota(ada), strict=True))
    assert quotas["user"][1].retained_bytes == 900


async def test_only_what_an_ended_job_of_ones_own_has_written_can_be_kept(daemon: DaemonParts, ada: Principal) -> None:
    running = await daemon.job_in(S.RUNNING, ada)
    with pytest.raises(WrongJobState, match="only what an ended job"):
        await daemon.services.retention.keep(ada, running.job_id)
    done = await ended_job(daemon, ada, "done")
    eve = await daemon.user("eve", role="viewer")
    with pytest.raises(NotAllowed):
        await daemon.services.retention.keep(eve, done.job_id)


async def test_a_checkpoint_that_is_kept_outlives_the_others_of_its_job(daemon: DaemonParts, ada: Principal) -> None:
    job = await ended_job(daemon, ada, steps=(5, 10), checkpoint={"keep_days": 1})
    kept = await daemon.services.retention.keep_checkpoint(ada, job.job_id, 5, kept=True)
    assert (kept.step, kept.kept) == (5, True)
    assert "the checkpoint of step 5 is kept, by ada" in (await messages(daemon, job))[-1]
    await daemon.parts.sweep.run()
    await due_now(daemon, job)
    found, _ = await daemon.parts.sweep.run(dry_run=True)
    assert [one.size_bytes for one in found] == [300]
    await daemon.parts.sweep.run()
    assert steps(daemon, job) == [5]
    await daemon.parts.sweep.run()
    assert (await daemon.job(job.job_id)).deletion_s is None, "there is nothing more to delete"
    await daemon.services.retention.keep_checkpoint(ada, job.job_id, 5, kept=False)
    await daemon.parts.sweep.run()
    assert (await daemon.job(job.job_id)).deletion_s is not None


async def test_checkpoints_that_are_kept_count_as_what_a_user_keeps(daemon: DaemonParts, ada: Principal) -> None:
    job = await ended_job(daemon, ada, steps=(5, 10))
    other = await ended_job(daemon, ada, "other")
    await daemon.allow("user", "ada", retained_bytes=500)
    keep = daemon.services.retention.keep_checkpoint
    await keep(ada, job.job_id, 5, kept=True)
    with pytest.raises(QuotaExceeded, match="with the checkpoint of step 10, the jobs that ada keeps take"):
        await keep(ada, job.job_id, 10, kept=True)
    with pytest.raises(QuotaExceeded, match="the jobs that ada keeps take"):
        await daemon.services.retention.keep(ada, other.job_id)
    with pytest.raises(NotFound, match="no checkpoint of step 7"):
        await keep(ada, job.job_id, 7, kept=True)
    bob = await daemon.user("bob")
    with pytest.raises(NotFound):
        await keep(bob, job.job_id, 5, kept=False)


async def test_a_job_that_runs_again_loses_nothing(daemon: DaemonParts, ada: Principal) -> None:
    """Nor at its next end without another warning."""
    job = await ended_job(daemon, ada, state=S.FAILED, checkpoint={"keep_days": 1})
    await daemon.parts.sweep.run()
    await due_now(daemon, job)
    resumed = await daemon.services.jobs.resume(ada, job.job_id)
    assert resumed.deletion_s is None
    await daemon.parts.sweep.run()
    assert steps(daemon, job) == [5]


async def test_a_download_delays_a_deletion(daemon: DaemonParts, ada: Principal) -> None:
    job = await ended_job(daemon, ada, checkpoint={"keep_days": 1})
    await daemon.parts.sweep.run()
    await due_now(daemon, job)
    async with daemon.services.jobs.checkpoint_file(ada, job.job_id, 5, "model.safetensors"):
        await daemon.parts.sweep.run()
        assert steps(daemon, job) == [5]
    assert (await daemon.job(job.job_id)).deletion_s is None


async def test_a_deletion_of_checkpoints_that_was_cut_short_is_finished(daemon: DaemonParts, ada: Principal) -> None:
    job = await ended_job(daemon, ada, steps=(5, 10), checkpoint={"keep_days": 1})
    await daemon.parts.journal.store.begin_deletion(job.job_id, CHECKPOINTS_BEING_DELETED)
    daemon.parts.scheduler.runtime.folders.checkpoints(job.job_id).delete(5)
    await daemon.parts.sweep.run()
    assert steps(daemon, job) == []
    assert (await daemon.job(job.job_id)).deletion_s is None


async def test_of_a_succeeded_job_the_newest_and_the_best_keep_their_trainer_state(
    daemon: DaemonParts, ada: Principal
) -> None:
    job = await ended_job(daemon, ada, steps=())
    files = {"model.safetensors": b"w" * 100, "trainer/exp_avg.safetensors": b"m" * 200}
    folders = {
        step: daemon.write_checkpoint(job, step, files, eval_loss=loss)
        for step, loss in ((1, 2.0), (2, 1.0), (3, 1.5), (4, 3.0))
    }
    before = {record.step: record for record in await daemon.services.jobs.checkpoints(ada, job.job_id)}
    found, _ = await daemon.parts.sweep.run(dry_run=True)
    assert [(one.kind, one.size_bytes, one.place.rpartition("step-")[2]) for one in found] == [
        ("optimizer states", 200, "00000001/trainer"),
        ("optimizer states", 200, "00000003/trainer"),
    ]
    await daemon.parts.sweep.run()
    after = {record.step: record for record in await daemon.services.jobs.checkpoints(ada, job.job_id)}
    assert {step: record.size_bytes for step, record in after.items()} == {1: 100, 2: 300, 3: 100, 4: 300}
    assert after[1].created_s == pytest.approx(before[1].created_s, abs=1e-3)
    assert (after[2].best, after[4].last, after[1].eval_loss) == (True, True, 2.0)
    for folder in folders.values():
        assert is_complete(folder)
        assert json.loads((folder / "trainer/trainer_state.json").read_bytes())
    assert list(read_manifest(folders[1]).files) == ["model.safetensors"]
    assert daemon.parts.scheduler.runtime.folders.checkpoint_bytes() == {job.job_id: 800}
    assert (await daemon.parts.sweep.run())[0] == []


@pytest.mark.parametrize(("state", "keep"), [(S.FAILED, "last"), (S.CANCELLED, "last"), (S.SUCCEEDED, "all")])
async def test_other_jobs_keep_all_trainer_states(
    daemon: DaemonParts, ada: Principal, state: JobState, keep: str
) -> None:
    job = await ended_job(daemon, ada, state=state, steps=(1, 2), checkpoint={"keep_optimizer": keep})
    assert (await daemon.parts.sweep.run())[0] == []
    assert daemon.parts.scheduler.runtime.folders.checkpoint_bytes() == {job.job_id: 600}


async def test_trainer_state_that_is_downloaded_stays_until_the_next_sweep(daemon: DaemonParts, ada: Principal) -> None:
    job = await ended_job(daemon, ada, steps=(1, 2))
    checkpoints = daemon.parts.scheduler.runtime.folders.checkpoints(job.job_id)
    with checkpoints.reading(1):
        await daemon.parts.sweep.run()
        with pytest.raises(InUse):
            checkpoints.remove_optimizer(1)
    await daemon.parts.sweep.run()
    assert checkpoints.useless_optimizer_files() == {}


async def test_what_is_due_is_decided_from_days_limits_and_order(daemon: DaemonParts, ada: Principal) -> None:
    base = await ended_job(daemon, ada)
    now = 1_000_000_000.0

    def job(name: str, ended_days: float, **fields: object) -> JobRecord:
        return dataclasses.replace(base, job_id=name, ended_s=now - ended_days * DAY, **fields)  # type: ignore[arg-type]

    jobs = [job("a", 3), job("b", 2, keep_files=True), job("c", 1), job("d", 0.5, owner="bob")]
    sizes = {"a": 10, "b": 100, "c": 10, "d": 1000}
    due = due_deletions(jobs, sizes, {"ada": 110}, kept_bytes={}, now_s=now, notice_s=7 * DAY)
    assert {name: one.at_s for name, one in due.items()} == {"a": now + 7 * DAY}
    due = due_deletions(jobs, sizes, {"ada": 5}, kept_bytes={}, now_s=now, notice_s=7 * DAY)
    assert set(due) == {"a", "c"}, "what is kept stays, even where it alone is too much"
    marked = [dataclasses.replace(jobs[0], deletion_s=now + DAY), *jobs[1:]]
    assert due_deletions(marked, sizes, {"ada": 110}, kept_bytes={}, now_s=now, notice_s=7 * DAY)["a"].at_s == now + DAY
    assert due_deletions(jobs, sizes, {}, kept_bytes={}, now_s=now, notice_s=7 * DAY) == {}

"""Deleting many or one: what is in use stays and says who uses it, a dry run changes nothing, and nothing is left half
gone."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tests.component.housekeeping.conftest import ended_job
from tests.daemon_parts import ROOT, DaemonParts

from horizon_server.errors import InUse, InvalidSpec, NotAllowed, NotFound, RequestIdReused
from horizon_server.jobs.leases import ReadLeases
from horizon_server.records.account import Principal
from horizon_server.records.housekeeping import Deletion, Selection
from horizon_server.records.job import BEING_DELETED, JobState

S = JobState


async def deleted(daemon: DaemonParts, who: Principal, kind: str, *keys: str, **filters: Any) -> list[Deletion]:
    selection = Selection(kind=kind, keys=keys, **filters)  # type: ignore[arg-type]
    return [deletion async for deletion, _, _ in daemon.services.deletions.delete(who, selection)]


async def test_a_job_goes_with_its_folder_its_events_and_its_row(daemon: DaemonParts, ada: Principal) -> None:
    job = await ended_job(daemon, ada, steps=(5, 10))
    daemon.write_log(job, b"the log")
    folder = daemon.state_dir / "jobs" / job.job_id
    [would] = await deleted(daemon, ada, "job", "job", dry_run=True)
    assert would.size_bytes == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert would.size_bytes > 600
    assert (await daemon.job(job.job_id)).job_id == job.job_id, "a dry run deletes nothing"
    [gone] = await deleted(daemon, ada, "job", "job")
    assert (gone.key, gone.name, gone.refusal, gone.size_bytes) == (job.job_id, "job", "", would.size_bytes)
    assert list((daemon.state_dir / "jobs").iterdir()) == []
    with pytest.raises(NotFound):
        await daemon.job(job.job_id)
    assert await daemon.parts.journal.store.events_after(job.job_id, 0, 10) == []
    samples = daemon.parts.metrics.registry
    assert samples.get_sample_value("horizon_jobs", {"state": "SUCCEEDED"}) == 0


async def test_a_job_that_has_not_ended_is_refused_and_the_others_go(daemon: DaemonParts, ada: Principal) -> None:
    running = await daemon.job_in(S.RUNNING, ada, name="running")
    done = await ended_job(daemon, ada, "done")
    refused, gone = await deleted(daemon, ada, "job", running.job_id, done.job_id)
    assert refused.reason == "IN_USE"
    assert f"job {running.job_id} is RUNNING" in refused.refusal
    assert "horizon job cancel" in refused.refusal
    assert gone.refusal == ""
    assert (await daemon.job(running.job_id)).job_state is S.RUNNING


async def test_nothing_is_deleted_when_a_key_means_nothing(daemon: DaemonParts, ada: Principal) -> None:
    job = await ended_job(daemon, ada)
    with pytest.raises(NotFound, match="nothing-like-it"):
        await deleted(daemon, ada, "job", job.job_id, "nothing-like-it")
    assert (await daemon.job(job.job_id)).job_id == job.job_id


async def test_jobs_are_selected_by_state_age_and_owner(daemon: DaemonParts, ada: Principal) -> None:
    day = 86400.0
    bob = await daemon.user("bob")
    await daemon.dataset(bob)
    old = await ended_job(daemon, ada, "old", state=S.FAILED, ended_s=time.time() - 40 * day)
    new = await ended_job(daemon, ada, "new", state=S.FAILED)
    good = await ended_job(daemon, ada, "good", ended_s=time.time() - 40 * day)
    other = await ended_job(daemon, bob, "other", state=S.FAILED, ended_s=time.time() - 40 * day)

    async def chosen(who: Principal, **filters: Any) -> set[str]:
        return {one.key for one in await deleted(daemon, who, "job", dry_run=True, **filters)}

    failed = frozenset({S.FAILED})
    assert await chosen(ada, states=failed) == {old.job_id, new.job_id}
    assert await chosen(ada, older_than_s=30 * day) == {old.job_id, good.job_id}
    assert await chosen(ada, states=failed, older_than_s=30 * day) == {old.job_id}
    assert await chosen(ROOT, states=failed) == set(), "an admin's own, where no owner is named"
    assert await chosen(ROOT, states=failed, owner="bob") == {other.job_id}
    with pytest.raises(NotAllowed, match="only an admin"):
        await chosen(ada, states=failed, owner="bob")
    with pytest.raises(InvalidSpec, match="only jobs that have ended"):
        await chosen(ada, states=frozenset({S.RUNNING}))
    with pytest.raises(InvalidSpec, match="name what to delete"):
        await chosen(ada)


async def test_a_dataset_in_use_names_the_job_and_its_owner(daemon: DaemonParts, ada: Principal) -> None:
    job = await daemon.submit(ada)
    [refused] = await deleted(daemon, ada, "dataset", "chats", dry_run=True)
    assert f"needed by job {job.job_id} of ada" in refused.refusal
    await daemon.services.jobs.cancel(ada, job.job_id)
    [gone] = await deleted(daemon, ada, "dataset", "chats")
    assert gone.refusal == ""
    assert gone.size_bytes > 0
    with pytest.raises(NotFound):
        await daemon.services.datasets.get(ada, "chats")


async def test_the_bytes_are_those_that_are_freed(daemon: DaemonParts, ada: Principal) -> None:
    """What another dataset is made of too stays."""
    content = b'{"text": "shared"}\n'
    await daemon.dataset(ada, "one", content)
    await daemon.dataset(ada, "two", content)
    assert [one.size_bytes for one in await deleted(daemon, ada, "dataset", "one", "two", dry_run=True)] == [0, 0]
    first, second = await deleted(daemon, ada, "dataset", "one", "two")
    assert (first.size_bytes, second.size_bytes) == (0, len(content))


async def test_models_and_datasets_by_age(daemon: DaemonParts, ada: Principal) -> None:
    await daemon.model(ada)
    assert await deleted(daemon, ada, "model", older_than_s=3600.0) == []
    [gone] = await deleted(daemon, ada, "model", older_than_s=1e-6)
    assert (gone.name, gone.refusal) == ("tiny", "")
    with pytest.raises(InvalidSpec, match="states are of jobs"):
        await deleted(daemon, ada, "model", states=frozenset({S.FAILED}))


async def test_checkpoints_by_step_by_job_and_by_filter(daemon: DaemonParts, ada: Principal) -> None:
    done = await ended_job(daemon, ada, "done", steps=(5, 10, 15))
    paused = await daemon.job_in(S.RUNNING, ada, name="alive")
    for step in (1, 2):
        daemon.write_checkpoint(paused, step, {"model.safetensors": b"x"})
    [one] = await deleted(daemon, ada, "checkpoint", "done@10")
    assert (one.key, one.size_bytes) == (f"{done.job_id}@10", 300)
    with pytest.raises(NotFound, match="has no checkpoint of step 10; it has: 5, 15"):
        await deleted(daemon, ada, "checkpoint", "done@5", "done@10")
    with pytest.raises(InvalidSpec, match="write JOB@STEP"):
        await deleted(daemon, ada, "checkpoint", "done@last")
    first, newest = await deleted(daemon, ada, "checkpoint", "alive")
    assert first.refusal == ""
    assert "would continue from step 2" in newest.refusal
    filtered = await deleted(daemon, ada, "checkpoint", states=frozenset({S.SUCCEEDED}))
    assert [one.key for one in filtered] == [f"{done.job_id}@5", f"{done.job_id}@15"]


async def test_others_cannot_delete_and_viewers_can_delete_nothing(daemon: DaemonParts, ada: Principal) -> None:
    job = await ended_job(daemon, ada)
    bob, eve = await daemon.user("bob"), await daemon.user("eve", role="viewer")
    with pytest.raises(NotFound):
        await deleted(daemon, bob, "job", job.job_id)
    with pytest.raises(NotAllowed, match="viewer"):
        await deleted(daemon, eve, "job", job.job_id)
    [gone] = await deleted(daemon, ROOT, "job", job.job_id)
    assert gone.refusal == ""


async def test_what_is_being_downloaded_stays(daemon: DaemonParts, ada: Principal) -> None:
    job = await ended_job(daemon, ada, steps=(5, 10))
    jobs = daemon.services.jobs
    async with jobs.checkpoint_file(ada, job.job_id, 5, "model.safetensors") as path:
        for kind, key in (("job", job.job_id), ("checkpoint", f"{job.job_id}@5")):
            for dry_run in (True, False):
                [refused] = await deleted(daemon, ada, kind, key, dry_run=dry_run)
                assert "being downloaded" in refused.refusal
        # Another process, such as a worker that keeps the newest only.
        daemon.parts.scheduler.runtime.folders.checkpoints(job.job_id).apply_retention(keep_last=1, keep_best=False)
        assert path.read_bytes() == b"w" * 100
    with pytest.raises(InUse):
        # A download asks for one file after the other.
        daemon.parts.scheduler.runtime.folders.checkpoints(job.job_id).delete(5)
    [gone] = await deleted(daemon, ada, "checkpoint", f"{job.job_id}@5")
    assert gone.refusal == "", "its owner need not wait until the last download is forgotten"


async def test_a_preview_keeps_its_dataset(daemon: DaemonParts, ada: Principal) -> None:
    record = await daemon.services.datasets.get(ada, "chats")
    with daemon.services.datasets.reading(record.id):
        [refused] = await deleted(daemon, ada, "dataset", "chats")
    assert "being read by a preview" in refused.refusal


async def test_a_deletion_that_was_cut_short_is_finished_by_the_next_sweep(daemon: DaemonParts, ada: Principal) -> None:
    job = await ended_job(daemon, ada, state=S.FAILED)
    await daemon.parts.journal.store.begin_deletion(job.job_id, BEING_DELETED)
    with pytest.raises(NotFound, match="being deleted"):
        await daemon.services.jobs.resume(ada, job.job_id)
    found, problem = await daemon.parts.sweep.run()
    assert problem == ""
    assert found == []
    with pytest.raises(NotFound):
        await daemon.job(job.job_id)
    assert list((daemon.state_dir / "jobs").iterdir()) == []


async def test_a_repeated_request_does_not_bring_a_deleted_job_back(daemon: DaemonParts, ada: Principal) -> None:
    request_id = "7d3c3a3e-6a3c-4c86-9c7b-0d6f5a1f7a11"
    job = await daemon.services.jobs.submit(ada, request_id=request_id, spec=daemon.spec("once"))
    await daemon.services.jobs.cancel(ada, job.job_id)
    await deleted(daemon, ada, "job", job.job_id)
    with pytest.raises(NotFound, match="is deleted; submit with a new request_id"):
        await daemon.services.jobs.submit(ada, request_id=request_id, spec=daemon.spec("once"))
    with pytest.raises(RequestIdReused):
        await daemon.services.jobs.submit(ada, request_id=request_id, spec=daemon.spec("other"))


async def test_leases_of_many_downloads_are_bounded(
    daemon: DaemonParts, ada: Principal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horizon_server.jobs.leases.MAX_LEASES", 2)
    job = await ended_job(daemon, ada, steps=(1, 2, 3, 4))
    leases, checkpoints = ReadLeases(), daemon.parts.scheduler.runtime.folders.checkpoints(job.job_id)
    for step in (1, 2, 3, 4):
        with await leases.take(checkpoints, step):
            pass
    assert len(leases._leases) <= 3
    leases.close()
    checkpoints.delete(4)

"""Orders to a job in another box, and what is lost when a machine is: nothing."""

from __future__ import annotations

import uuid

import pytest
from tests.component.fleet.conftest import Fleet
from tests.daemon_parts import Script

from horizon_server.errors import BoxLost, NotAllowed, NotFound, WrongJobState
from horizon_server.events import StepDone
from horizon_server.records.job import JobRecord, JobState
from horizon_server.records.task_result import TaskResult
from horizon_server.services.checkpoint_files import read_checkpoint_file
from horizon_server.services.fleet.boxes import NeededFiles


async def held(fleet: Fleet, name: str = "job", *, hold_at: int = 2, num_steps: int = 4) -> JobRecord:
    """A job in the box that has done a step and waits."""
    fleet.box.script(name, Script(num_steps=num_steps, hold_at=hold_at))
    job = await fleet.head.submit(fleet.ada, name, model="tiny", node="box2", train={"max_steps": num_steps})
    await fleet.head.until(job.job_id, JobState.RUNNING, step=hold_at - 1)
    return await fleet.head.job(job.job_id)


async def steps(fleet: Fleet, job_id: str) -> list[int]:
    events = await fleet.head.parts.journal.store.events_after(job_id, 0, 1000)
    assert [event.sequence for event in events] == [*range(1, len(events) + 1)]
    return [event.payload.step for event in events if isinstance(event.payload, StepDone)]


async def test_orders_are_carried_out_there(fleet: Fleet) -> None:
    job, jobs = await held(fleet), fleet.head.services.jobs
    assert (await jobs.update(fleet.ada, job.job_id, priority=7)).priority == 7
    assert (await fleet.box.job(job.job_id)).priority == 7
    await jobs.pause(fleet.ada, job.job_id)
    paused = await fleet.head.until(job.job_id, JobState.PAUSED)
    assert (paused.step, paused.box) == (1, "box2")
    (checkpoint,) = await jobs.checkpoints(fleet.ada, job.job_id)
    assert (checkpoint.step, checkpoint.job_id) == (1, job.job_id)
    fleet.box.release("job")
    await jobs.resume(fleet.ada, job.job_id)
    ended = await fleet.head.until(job.job_id, JobState.SUCCEEDED)
    assert ended.step == 4 and ended.attempt == 2
    with pytest.raises(WrongJobState):
        await jobs.resume(fleet.ada, job.job_id)
    retention = fleet.head.services.retention
    assert (await retention.keep(fleet.ada, job.job_id)).keep_files
    assert (await retention.keep_checkpoint(fleet.ada, job.job_id, 4, kept=True)).kept
    figure = TaskResult(step=0, task="arc", metric="acc", value=0.5)
    recorded = await fleet.head.services.task_results.record(fleet.ada, job.job_id, 4, [figure])
    assert [(one.step, one.value) for one in recorded.task_results] == [(4, 0.5)]
    await jobs.delete_checkpoint(fleet.ada, job.job_id, 1)
    assert [one.step for one in await jobs.checkpoints(fleet.ada, job.job_id)] == [4]
    await jobs.delete(fleet.ada, job.job_id)
    for daemon in (fleet.head, fleet.box):
        with pytest.raises(NotFound):
            await daemon.job(job.job_id)


async def test_logs_are_read_there(fleet: Fleet) -> None:
    job, jobs = await held(fleet), fleet.head.services.jobs
    part, there = (
        await jobs.log_part(fleet.ada, job.job_id),
        await fleet.box.services.jobs.log_part(fleet.ada, job.job_id),
    )
    assert part == there
    assert await jobs.cancel(fleet.ada, job.job_id)
    await fleet.head.until(job.job_id, JobState.CANCELLED)
    pieces = [piece async for piece in jobs.logs(fleet.ada, job.job_id)]
    log = fleet.box.state_dir / "jobs" / job.job_id / "attempt-1" / "worker.log"
    assert b"".join(data for _, data in pieces) == log.read_bytes()


async def test_a_job_on_its_way_is_cancelled_and_paused_here(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> JobRecord:
        raise BoxLost("the test lets nothing arrive")

    monkeypatch.setattr(fleet.box.services.guest, "submit", refuse)
    jobs = fleet.head.services.jobs
    first = await fleet.head.submit(fleet.ada, "first", model="tiny", node="box2")
    second = await fleet.head.submit(fleet.ada, "second", model="tiny", node="box2")
    assert (await jobs.cancel(fleet.ada, first.job_id)).job_state is JobState.CANCELLED
    assert (await jobs.pause(fleet.ada, second.job_id)).job_state is JobState.PAUSED
    monkeypatch.undo()
    assert (await jobs.resume(fleet.ada, second.job_id)).job_state is JobState.QUEUED
    await fleet.head.until(second.job_id, JobState.SUCCEEDED)
    with pytest.raises(NotFound):
        await fleet.box.job(first.job_id)


async def test_a_box_that_is_lost_trains_on_and_nothing_is_missing_after_it(fleet: Fleet) -> None:
    job, jobs = await held(fleet, num_steps=6), fleet.head.services.jobs
    await fleet.cut()
    with pytest.raises(BoxLost, match=r"box box2 \(127.0.0.1:\d+\) cannot be reached"):
        await jobs.cancel(fleet.ada, job.job_id)

    async def says_lost() -> bool:
        outlook = (await jobs.get(fleet.ada, job.job_id)).outlook
        return outlook is not None and "in box2, which does not answer" in outlook.why

    await fleet.until(says_lost)
    fleet.box.release("job")
    await fleet.box.until(job.job_id, JobState.SUCCEEDED)
    assert (await fleet.head.job(job.job_id)).job_state is JobState.RUNNING
    await fleet.mend()
    await fleet.head.until(job.job_id, JobState.SUCCEEDED)
    assert await steps(fleet, job.job_id) == [1, 2, 3, 4, 5, 6]


async def test_a_new_head_finds_its_jobs_again(fleet: Fleet) -> None:
    job = await held(fleet, num_steps=5)
    before = await fleet.head.job(job.job_id)
    await fleet.stop_head()
    fleet.box.release("job")
    await fleet.box.until(job.job_id, JobState.SUCCEEDED)  # which waits for nobody
    await fleet.start_head()
    ended = await fleet.head.until(job.job_id, JobState.SUCCEEDED)
    there = await fleet.box.job(job.job_id)
    assert (there.attempt, there.num_restarts) == (1, 0)
    assert ended.step == 5 and ended.last_sequence > before.last_sequence
    assert await steps(fleet, job.job_id) == [1, 2, 3, 4, 5]


async def test_others_see_and_change_no_more_than_here(fleet: Fleet) -> None:
    job, jobs = await held(fleet), fleet.head.services.jobs
    bob, eve = await fleet.head.user("bob"), await fleet.head.user("eve", role="viewer")
    fleet.box.release("job")
    await fleet.head.until(job.job_id, JobState.SUCCEEDED)
    for call in (jobs.checkpoints, jobs.log_part, jobs.cancel, jobs.delete):
        with pytest.raises(NotFound):
            await call(bob, job.job_id)
    with pytest.raises(NotFound):
        _ = [one async for one in read_checkpoint_file(jobs, bob, job.job_id, 4, "trainer/trainer_state.json")]
    assert await jobs.checkpoints(eve, job.job_id)
    with pytest.raises(NotAllowed):
        await jobs.delete_checkpoint(eve, job.job_id, 4)


async def test_what_is_there_is_not_copied_again(fleet: Fleet) -> None:
    first = await fleet.head.submit(fleet.ada, "first", model="tiny", node="box2")
    await fleet.head.until(first.job_id, JobState.SUCCEEDED)
    spec = fleet.head.spec("second", model="tiny", eval_dataset="chats", eval={"sets": {"more": "chats"}})
    _, _, places = await fleet.head.services.jobs.plan(fleet.ada, spec)
    assert [place.copied_bytes for place in places] == [0, 0]
    spec = spec.model_copy(update={"node": "box2"})
    second = await fleet.head.services.jobs.submit(fleet.ada, request_id=str(uuid.uuid4()), spec=spec)
    await fleet.head.until(second.job_id, JobState.SUCCEEDED)
    there = await fleet.box.job(second.job_id)
    assert there.dataset_id == there.eval_dataset_id == there.eval_set_ids["more"] != second.dataset_id
    assert len((await fleet.box.services.models.list(fleet.ada))[0]) == 1


async def test_data_that_was_deleted_on_the_way_fails_the_job(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    boxes, asked = fleet.head.services.jobs.boxes, list[str]()
    needed_by = boxes.needed_by

    async def gone_after_the_plan(job: JobRecord) -> NeededFiles:
        asked.append(job.job_id)
        if len(asked) > 1:
            raise NotFound(f"dataset {job.dataset_id} does not exist any more")
        return await needed_by(job)

    monkeypatch.setattr(boxes, "needed_by", gone_after_the_plan)
    job = await fleet.head.submit(fleet.ada, model="tiny", node="box2")
    ended = await fleet.head.until(job.job_id, JobState.FAILED)
    assert (ended.reason, ended.message) == (
        "NOT_FOUND",
        f"box2 refuses it: dataset {job.dataset_id} does not exist any more",
    )


async def test_what_a_job_uses_there_counts_here_once(fleet: Fleet) -> None:
    fleet.box.script("job", Script(num_steps=3, step_s=0.05))
    job = await fleet.head.submit(fleet.ada, model="tiny", node="box2")
    ended = await fleet.head.until(job.job_id, JobState.SUCCEEDED)
    await fleet.head.parts.scheduler.runtime.meter.store()
    ended = await fleet.head.job(job.job_id)
    there = await fleet.box.job(job.job_id)
    (usage,) = await fleet.head.services.sharing.usage(fleet.ada, 0.0)
    assert usage.device_s == pytest.approx(ended.device_s) and ended.device_s <= there.device_s

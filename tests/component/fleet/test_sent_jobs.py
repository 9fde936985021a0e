"""A job that is sent to another box: it is there like any other one, and here everything reads it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

import pytest
from tests.component.fleet.conftest import Fleet

from horizon_server.records.account import Principal
from horizon_server.records.job import JobRecord, JobState
from horizon_server.records.sharing import Outlook
from horizon_server.services.checkpoint_files import read_checkpoint_file
from horizon_server.services.fleet import boxes
from horizon_server.services.fleet.records import SentJob


async def test_a_job_is_copied_there_and_followed_here(fleet: Fleet) -> None:
    job = await fleet.head.submit(fleet.ada, model="tiny", node="box2", script=None)
    assert job.box == "box2"
    ended = await fleet.head.until(job.job_id, JobState.SUCCEEDED)
    there = await fleet.box.job(job.job_id)
    assert (ended.step, ended.num_steps, ended.last_step) == (3, 3, there.last_step)
    assert (there.spec, there.owner, there.box) == (job.spec, "ada", "")
    of_head = [event.payload for event in await fleet.head.events(job.job_id)]
    of_box = [event.payload for event in await fleet.box.events(job.job_id)]
    assert of_head[-len(of_box) + 1 :] == of_box[1:]
    jobs = fleet.head.services.jobs
    assert await jobs.checkpoints(fleet.ada, job.job_id) == await fleet.box.services.jobs.checkpoints(
        fleet.ada, job.job_id
    )
    async with aclosing(read_checkpoint_file(jobs, fleet.ada, job.job_id, 3, "trainer/trainer_state.json")) as pieces:
        content = b"".join([data async for _, data in pieces])
    folder = fleet.box.state_dir / "jobs" / job.job_id / "checkpoints" / "step-00000003"
    assert content == (folder / "trainer/trainer_state.json").read_bytes()


async def test_a_job_on_its_way_is_counted_where_it_goes(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    simulate = fleet.box.services.guest.simulate

    async def noted(principal: Principal, job: JobRecord, coming: Sequence[JobRecord]) -> Outlook:
        asked.append([one.job_id for one in coming])
        return await simulate(principal, job, coming)

    async def stay(principal: Principal, sent: SentJob) -> JobRecord:
        await asyncio.Event().wait()
        raise AssertionError("it stays on its way")

    monkeypatch.setattr(fleet.box.services.guest, "simulate", noted)
    monkeypatch.setattr(fleet.box.services.guest, "submit", stay)
    first = await fleet.head.submit(fleet.ada, model="tiny", node="box2")
    assert first.box == "box2"
    await fleet.head.submit(fleet.ada, "second", model="tiny", node="box2")
    assert asked == [[], [first.job_id]]
    monkeypatch.setattr(boxes, "_MOST_COMING", 1)
    await fleet.head.submit(fleet.ada, "third", model="tiny", node="box2")
    assert asked[2:] == [[first.job_id]]  # of two

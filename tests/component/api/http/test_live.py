"""The stream of an open page: what there is, then changes; one look for all pages that see the same; an end with the
caller's rights."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import httpx
import pytest

from horizon_server.api.http import live
from horizon_server.api.http.live import MAX_PAGES_PER_USER, MAX_SHOWN_JOBS, MAX_STEPS_AT_ONCE, TOPICS, LivePages
from horizon_server.api.services import OpenStreams
from horizon_server.errors import TooManyCalls
from horizon_server.records.job import JobState
from horizon_server.records.sharing import NodeCondition

PATIENCE_S = 240.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "CHANGES_EVERY_S", 0.01)
    monkeypatch.setattr(live, "_LOOK_EVERY_S", 0.05)


@pytest.fixture
async def pages(world: Any) -> AsyncIterator[LivePages]:
    streams = OpenStreams(world.services.accounts, check_every_s=0.02)
    yield LivePages(world.services, streams)
    streams.end()
    if streams._checking is not None:  # it may be reading the database, which is closed next
        await asyncio.wait([streams._checking])


class Reader:
    """An open page."""

    def __init__(self, frames: Any) -> None:
        self._frames = frames

    async def next(self, *events: str) -> Any:
        """Return the body of the next frame of one of these events."""
        async with asyncio.timeout(PATIENCE_S):
            async for frame in self._frames:
                if frame.event in events:
                    return json.loads(frame.data)
        raise AssertionError(f"the stream ended without {events}")

    async def until(self, event: str, holds: Any) -> Any:
        while not holds(body := await self.next(event)):
            pass
        return body


@asynccontextmanager
async def opened(
    pages: LivePages, world: Any, user: str, *jobs: str, after: tuple[int, ...] = (), topics: tuple[str, ...] = TOPICS
) -> AsyncIterator[Reader]:
    caller = await world.caller(user)
    frames: Any = pages.frames(caller, topics, await pages.shown_jobs(caller, jobs, after))
    async with aclosing(frames):
        yield Reader(frames)


async def test_a_page_gets_what_there_is_and_then_changes(
    pages: LivePages, world: Any, make_step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await world.job(name="first", state=JobState.RUNNING), await world.job(name="second")
    async with opened(pages, world, "ann") as page:
        there = await page.next("jobs")
        assert [job["name"] for job in there["jobs"]] == ["second", "first"]
        shown = there["jobs"][1]
        assert shown["spec"] == {"name": "first", "model": shown["spec"]["model"], "dataset": "chats", "method": "sft"}
        assert "plan" not in shown
        assert [job["job_id"] for job in (await page.next("queue"))["jobs"]] == [first.job_id, second.job_id]
        assert (await page.next("node"))["user"] == "ann"
        await world.append(first, make_step(3))
        changed = await page.next("jobs")
        assert [(job["job_id"], job["last_step"]["step"]) for job in changed["jobs"]] == [(first.job_id, 3)]
        third = await world.job(name="third")
        await page.until("jobs", lambda body: [job["job_id"] for job in body["jobs"]] == [third.job_id])
        await world.services.jobs.cancel(world.principal("ann"), second.job_id)
        await page.until("queue", lambda body: second.job_id not in [job["job_id"] for job in body["jobs"]])
        await world.services.jobs.delete(world.principal("ann"), second.job_id)
        await page.until("jobs", lambda body: body["gone"] == [second.job_id])
        await world.services.sharing.set_node(
            await world.caller("root"), NodeCondition(mode="cordoned", message="disk")
        )
        await page.until("node", lambda body: body["condition"]["message"] == "disk")
    monkeypatch.setattr(live, "MAX_QUEUE", 1)
    async with opened(pages, world, "ann") as page:
        assert len((await page.next("queue"))["jobs"]) == 1


async def test_only_the_topics_that_were_asked_for_come(pages: LivePages, world: Any) -> None:
    await world.job()
    async with opened(pages, world, "ann", topics=("queue",)) as page:
        assert (await page.next(*TOPICS)).keys() == {"jobs"}
    async with opened(pages, world, "ann", topics=("node",)) as page:
        assert "hostname" in await page.next(*TOPICS)


async def test_a_page_gets_events_of_the_jobs_that_it_shows_and_of_many_steps_the_last(
    pages: LivePages, world: Any, make_step: Any
) -> None:
    job = await world.job(state=JobState.RUNNING)
    async with opened(pages, world, "ann", job.job_id, topics=()) as page:
        await world.append(job, make_step(1))
        assert [event["step"] for event in (await page.next("job"))["events"]] == [1]
    num_steps = MAX_STEPS_AT_ONCE + 20
    await world.append(job, *(make_step(step) for step in range(2, num_steps + 1)))
    async with opened(pages, world, "ann", job.job_id, after=(0,), topics=()) as page:
        body = await page.next("job")
    assert body["job_id"] == job.job_id
    assert {event["kind"] for event in body["events"]} == {"state", "step"}
    steps = [event["step"] for event in body["events"] if event["kind"] == "step"]
    assert (len(steps), steps[-1]) == (MAX_STEPS_AT_ONCE, num_steps)
    assert body["events"][0]["sequence"] == 1


async def test_nobody_sees_the_jobs_of_others(
    pages: LivePages, world: Any, ann: httpx.AsyncClient, connect: Any
) -> None:
    job = await world.job(name="secret")
    async with opened(pages, world, "bob") as page:
        assert await page.next("jobs") == {"jobs": [], "gone": []}
        (entry,) = (await page.next("queue"))["jobs"]
        assert (entry["job_id"], entry["name"]) == (job.job_id, None)
    refused = await connect("bob").get("/horizon/v1/stream", params={"jobs": job.job_id})
    assert refused.status_code == 404
    assert (await connect().get("/horizon/v1/stream")).status_code == 401


async def test_pages_that_see_the_same_cost_one_look(
    pages: LivePages, world: Any, make_step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await world.job(state=JobState.RUNNING)
    looks = 0
    look = live.View._look

    async def counted(view: live.View) -> None:
        nonlocal looks
        looks += 1
        await look(view)

    monkeypatch.setattr(live.View, "_look", counted)
    monkeypatch.setattr(live, "_LOOK_EVERY_S", 3600.0)
    reads = 0
    events_after = world.journal.store.events_after

    async def counted_read(*given: Any) -> Any:
        nonlocal reads
        reads += 1
        return await events_after(*given)

    monkeypatch.setattr(world.journal.store, "events_after", counted_read)
    monkeypatch.setattr(live, "MAX_PAGES_PER_USER", 50)
    async with asyncio.TaskGroup() as running:
        told = asyncio.Barrier(51)

        async def watch() -> None:
            async with opened(pages, world, "ann", job.job_id) as page:
                await page.next("jobs")
                await told.wait()
                await page.until("jobs", lambda body: body["jobs"][0]["last_step"]["step"] == 20)

        for _ in range(50):
            running.create_task(watch())
        await told.wait()
        reads_before = reads
        for step in range(1, 21):
            await world.append(job, make_step(step))
    # At most one for each step and a few at the beginning, whatever the number of pages.
    assert looks <= 25
    assert reads - reads_before <= 60, "each page reads at most once more; then the events are at hand"
    assert pages._views == {}


async def test_a_stream_ends_when_the_token_does_and_when_the_daemon_stops(pages: LivePages, world: Any) -> None:
    token, secret = await world.services.accounts.create_token("ann", lifetime_s=None)
    world.tokens["phone"] = secret
    async with opened(pages, world, "phone") as page:
        await page.next("jobs")
        await world.services.accounts.revoke_token(token.token_id)
        assert (await page.next("problem"))["error"]["reason"] == "UNAUTHENTICATED"
    async with opened(pages, world, "ann") as page:
        await page.next("jobs")
        pages._streams.end()
        assert (await page.next("problem"))["error"]["reason"] == "DRAINING"
    assert pages._num_of_user.total() == 0


async def test_open_pages_of_a_user_and_their_jobs_are_bounded(
    pages: LivePages, world: Any, ann: httpx.AsyncClient
) -> None:
    pages._num_of_user["ann"] = MAX_PAGES_PER_USER
    with pytest.raises(TooManyCalls, match="ann has 16 pages open"):
        pages.require_room("ann")
    async with opened(pages, world, "ann") as page:
        assert (await page.next("problem"))["error"]["reason"] == "TOO_MANY_CALLS"
    for query, code in (
        ({"jobs": ",".join(["j"] * (MAX_SHOWN_JOBS + 1))}, 400),
        ({"jobs": "a,b", "after": "1"}, 400),
        ({"jobs": "a", "after": "-1"}, 422),
        ({"topics": "everything"}, 422),
        ({"jobs": "none"}, 404),
    ):
        assert (await ann.get("/horizon/v1/stream", params=query)).status_code == code, query


async def test_what_ends_a_look_ends_its_pages(pages: LivePages, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(pages, world, "ann") as page:
        await page.next("jobs")

        async def broken(view: live.View) -> None:
            raise RuntimeError("a defect")

        monkeypatch.setattr(live.View, "_look", broken)
        with pytest.raises(RuntimeError, match="a defect"):
            await page.next("nothing")

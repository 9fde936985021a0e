"""The event stream: numbered, resumable, alive, and gone when it should be."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from sse_starlette import ServerSentEvent

from horizon_server.api.http.routes import event_frames
from horizon_server.api.services import OpenStreams
from horizon_server.errors import Draining
from horizon_server.events import JobEvent
from horizon_server.records.job import JobState


def _frames(text: str) -> list[dict[str, str]]:
    frames = [frame for frame in text.split("\n\n") if frame]
    return [dict(line.split(": ", 1) for line in frame.splitlines() if not line.startswith(":")) for frame in frames]


async def test_the_events_of_an_ended_job(ann: httpx.AsyncClient, world: Any, make_step: Any) -> None:
    job = await world.job(make_step(1, 2.5), make_step(2, math.inf), state=JobState.SUCCEEDED)
    answer = await ann.get(f"/horizon/v1/jobs/{job.job_id}/events", params={"after": 4})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-content-type-options"] == "nosniff"
    retry, first, second, third, last = _frames(answer.text)
    assert retry == {"retry": "2000"}
    assert (first["id"], first["event"]) == ("5", "step")
    assert json.loads(first["data"])["loss"] == 2.5
    assert json.loads(first["data"])["h2d"]["bytes"] == 7
    assert json.loads(second["data"])["loss"] is None
    assert (third["id"], third["event"], json.loads(third["data"])["job_state"]) == ("7", "state", "SUCCEEDED")
    assert last["event"] == "end"
    assert "id" not in last


@pytest.mark.parametrize("way", [{"headers": {"Last-Event-ID": "5"}}, {"params": {"after": "5"}}])
async def test_a_stream_resumes_after_the_last_event(
    ann: httpx.AsyncClient, world: Any, make_step: Any, way: dict[str, Any]
) -> None:
    job = await world.job(make_step(1), make_step(2), state=JobState.SUCCEEDED)
    path = f"/horizon/v1/jobs/{job.job_id}/events"
    frames = _frames((await ann.get(path, headers=way.get("headers"), params=way.get("params"))).text)
    assert [frame["id"] for frame in frames if "id" in frame] == ["6", "7"]


async def test_nothing_to_come_ends_the_reconnecting(ann: httpx.AsyncClient, world: Any) -> None:
    job = await world.job(state=JobState.SUCCEEDED)
    after = {"Last-Event-ID": str(job.last_sequence)}
    answer = await ann.get(f"/horizon/v1/jobs/{job.job_id}/events", headers=after)
    assert (answer.status_code, answer.content) == (204, b"")


@pytest.mark.parametrize("given", ["-1", "one", "1.5", "9" * 19])
async def test_a_wrong_number_is_named(ann: httpx.AsyncClient, given: str) -> None:
    path = "/horizon/v1/jobs/any/events"
    in_query = await ann.get(path, params={"after": given})
    in_header = await ann.get(path, headers={"Last-Event-ID": given})
    for answer, field in ((in_query, "after"), (in_header, "last-event-id")):
        assert answer.status_code == 422
        assert answer.json()["error"]["violations"][0]["field"] == field


async def test_a_refusal_on_the_way_is_an_event(ann: httpx.AsyncClient, world: Any, make_step: Any) -> None:
    job = await world.job(make_step(1))
    world.daemon.parts.lifecycle.close()
    *_, step, last = _frames((await ann.get(f"/horizon/v1/jobs/{job.job_id}/events")).text)
    assert step["event"] == "step"
    assert last["event"] == "problem"
    assert json.loads(last["data"])["error"]["reason"] == "DRAINING"


async def test_the_end_of_all_streams_ends_a_waiting_one_and_its_watch(world: Any) -> None:
    streams = OpenStreams(world.services.accounts)
    job = await world.job()
    frames = event_frames(
        world.services.jobs.watch(world.principal("ann"), job.job_id), streams, await world.caller("ann")
    )
    seen: list[ServerSentEvent] = []

    async def read() -> None:
        async for frame in frames:
            seen.append(frame)  # noqa: PERF401  # each as it comes

    reading = asyncio.create_task(read())
    async with asyncio.timeout(240):
        while len(seen) < 2:  # noqa: ASYNC110  # nothing announces it
            await asyncio.sleep(0.005)
        streams.end()
        await reading
    assert [frame.event for frame in seen] == [None, "state", "problem"]
    assert json.loads(str(seen[-1].data))["error"]["reason"] == Draining.reason
    assert world.num_watching(job) == 0


async def test_a_client_that_goes_away_ends_the_watch(world: Any) -> None:
    job = await world.job()
    ann = await world.caller("ann")
    watch = world.services.jobs.watch(ann, job.job_id)
    frames = event_frames(watch, OpenStreams(world.services.accounts), ann)
    await anext(frames)
    await anext(frames)
    assert world.num_watching(job) == 1
    await frames.aclose()  # type: ignore[attr-defined]
    await world.until_unwatched(job)


async def test_a_stream_of_no_events_just_ends(world: Any) -> None:
    async def nothing() -> AsyncGenerator[JobEvent, None]:
        return
        yield

    frames = event_frames(nothing(), OpenStreams(world.services.accounts), await world.caller("ann"))
    assert [frame.event async for frame in frames] == [None, "end"]

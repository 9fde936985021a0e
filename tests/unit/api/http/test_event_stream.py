"""The event stream: numbered, resumable, alive, and gone when it should be."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from horizon_server.api.http.event_stream import event_lines, resume_after
from horizon_server.errors import Draining, InvalidSpec
from horizon_server.events import JobEvent, StateChanged
from horizon_server.records.job import JobState

DONE = StateChanged(job_state="SUCCEEDED")


def _frames(text: str) -> list[dict[str, str]]:
    frames = [frame for frame in text.split("\n\n") if frame]
    return [dict(line.split(": ", 1) for line in frame.splitlines() if not line.startswith(":")) for frame in frames]


async def test_the_events_of_an_ended_job(ada: httpx.AsyncClient, services: Any, make_job: Any, make_step: Any) -> None:
    services.jobs.add(make_job())
    services.jobs.tell("j-1", make_step(1, 2.5), make_step(2, math.inf), DONE)
    answer = await ada.get("/horizon/v1/jobs/j-1/events")
    assert answer.headers["content-type"].startswith("text/event-stream")
    retry, first, second, third, last = _frames(answer.text)
    assert retry == {"retry": "2000"}
    assert (first["id"], first["event"]) == ("1", "step")
    assert json.loads(first["data"])["loss"] == 2.5
    assert json.loads(second["data"])["loss"] is None
    assert (third["id"], third["event"]) == ("3", "state")
    assert last["event"] == "end"
    assert "id" not in last


@pytest.mark.parametrize("way", [{"headers": {"Last-Event-ID": "1"}}, {"params": {"after": "1"}}])
async def test_a_stream_resumes_after_the_last_event(
    ada: httpx.AsyncClient, services: Any, make_job: Any, make_step: Any, way: dict[str, Any]
) -> None:
    services.jobs.add(make_job())
    services.jobs.tell("j-1", make_step(1), make_step(2), DONE)
    frames = _frames((await ada.get("/horizon/v1/jobs/j-1/events", **way)).text)
    assert [frame["id"] for frame in frames if "id" in frame] == ["2", "3"]


async def test_nothing_to_come_ends_the_reconnecting(ada: httpx.AsyncClient, services: Any, make_job: Any) -> None:
    services.jobs.add(make_job())
    services.jobs.tell("j-1", DONE)
    answer = await ada.get("/horizon/v1/jobs/j-1/events", headers={"Last-Event-ID": "1"})
    assert (answer.status_code, answer.content) == (204, b"")


@pytest.mark.parametrize("given", ["-1", "one", "1.0", "\u0661", "9" * 19])
async def test_a_wrong_number_is_named(ada: httpx.AsyncClient, services: Any, make_job: Any, given: str) -> None:
    services.jobs.add(make_job(job_state=JobState.SUCCEEDED))
    answer = await ada.get("/horizon/v1/jobs/j-1/events", params={"after": given})
    assert answer.status_code == 400
    assert answer.json()["error"]["violations"][0]["field"] == "after"
    with pytest.raises(InvalidSpec, match="Last-Event-ID"):
        resume_after(given, None)


async def test_a_refusal_on_the_way_is_an_event(
    ada: httpx.AsyncClient, services: Any, make_job: Any, make_step: Any
) -> None:
    services.jobs.add(make_job())
    services.jobs.tell("j-1", make_step(1))
    services.jobs.fault = Draining("the daemon is shutting down")
    *_, step, last = _frames((await ada.get("/horizon/v1/jobs/j-1/events")).text)
    assert step["event"] == "step"
    assert last["event"] == "problem"
    assert json.loads(last["data"])["error"]["reason"] == "DRAINING"


async def test_a_silent_stream_beats_and_then_goes_on(make_step: Any) -> None:
    go_on = asyncio.Event()

    async def events() -> AsyncIterator[JobEvent]:
        await go_on.wait()
        yield JobEvent(job_id="j-1", sequence=4, time_s=1.0, payload=make_step(4))

    lines = event_lines(events(), asyncio.Event(), heartbeat_s=0.01)
    await anext(lines)
    assert await anext(lines) == b": heartbeat\n\n"
    assert await anext(lines) == b": heartbeat\n\n"
    go_on.set()
    rest = [line async for line in lines]
    assert [line for line in rest if line.startswith(b"id: 4\nevent: step\n")]
    assert rest[-1].startswith(b"event: end\n")


async def test_closing_ends_a_waiting_stream_and_its_watch(services: Any, make_job: Any, make_step: Any) -> None:
    closing = asyncio.Event()
    services.jobs.add(make_job())
    services.jobs.tell("j-1", make_step(1))
    principal = await services.accounts.authenticate("token-ada")
    lines = event_lines(services.jobs.watch(principal, "j-1"), closing)
    assert [(await anext(lines))[:5] for _ in range(2)] == [b"retry", b"id: 1"]
    closing.set()
    assert [line async for line in lines] == []
    await _settled(services)


async def test_a_client_that_goes_away_ends_the_watch(services: Any, make_job: Any, make_step: Any) -> None:
    services.jobs.add(make_job())
    services.jobs.tell("j-1", make_step(1), make_step(2))
    principal = await services.accounts.authenticate("token-ada")
    lines = event_lines(services.jobs.watch(principal, "j-1"), asyncio.Event())
    await anext(lines)
    await anext(lines)
    await asyncio.sleep(0)
    assert services.jobs.num_watching == 1
    await lines.aclose()  # type: ignore[attr-defined]
    await _settled(services)


async def _settled(services: Any) -> None:
    for _ in range(5):
        await asyncio.sleep(0)
    assert services.jobs.num_watching == 0

"""What a program may ask for at most below /api/v1."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from tests.component.api.tinker.conftest import Api

from horizon_server.api.tinker import futures, runs, service
from horizon_server.api.tinker.errors import MAX_REQUEST_BYTES
from horizon_server.errors import TooManyCalls
from horizon_server.services import sessions
from horizon_server.services.tinker import models, samples
from horizon_server.services.tinker.names import MAX_ID_CHARS, MAX_NAME_CHARS
from horizon_server.services.tinker.samples import WaitingSamples


async def test_only_the_newest_calls_can_be_sent_again(ann: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SEQUENCES", 3)
    model = await ann.model()
    first = [(await ann.step(model, number)).json() for number in range(1, 6)]
    assert len({answer["request_id"] for answer in first}) == 5
    assert [(await ann.step(model, number)).json() for number in (3, 4, 5)] == first[2:]
    refused = await ann.step(model, 2)
    assert (refused.status_code, refused.json()["category"]) == (400, "user")
    assert "the newest is 5" in refused.json()["error"]


async def test_a_large_request_is_refused(ann: Api) -> None:
    refused = await ann.post("create_session", tags=["x" * MAX_REQUEST_BYTES])
    assert (refused.status_code, refused.json()["code"]) == (413, "too_large")
    assert refused.headers["x-should-retry"] == "false"


async def test_a_long_id_is_refused(ann: Api) -> None:
    for length, status in ((MAX_ID_CHARS, 404), (MAX_ID_CHARS + 1, 400)):
        assert (await ann.post("retrieve_future", request_id="x" * length)).status_code == status


async def test_a_long_name_is_refused(ann: Api) -> None:
    model = await ann.model()
    for length, status in ((MAX_NAME_CHARS + 1, 400), (MAX_NAME_CHARS, 200)):
        answer = await ann.post("save_weights", model_id=model, seq_id=1, path="x" * length)
        assert answer.status_code == status, answer.text


async def test_lists_are_bounded(ann: Api, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("training_runs", "checkpoints", "sessions"):
        assert (await ann.ask("GET", path, params={"limit": runs.MAX_PAGE})).status_code == 200
        assert (await ann.ask("GET", path, params={"limit": runs.MAX_PAGE + 1})).status_code == 400
    made = [await ann.model(number) for number in range(3)]
    for number, model in enumerate(made):
        job = await ann.job(model)
        world.write_checkpoint(job, 1, {"model/config.json": b"{}"})
        world.services.jobs.folders.checkpoints(job.job_id).set_kept(1, kept=True, name=f"weights.{number}")
    monkeypatch.setattr(models, "MAX_RUNS", 2)
    found = (await ann.ask("GET", "training_runs")).json()
    assert [run["training_run_id"] for run in found["training_runs"]] == made[:0:-1]
    assert found["cursor"]["total_count"] == 2
    monkeypatch.setattr(models, "MAX_CHECKPOINTS", 1)
    found = (await ann.ask("GET", "checkpoints")).json()
    assert [one["tinker_path"] for one in found["checkpoints"]] == [f"tinker://{made[2]}/weights/2"]
    await world.daemon.model(world.principal("ann"), "other")
    for most in (2, 1):
        monkeypatch.setattr(service, "MAX_MODELS", most)
        assert len((await ann.ask("GET", "get_server_capabilities")).json()["supported_models"]) == most


async def test_unnamed_checkpoints_are_bounded(ann: Api, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "MAX_UNNAMED", 2)
    model = await ann.model()
    job = await ann.job(model)
    checkpoints = world.services.jobs.folders.checkpoints(job.job_id)
    for step in (1, 2, 3):
        world.write_checkpoint(job, step, {"model/config.json": b"{}"})
        checkpoints.set_kept(step, kept=True, name=f"unnamed.{step}")
    for step in (1, 3):
        world.services.tinker_models.asked(job, step)
    answer = await ann.post("save_weights_for_sampler", model_id=model, seq_id=1, sampling_session_seq_id=0)
    assert answer.status_code == 200, answer.text
    kept = {one.step: (one.kept, one.names) for one in checkpoints.all()}
    assert kept == {1: (True, ("unnamed.1",)), 2: (False, ()), 3: (True, ("unnamed.3",))}


async def test_a_wait_is_bounded(ann: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    assert futures.MAX_WAIT_S < 45, "after which the SDK gives up"
    monkeypatch.setattr(futures, "MAX_WAIT_S", 0.01)
    request_id = (await ann.step(await ann.model(), 1)).json()["request_id"]
    found = (await ann.post("retrieve_future", request_id=request_id)).json()
    assert (found["type"], found["queue_state"]) == ("try_again", "paused_capacity")


async def test_questions_that_wait_are_bounded(ann: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "MAX_WAITING", 2)
    request_id = (await ann.step(await ann.model(), 1)).json()["request_id"]
    waiting = [asyncio.create_task(ann.post("retrieve_future", request_id=request_id)) for _ in range(3)]
    done, left = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=240)
    (refused,) = [task.result() for task in done]
    assert (refused.status_code, len(left)) == (429, 2)
    assert refused.headers["x-should-retry"] == "true"
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


class Asked:
    """A user's samples, which are drawn when the test says so."""

    def __init__(self) -> None:
        self.samples, self.go = WaitingSamples(), asyncio.Event()

    def ask(self, key: str, *, num_bytes: int = 1, user: str = "ann") -> None:
        self.samples.ask(user, key, key, group="all", num_bytes=num_bytes, num_answers=1, draw=self._draw)

    async def _draw(self, requests: Sequence[Any]) -> list[bytes]:
        await self.go.wait()
        return [str(request).encode() for request in requests]


async def test_samples_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MAX_WAITING", 2)
    asked = Asked()
    for key in ("a", "b", "a"):
        asked.ask(key)
    with pytest.raises(TooManyCalls, match="2 samples of ann wait"):
        asked.ask("c")
    asked.ask("c", user="bob")
    monkeypatch.setattr(samples, "MAX_WAITING_BYTES", 100)
    asked.samples.cancel("ann", "b")
    with pytest.raises(TooManyCalls, match="100 bytes"):
        asked.ask("d", num_bytes=100)
    asked.ask("d", num_bytes=99)
    await asked.samples.close()


async def _kept(asked: Asked, keys: str) -> str:
    found = ""
    for key in keys:
        try:
            assert await asked.samples.result("ann", key, 60.0) == key.encode()
            found += key
        except KeyError:
            pass
    return found


@pytest.mark.parametrize(("limit", "most"), [("MAX_FINISHED", 2), ("MAX_FINISHED_BYTES", 2), ("MAX_KEPT_S", 0.0)])
async def test_samples_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch, limit: str, most: float) -> None:
    monkeypatch.setattr(samples, limit, most)
    asked = Asked()
    for key in "abc":
        asked.ask(key)
    asked.go.set()
    wanted = 0 if limit == "MAX_KEPT_S" else 2
    async with asyncio.timeout(240):
        while len(await _kept(asked, "abc")) != wanted:  # noqa: ASYNC110  # nothing announces it
            await asyncio.sleep(0.005)
    await asked.samples.close()


async def test_addresses_of_files_are_bounded(ann: Api, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MAX_DOWNLOADS", 1)
    model = await ann.model()
    job = await ann.job(model)
    world.write_checkpoint(job, 1, {"config.json": b"{}", "trainer/secret": b"moments"})
    world.services.jobs.folders.checkpoints(job.job_id).set_kept(1, kept=True, name="external.all")
    path = f"training_runs/{model}/checkpoints/external_weights/all/external_weights_urls"

    async def address() -> str:
        (url,) = (await ann.ask("GET", path)).json()["urls"].values()
        return str(url).rpartition("/api/v1/")[2]

    first = await address()
    ann.headers.clear()
    assert (await ann.ask("GET", first)).content == b"{}"
    ann.headers["X-API-Key"] = f"tml-{world.tokens['ann']}"
    second = await address()
    assert [(await ann.ask("GET", one)).status_code for one in (first, second)] == [404, 200]
    monkeypatch.setattr(runs, "MAX_DOWNLOAD_S", -1.0)
    assert (await ann.ask("GET", await address())).status_code == 404

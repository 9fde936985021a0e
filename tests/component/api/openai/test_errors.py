"""Every error below /v1 has OpenAI's shape, and the SDK raises the class for it; it repeats what may work again."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from openai import (
    APIStatusError,
    AsyncOpenAI,
    AuthenticationError,
    BadRequestError,
    ConflictError,
    InternalServerError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitError,
    UnprocessableEntityError,
)
from tests.component.api.openai.conftest import Connect

from horizon_server.api.openai.errors import MAX_REQUEST_BYTES
from horizon_server.db.sharing import SharingStore
from horizon_server.records.sharing import Allowance, Quota


async def create(client: AsyncOpenAI, world: Any, **horizon: Any) -> Any:
    return await client.fine_tuning.jobs.create(
        model=str(world.daemon.model_folder), training_file="chats", extra_body={"horizon": horizon}
    )


async def test_an_unknown_path_is_not_found(ann: AsyncOpenAI) -> None:
    with pytest.raises(NotFoundError, match="/v1/embeddings") as caught:
        await ann.embeddings.create(model="demo-model", input="x")
    assert (caught.value.type, caught.value.code) == ("invalid_request_error", "not_found")
    with pytest.raises(APIStatusError) as wrong:
        await ann.put("/models", cast_to=object)
    assert (wrong.value.status_code, wrong.value.type) == (405, "invalid_request_error")


async def test_a_wrong_key_is_not_accepted(connect: Connect, app: FastAPI) -> None:
    with pytest.raises(AuthenticationError) as caught:
        await connect("hzn_" + "x" * 43).models.list()
    assert (caught.value.type, caught.value.code) == ("invalid_request_error", "invalid_api_key")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://node") as client:
        answer = await client.get("/v1/models")
    assert answer.status_code == 401
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}


async def test_a_token_that_only_reads_may_look_and_not_change(connect: Connect, world: Any) -> None:
    _, secret = await world.services.accounts.create_token("ann", lifetime_s=None, scope="read")
    reader = connect(secret)
    assert (await reader.files.list()).data
    with pytest.raises(PermissionDeniedError, match="scope read") as caught:
        await create(reader, world)
    assert (caught.value.type, caught.value.code) == ("permission_error", "not_allowed")


@pytest.mark.parametrize("content", [b"no json", b"[]", b"", b'"\xff"', b"[" * 100_000])
async def test_a_body_that_cannot_be_read_is_refused(ann: AsyncOpenAI, content: bytes) -> None:
    with pytest.raises(BadRequestError) as caught:
        await ann.post("/fine_tuning/jobs", content=content, cast_to=object)
    assert caught.value.type == "invalid_request_error"


async def test_bodies_are_bounded(ann: AsyncOpenAI) -> None:
    body = {"model": "m", "training_file": "x" * MAX_REQUEST_BYTES}
    with pytest.raises(APIStatusError, match="larger than") as caught:
        await ann.post("/fine_tuning/jobs", body=body, cast_to=object)
    assert (caught.value.status_code, caught.value.code) == (413, "too_large")


async def test_what_the_state_of_a_job_does_not_allow_is_a_conflict(ann: AsyncOpenAI, world: Any) -> None:
    job = await create(ann, world)
    began_s = time.monotonic()
    with pytest.raises(ConflictError, match="only a PAUSED or FAILED job") as caught:
        await ann.with_options(max_retries=5).fine_tuning.jobs.resume(job.id)
    assert caught.value.code == "wrong_job_state"
    assert time.monotonic() - began_s < 10, "the SDK is told not to repeat it"


async def test_a_job_that_does_not_fit_is_refused_with_the_numbers(ann: AsyncOpenAI, world: Any) -> None:
    with pytest.raises(UnprocessableEntityError, match="GiB") as caught:
        await create(ann, world, train={"tokens_per_step": 60_000_000})
    assert caught.value.code == "does_not_fit"


async def test_a_quota_is_told_apart_from_a_rate(ann: AsyncOpenAI, world: Any) -> None:
    allowance = Allowance(holder="user", name="ann", quota=Quota(max_queued_jobs=0))
    await SharingStore(world.daemon.database).set_allowance(allowance)
    with pytest.raises(PermissionDeniedError) as caught:
        await create(ann, world)
    assert caught.value.code == "insufficient_quota"


async def test_who_calls_too_often_is_told_when_to_call_again(
    connect: Connect, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rate, refused = world.services.limits._calls, [True, True]
    monkeypatch.setattr(type(rate), "reserve", lambda self, *_: None if self is rate and refused.pop() else 0.0)
    with pytest.raises(RateLimitError) as caught:
        await connect("ann").models.list()
    assert (caught.value.type, caught.value.code) == ("rate_limit_error", "rate_limit_exceeded")
    assert int(caught.value.response.headers["retry-after"]) >= 1
    refused[:] = [False, True]
    # The SDK waits as long as it is told to, and calls again.
    began_s = time.monotonic()
    await connect("ann", max_retries=1).models.list()
    assert time.monotonic() - began_s >= 1
    assert refused == []


async def test_a_daemon_that_shuts_down_is_asked_again(ann: AsyncOpenAI, world: Any) -> None:
    world.daemon.parts.lifecycle.drain()
    with pytest.raises(InternalServerError, match="shutting down") as caught:
        await create(ann, world)
    assert (caught.value.status_code, caught.value.type, caught.value.code) == (503, "server_error", "draining")
    assert caught.value.response.headers["x-should-retry"] == "true"


async def test_a_bug_shows_nothing_of_the_inside(ann: AsyncOpenAI, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(world.services.jobs, "get", broken)
    with pytest.raises(InternalServerError, match="its log says what") as caught:
        await ann.fine_tuning.jobs.retrieve("job_1")
    assert (caught.value.type, caught.value.code) == ("server_error", "internal")
    assert caught.value.response.headers["x-should-retry"] == "false"

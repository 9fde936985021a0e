"""The real app over a real daemon whose queue does not run, and who calls it as Tinker's SDK does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from fastapi import FastAPI
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types import ForwardBackwardInput, ForwardBackwardRequest
from tinker.types.datum import Datum

from horizon_server.api.http.server import make_app
from horizon_server.records.job import JobRecord


class Api:
    """One user's calls."""

    def __init__(self, world: Any, client: httpx.AsyncClient, user: str) -> None:
        self._world, self._client, self._user = world, client, user
        self.headers = {"X-API-Key": f"tml-{world.tokens[user]}"}
        self.session = ""

    async def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Make a call."""
        headers = {**self.headers, **options.pop("headers", {})}
        return await self._client.request(method, f"/api/v1/{path}", headers=headers, **options)

    async def post(self, call: str, /, **body: Any) -> httpx.Response:
        """Make a call with a body of JSON."""
        return await self.ask("POST", call, json=body)

    async def model(self, number: int = 0, **body: Any) -> str:
        """Return the id of a new model, in a session of the user's own."""
        if not self.session:
            self.session = (await self.post("create_session")).json()["session_id"]
        given = {"session_id": self.session, "model_seq_id": number, "base_model": "tiny", **body}
        answer = await self.post("create_model", **given)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["model_id"])

    async def job(self, model_id: str) -> JobRecord:
        """Return the job that a model is."""
        principal = await self._world.caller(self._user)
        found: JobRecord = await self._world.services.tinker_models.find(principal, model_id)
        return found

    async def forward_backward(self, model_id: str, batch: list[Datum], seq_id: int = 1) -> httpx.Response:
        """Send documents."""
        inputs = ForwardBackwardInput(data=batch, loss_fn="cross_entropy")
        request = ForwardBackwardRequest(forward_backward_input=inputs, model_id=model_id, seq_id=seq_id)
        content = forward_backward_request_to_proto(request).SerializeToString()
        headers = {"Content-Type": "application/x-protobuf"}
        return await self.ask("POST", "forward_backward", content=content, headers=headers)

    async def step(self, model_id: str, seq_id: int) -> httpx.Response:
        """Send a step of the optimizer."""
        return await self.post("optim_step", model_id=model_id, seq_id=seq_id, adam_params={"learning_rate": 0.1})


@pytest_asyncio.fixture
async def world(base_world: Any) -> Any:
    await base_world.daemon.model(base_world.principal("ann"), "tiny")
    return base_world


@pytest.fixture
def app(world: Any) -> FastAPI:
    return make_app(world.services, world.metrics, metrics_open=True, ready=lambda: None)


@pytest_asyncio.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://node", timeout=120) as made:
        yield made


@pytest.fixture
def ann(world: Any, client: httpx.AsyncClient) -> Api:
    return Api(world, client, "ann")


@pytest.fixture
def bob(world: Any, client: httpx.AsyncClient) -> Api:
    return Api(world, client, "bob")


@pytest.fixture
def eve(world: Any, client: httpx.AsyncClient) -> Api:
    """A viewer of the node."""
    return Api(world, client, "eve")

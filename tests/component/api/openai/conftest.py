"""The real app over a real daemon whose queue does not run, and OpenAI's SDK connected to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from openai import AsyncOpenAI

from horizon_server.api.http.server import make_app

Connect = Callable[..., AsyncOpenAI]


@pytest.fixture
def state(state_with_chats: Any) -> Any:
    return state_with_chats


@pytest.fixture
def world(base_world: Any) -> Any:
    return base_world


@pytest.fixture
def app(world: Any) -> FastAPI:
    return make_app(world.services, world.metrics, metrics_open=True, ready=lambda: None)


@pytest.fixture
async def connect(app: FastAPI, world: Any) -> AsyncIterator[Connect]:
    """Make clients with a user's token, or with any other key. They repeat nothing unless they are told to."""
    async with AsyncExitStack() as stack:

        def make(user: str = "ann", *, max_retries: int = 0) -> AsyncOpenAI:
            transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
            http_client = httpx2.AsyncClient(transport=transport)
            stack.push_async_callback(http_client.aclose)
            return AsyncOpenAI(
                base_url="http://node/v1",
                api_key=world.tokens.get(user, user),
                http_client=http_client,
                max_retries=max_retries,
            )

        yield make


@pytest.fixture
def ann(connect: Connect) -> AsyncOpenAI:
    return connect("ann")

"""The real app over a real daemon, and clients with the users' tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from horizon_server.api.http.server import make_app


@pytest.fixture
def state(state_with_chats: Any) -> Any:
    return state_with_chats


@pytest.fixture
def world(base_world: Any) -> Any:
    return base_world


@pytest.fixture
def readiness() -> list[str]:
    """Reasons why the daemon is not ready; the first one is given."""
    return []


@pytest.fixture
def app(world: Any, readiness: list[str]) -> FastAPI:
    return make_app(
        world.services,
        world.metrics,
        metrics_open=True,
        version="9.9",
        ready=lambda: readiness[0] if readiness else None,
    )


Connect = Callable[..., httpx.AsyncClient]


@pytest.fixture
async def connect(app: FastAPI, world: Any) -> AsyncIterator[Connect]:
    """Make clients of the app, or of another; without a token unless a user is named."""
    clients: list[httpx.AsyncClient] = []

    def make(user: str | None = None, other: FastAPI | None = None) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app=other or app, raise_app_exceptions=False)
        headers = {"Authorization": f"Bearer {world.tokens.get(user, user)}"} if user else {}
        clients.append(httpx.AsyncClient(transport=transport, base_url="http://node", headers=headers))
        return clients[-1]

    yield make
    for client in clients:
        await client.aclose()


@pytest.fixture
def ann(connect: Connect) -> Iterator[httpx.AsyncClient]:
    yield connect("ann")

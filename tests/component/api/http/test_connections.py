"""Connections that never send a whole request, or are too many; an event stream counts as an open call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from horizon_server.api import limits
from horizon_server.api.http import connections
from horizon_server.api.http.connections import BoundedProtocol
from horizon_server.api.http.server import HttpServer, start_http_server

HALF = b"GET /version HTTP/1.1\r\nHost: x\r\nX-A: "


async def is_cut(reader: asyncio.StreamReader) -> bool:
    async with asyncio.timeout(240):
        try:
            return await reader.read() == b""
        except ConnectionError:
            return True


Connect = Callable[..., Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@pytest.fixture
async def connection(server: HttpServer) -> AsyncIterator[Connect]:
    """Make connections that have sent something."""
    writers: list[asyncio.StreamWriter] = []

    async def make(sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writers.append(writer)
        writer.write(sent)
        await writer.drain()
        return reader, writer

    yield make
    for writer in writers:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


@pytest.fixture
async def server(app: FastAPI) -> Any:
    server = await start_http_server(app, "127.0.0.1", 0)
    yield server
    await server.stop()


async def test_a_head_that_never_ends_is_cut(connection: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    complete = BoundedProtocol.on_response_complete

    def complete_and_be_short(protocol: BoundedProtocol) -> None:
        monkeypatch.setattr(connections, "HEAD_S", 0.3)
        complete(protocol)

    monkeypatch.setattr(BoundedProtocol, "on_response_complete", complete_and_be_short)
    # The head of a whole request has all the time that it may need.
    for first, head_s in ((b"", 0.3), (b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n", 60.0)):
        monkeypatch.setattr(connections, "HEAD_S", head_s)
        reader, writer = await connection(first)
        if first:
            async with asyncio.timeout(240):
                assert await reader.readuntil(b"}") != b""
        for _ in range(100):
            # It is not the silence that counts.
            writer.write(b"G")
            await asyncio.sleep(0.01)
            if reader.at_eof() or reader.exception():
                break
        assert await is_cut(reader)


async def test_a_connection_without_a_token_does_not_last(
    server: HttpServer, connection: Connect, world: Any, make_step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[BoundedProtocol] = []
    identified = BoundedProtocol.identified

    def noted(protocol: BoundedProtocol, user: str) -> None:
        identified(protocol, user)
        known.append(protocol)

    monkeypatch.setattr(BoundedProtocol, "identified", noted)
    with monkeypatch.context() as short:
        short.setattr(connections, "UNKNOWN_S", 0.2)
        reader, _ = await connection()
        assert await is_cut(reader)
    base_url, headers = f"http://127.0.0.1:{server.port}", {"Authorization": f"Bearer {world.tokens['ann']}"}
    async with httpx.AsyncClient(base_url=base_url, headers=headers) as client:
        job = await world.job()
        async with client.stream("GET", f"/horizon/v1/jobs/{job.job_id}/events") as answer:
            pieces = answer.aiter_text()
            await anext(pieces)
            # What its clock does when the time of those without a token is over.
            known[0]._end_if_unknown()
            await world.append(job, make_step(2))
            seen = ""
            while "id: 2" not in seen:
                seen += await anext(pieces)


async def test_an_address_has_few_connections_without_a_token_and_the_newest_are_kept(
    server: HttpServer, connection: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_UNKNOWN_PER_ADDRESS", 3)
    held = [await connection(HALF) for _ in range(6)]
    for reader, _ in held[:3]:
        assert await is_cut(reader)
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"http://127.0.0.1:{server.port}/version")).status_code == 200


async def test_there_is_a_maximum_of_connections(connection: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 2)
    for _ in range(2):
        await connection(HALF)
    reader, _ = await connection(HALF)
    assert await is_cut(reader)


async def test_event_streams_count_as_open_calls(
    server: HttpServer, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_CALLS_PER_USER", 1)
    job = await world.job()
    base_url, headers = f"http://127.0.0.1:{server.port}", {"Authorization": f"Bearer {world.tokens['ann']}"}
    async with httpx.AsyncClient(base_url=base_url, headers=headers) as client:
        async with client.stream("GET", f"/horizon/v1/jobs/{job.job_id}/events") as answer:
            texts = answer.aiter_text()  # kept: a generator that is collected ends the stream
            await anext(texts)
            refused = await client.get("/horizon/v1/node")
            assert (refused.status_code, refused.headers.get("retry-after")) == (429, "1"), refused.text
            assert refused.json()["error"]["reason"] == "TOO_MANY_CALLS"
        async with asyncio.timeout(240):
            while (await client.get("/horizon/v1/node")).status_code != 200:  # noqa: ASYNC110  # the server learns of it through the network
                await asyncio.sleep(0.01)


async def test_wrong_tokens_are_limited(server: HttpServer, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for rate in (world.services.logins._failures, world.services.logins._all_failures):
        monkeypatch.setattr(rate, "_clock", lambda: 1000.0)  # with time, an address may fail again
    codes = []
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
        for _ in range(30):
            answer = await client.get("/horizon/v1/node", headers={"Authorization": "Bearer hzn_wrong"})
            codes.append(answer.status_code)
    assert codes[0] == 401
    assert codes[-1] == 429
    assert answer.headers["retry-after"] == "2"

"""The embedded server: real sockets, prompt shutdown, signals left alone."""

from __future__ import annotations

import asyncio
import logging
import signal
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from horizon_server.api.http.server import start_http_server
from horizon_server.api.services import OpenStreams
from horizon_server.errors import BadSetting
from horizon_server.network import own_certificate


async def test_it_serves_and_stops(app: FastAPI) -> None:
    before = signal.getsignal(signal.SIGTERM)
    server = await start_http_server(app, "127.0.0.1", 0)
    assert signal.getsignal(signal.SIGTERM) is before
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
        answer = await client.get("/healthz")
        assert answer.json() == {"status": "ok"}
        assert "server" not in answer.headers
    await server.stop()
    await server.stop()
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(f"http://127.0.0.1:{server.port}/healthz")


async def test_open_event_streams_do_not_hold_up_the_shutdown_and_leave_no_traceback(
    app: FastAPI, world: Any, make_step: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await world.job()
    # Without end: a stop that waits for a stream would be cut off only by this test's guard.
    monkeypatch.setattr("horizon_server.api.http.server._GRACE_S", 3600)
    server = await start_http_server(app, "127.0.0.1", 0)
    base_url, headers = f"http://127.0.0.1:{server.port}", {"Authorization": f"Bearer {world.tokens['ann']}"}
    path = f"/horizon/v1/jobs/{job.job_id}/events"
    with caplog.at_level(logging.INFO):
        async with httpx.AsyncClient(base_url=base_url, headers=headers) as gone, gone.stream("GET", path) as answer:
            await anext(answer.aiter_text())
        async with (
            httpx.AsyncClient(base_url=base_url, headers=headers) as client,
            client.stream("GET", path) as answer,
        ):
            pieces = answer.aiter_text()
            seen = ""
            while "id: 1" not in seen:
                seen += await anext(pieces)
            await world.append(job, make_step(2))
            while "id: 2" not in seen:
                seen += await anext(pieces)
            async with asyncio.timeout(240):
                await server.stop()
            rest = "".join([piece async for piece in pieces])
            assert "event: problem" in rest
            assert "DRAINING" in rest
    assert world.num_watching(job) == 0
    assert [record for record in caplog.records if record.exc_info or record.levelno >= logging.WARNING] == []


async def test_a_request_that_hangs_holds_up_the_shutdown_no_longer_than_its_grace(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horizon_server.api.http.server._GRACE_S", 1)
    app, begun = FastAPI(), asyncio.Event()
    app.state.streams = OpenStreams(world.services.accounts)

    @app.get("/hangs")
    async def hang() -> None:
        begun.set()
        await asyncio.Event().wait()

    server = await start_http_server(app, "127.0.0.1", 0)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=240) as client:
        asked = asyncio.ensure_future(client.get("/hangs"))
        await asyncio.wait_for(begun.wait(), 240)
        await asyncio.wait_for(server.stop(), 240)
        await asyncio.wait([asked], timeout=240)
    assert asked.done()
    assert asked.exception() is not None or asked.result().status_code >= 500


async def test_a_taken_port_is_named(app: FastAPI) -> None:
    server = await start_http_server(app, "127.0.0.1", 0)
    try:
        with pytest.raises(BadSetting, match=rf"cannot listen on 127\.0\.0\.1:{server.port}.*--http"):
            await start_http_server(app, "127.0.0.1", server.port)
    finally:
        await server.stop()


async def test_it_speaks_tls(app: FastAPI, tmp_path: Path) -> None:
    files = own_certificate(tmp_path, ())
    assert files.authority is not None
    server = await start_http_server(app, "127.0.0.1", 0, files)
    trust = ssl.create_default_context(cafile=str(files.authority))
    try:
        async with httpx.AsyncClient(verify=trust) as client:
            assert (await client.get(f"https://127.0.0.1:{server.port}/version")).status_code == 200
    finally:
        await server.stop()

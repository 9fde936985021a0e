"""Serves the app with uvicorn inside the daemon's event loop; the daemon keeps its signals to itself."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from horizon_server.errors import BadSetting
from horizon_server.network import ServerCertificate

_GRACE_S = 5


class HttpServer:
    """A running server. `port` is the real one, also when 0 was asked for."""

    def __init__(self, app: FastAPI, server: uvicorn.Server, serving: asyncio.Task[None], port: int) -> None:
        self.port = port
        self._app = app
        self._server = server
        self._serving = serving

    async def stop(self) -> None:
        """End the event streams, let other requests finish for a few seconds, and close. May be called twice."""
        self._app.state.streams.end()
        self._server.should_exit = True
        await self._serving


async def start_http_server(app: FastAPI, host: str, port: int, tls: ServerCertificate | None = None) -> HttpServer:
    """Bind and serve, without TLS when `tls` is None.

    Raises:
        BadSetting: when the address cannot be bound.
    """
    listener = _bind(host, port)
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,  # the metrics count requests, and a log would hold every path that was tried
        server_header=False,
        timeout_graceful_shutdown=_GRACE_S,
        ssl_certfile=tls.certificate if tls else None,
        ssl_keyfile=tls.key if tls else None,
    )
    server = _EmbeddedServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="http-server")
    listening = asyncio.create_task(server.listening.wait())
    await asyncio.wait({serving, listening}, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        listening.cancel()
        listener.close()
        serving.result()
    return HttpServer(app, server, serving, listener.getsockname()[1])


class _EmbeddedServer(uvicorn.Server):
    """uvicorn without its signal handlers, which would replace the daemon's."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.listening.set()


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise BadSetting(f"http: {host}:{port} is not a valid listen address: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise BadSetting(
            f"http: cannot listen on {host}:{port}: {error.strerror or error}; choose another HOST:PORT with --http"
        ) from error
    return listener

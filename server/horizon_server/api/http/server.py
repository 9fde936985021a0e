"""REST, the web page and /metrics as one FastAPI app, served by uvicorn inside the daemon's event loop.

The services decide who may see and change what.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, Response

from horizon_server.api.http import changes, routes
from horizon_server.api.http.bodies import ReadyBody, VersionBody
from horizon_server.api.http.connections import ACCEPTED_AT_ONCE, BACKLOG, KEEP_ALIVE_S, BoundedProtocol, Bounds
from horizon_server.api.http.live import LivePages
from horizon_server.api.http.middleware import EXCEPTION_HANDLERS, RequestMiddleware, scraper, scraper_or_nobody
from horizon_server.api.http.series import SeriesOfJobs
from horizon_server.api.http.web_page import add_web_page
from horizon_server.api.openai.errors import OPENAI
from horizon_server.api.openai.router import router as openai_router
from horizon_server.api.services import OpenStreams, Services
from horizon_server.api.tinker.errors import TINKER
from horizon_server.api.tinker.router import router as tinker_router
from horizon_server.network import Address, ServerCertificate, bound_socket
from horizon_server.records.account import Principal
from horizon_server.services.access import may_see_series
from horizon_server.telemetry.metrics import Metrics
from horizon_server.version import VERSION

_GRACE_S = 5


def make_app(
    services: Services, metrics: Metrics, *, metrics_open: bool, version: str = VERSION, ready: Callable[[], str | None]
) -> FastAPI:
    """Return the app.

    Args:
        metrics_open: /metrics answers without a token too, without the series of jobs, users and projects.
        ready: returns why the daemon takes no work, or None.
    """
    app = FastAPI(
        title="horizon",
        version=version,
        description="Jobs, checkpoints and the queue of a horizon daemon: what they are, and changes of them. Contents "
        "are pushed and pulled, and accounts are managed, through gRPC, with the horizon command.",
        docs_url=None,  # these pages load scripts from other sites
        redoc_url=None,
        openapi_url="/openapi.json",
        redirect_slashes=False,  # a path with a slash too many is not found, like any other wrong one
        exception_handlers={**EXCEPTION_HANDLERS},
    )
    app.state.services = services
    app.state.streams = OpenStreams(services.accounts)
    app.state.series = SeriesOfJobs()
    app.state.live = LivePages(services, app.state.streams)
    app.state.dialects = (OPENAI, TINKER)
    app.state.tinker_downloads, app.state.tinker_waiting = {}, Counter()
    app.add_middleware(RequestMiddleware, on_http=metrics.on_http)
    _add_open_routes(app, metrics, ready, scraper_or_nobody if metrics_open else scraper)
    add_web_page(app)
    app.include_router(changes.router)
    app.include_router(routes.router)
    app.include_router(openai_router)
    app.include_router(tinker_router)
    return app


def _add_open_routes(
    app: FastAPI, metrics: Metrics, ready: Callable[[], str | None], scraping: Callable[..., Any]
) -> None:
    """Add what needs no token: probes and load balancers have none, and these answers show nothing of the daemon's
    work."""
    exposition: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Say that the process answers."""
        return {"status": "ok"}

    @app.get("/readyz", responses={503: {"model": ReadyBody}})
    async def readyz(response: Response) -> ReadyBody:
        """Say whether the daemon takes work; 503 and why not while it starts or drains."""
        why_not = ready()
        if why_not is not None:
            response.status_code = 503
        return ReadyBody(ready=why_not is None, message=why_not or "")

    @app.get("/metrics", response_class=Response, responses=exposition)
    async def show_metrics(principal: Principal | None = Depends(scraping)) -> Response:  # noqa: B008  # FastAPI's way; which one is known only here
        """Show the metrics for Prometheus. Of jobs, users and projects only what the caller may see."""
        body, content_type = metrics.render(lambda labels, owners: may_see_series(principal, labels, owners))
        return Response(body, headers={"Content-Type": content_type})

    @app.get("/version")
    async def show_version() -> VersionBody:
        """Show the daemon's version."""
        return VersionBody(version=app.version)


class HttpServer(uvicorn.Server):
    """uvicorn inside the daemon's event loop. `port` is the real one, also when 0 was asked for."""

    def __init__(self, config: uvicorn.Config, streams: OpenStreams, bounds: Bounds, port: int) -> None:
        super().__init__(config)
        self.port = port
        self._watching = asyncio.create_task(bounds.watched.run(port), name="http-connections")
        self.listening = asyncio.Event()
        self.serving: asyncio.Task[None] | None = None
        self._streams = streams

    async def stop(self) -> None:
        """End the event streams, let other requests finish for a few seconds, and close. May be called twice."""
        self._streams.end()
        self.should_exit = True
        self._watching.cancel()
        if self.serving is not None:
            await self.serving

    async def load_certificate(self, tls: ServerCertificate) -> None:
        """Serve new connections with the certificate as its files are now. Raises OSError."""
        assert self.config.ssl is not None
        # Not in a thread: handshakes begin on the event loop, and must not do so while the context is changed.
        self.config.ssl.load_cert_chain(tls.certificate, tls.key)

    # uvicorn's handlers would replace the daemon's, which drains before it ends.
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the daemon."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, and report it."""
        await super().startup(sockets=sockets)
        # asyncio accepts as many at once as it lets wait: two bounds that must not be the same.
        for listener in sockets or ():
            listener.listen(BACKLOG)
        self.listening.set()


async def start_http_server(app: FastAPI, host: str, port: int, tls: ServerCertificate | None = None) -> HttpServer:
    """Bind and serve, without TLS when `tls` is None.

    Raises:
        BadSetting: when the address cannot be bound.
    """
    # Here rather than by uvicorn, which would end the whole process when it cannot.
    listener = bound_socket("http", Address(host=host, port=port))
    bounds = Bounds()
    config = uvicorn.Config(
        app,
        http=partial(BoundedProtocol, bounds=bounds),  # type: ignore[arg-type]  # called as a class is
        backlog=ACCEPTED_AT_ONCE,
        timeout_keep_alive=KEEP_ALIVE_S,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,  # the metrics count requests, and a log would hold every path that was tried
        server_header=False,
        timeout_graceful_shutdown=_GRACE_S,
        ssl_certfile=tls.certificate if tls else None,
        ssl_keyfile=tls.key if tls else None,
        ssl_ca_certs=str(tls.client_authority) if tls and tls.client_authority else None,
        ssl_cert_reqs=ssl.CERT_REQUIRED if tls and tls.client_authority else ssl.CERT_NONE,
    )
    server = HttpServer(config, app.state.streams, bounds, listener.getsockname()[1])
    server.serving = serving = asyncio.create_task(server.serve(sockets=[listener]), name="http-server")
    listening = asyncio.create_task(server.listening.wait())
    # Both: a server that cannot start ends without ever listening.
    await asyncio.wait({serving, listening}, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        listening.cancel()
        listener.close()
        serving.result()
    return server

"""What surrounds every request: its duration in the metrics, a bound on its body, and the security headers on its answer."""

from __future__ import annotations

import time
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from horizon_server.api.http.headers import SECURITY_HEADERS
from horizon_server.api.http.problems import error_response
from horizon_server.errors import TooLarge

MAX_BODY_BYTES = 64 * 1024
"""REST only reads; whoever sends more is mistaken or hostile."""

OnHttp = Callable[[str, str, int, float], None]


class Edge:
    """ASGI middleware around the whole app."""

    def __init__(self, app: ASGIApp, *, on_http: OnHttp) -> None:
        self._app = app
        self._on_http = on_http

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.perf_counter()
        code = 500  # what a bug becomes further out

        async def send_with_headers(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            if _announced_bytes(scope) > MAX_BODY_BYTES:
                await error_response(_too_large())(scope, receive, send_with_headers)
            else:
                await self._app(scope, _bounded(receive), send_with_headers)
        finally:
            self._on_http(scope["method"], route_of(scope), code, time.perf_counter() - started_s)


def route_of(scope: Scope) -> str:
    """Return the template of the route that served the request; paths that none did share one name."""
    return getattr(scope.get("route"), "path", None) or "unmatched"


def _announced_bytes(scope: Scope) -> int:
    given = Headers(scope=scope).get("content-length", "0")
    return int(given) if given.isascii() and given.isdigit() and len(given) < 20 else MAX_BODY_BYTES + 1


def _bounded(receive: Receive) -> Receive:
    received_bytes = 0

    async def receive_bounded() -> Message:
        nonlocal received_bytes
        message = await receive()
        received_bytes += len(message.get("body", b""))
        if received_bytes > MAX_BODY_BYTES:
            raise _too_large()
        return message

    return receive_bounded


def _too_large() -> TooLarge:
    return TooLarge(
        f"the request body is larger than {MAX_BODY_BYTES} bytes; REST only reads, data is pushed through gRPC"
    )

"""Who calls, and what surrounds every request: its duration in the metrics, a bound on its body, the security headers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, cast

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from horizon_server.api.http.problems import SECURITY_HEADERS, error_response
from horizon_server.api.services import Services as AllServices
from horizon_server.errors import TooLarge, Unauthenticated
from horizon_server.records.account import Principal

MAX_BODY_BYTES = 64 * 1024
"""REST only reads; a request with more than this is a mistake or an attack."""

_bearer = HTTPBearer(auto_error=False, description="A token from `horizond token create USER`.")


def services_of(request: Request) -> AllServices:
    """Return the services that the app was made with."""
    return cast(AllServices, request.app.state.services)


async def authenticated(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> Principal:
    """Return the caller.

    Raises:
        Unauthenticated: without a token, or with one that is wrong, expired or revoked.
    """
    # auto_error is off since FastAPI's own refusal is not in the shape of our errors.
    if credentials is None:
        raise Unauthenticated(
            "send the header 'Authorization: Bearer TOKEN'; 'horizond token create USER' makes a token"
        )
    services = services_of(request)
    try:
        return await services.accounts.authenticate(credentials.credentials)
    except Unauthenticated:
        services.refused_tokens.add(request.client.host if request.client else "an unknown address")
        raise


Caller = Annotated[Principal, Depends(authenticated)]
Services = Annotated[AllServices, Depends(services_of)]


class RequestMiddleware:
    """ASGI middleware around the whole app."""

    def __init__(self, app: ASGIApp, *, on_http: Callable[[str, str, int, float], None]) -> None:
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
            given = Headers(scope=scope).get("content-length", "0")
            is_number = given.isascii() and given.isdigit() and len(given) < 20
            if not is_number or int(given) > MAX_BODY_BYTES:
                await error_response(_too_large())(scope, receive, send_with_headers)
            else:
                await self._app(scope, _bounded(receive), send_with_headers)
        finally:
            # The template of the route, so that paths that were tried at random share one series.
            route = getattr(scope.get("route"), "path", None) or "unmatched"
            self._on_http(scope["method"], route, code, time.perf_counter() - started_s)


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

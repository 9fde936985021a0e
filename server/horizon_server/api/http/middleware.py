"""What surrounds every request: who calls, its duration in the metrics, a bound on its body, and one shape for every
error.

An error's code is from the one table of errors; an answer shows nothing of the daemon's insides.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from http import HTTPStatus
from typing import Annotated, Any, cast

from fastapi import Depends, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from horizon_server.api.http.bodies import ErrorBody, ErrorDetail, ViolationBody
from horizon_server.api.http.connections import SCOPE_KEY
from horizon_server.api.services import Services as AllServices
from horizon_server.errors import FieldViolation, HorizonError, InvalidSpec, TooLarge, Unauthenticated
from horizon_server.records.account import Principal
from horizon_server.services.access import require_scope

# A job spec is the largest that a request carries; contents are pushed through gRPC.
MAX_BODY_BYTES = 64 * 1024

# A route that sets one of them itself wins: the page has a policy of its own.
SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}
_LONGEST_INPUT = 80
_OPEN_CALLS = "horizon.open_calls"

_bearer = HTTPBearer(auto_error=False, description="A token from `horizond token create USER`.")


def services_of(request: Request) -> AllServices:
    """Return the services that the app was made with."""
    return cast(AllServices, request.app.state.services)


Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]


async def admitted(request: Request, credentials: Credentials, *, is_change: bool = False) -> Principal:
    """Return the caller when it is their turn; the call counts as open until it is answered.

    Raises:
        Unauthenticated: without a token, or with one that is wrong, expired or revoked.
        TooManyCalls: when the user makes too many calls, or changes.
    """
    if credentials is None:
        raise Unauthenticated(
            "send the header 'Authorization: Bearer TOKEN'; 'horizond token create USER' creates a token"
        )
    services = services_of(request)
    peer = request.client.host if request.client else "an unknown address"
    # Until the answer is sent: an event stream is an open call too.
    open_calls: AsyncExitStack = request.scope[_OPEN_CALLS]
    principal = await open_calls.enter_async_context(
        services.logins.admitted(credentials.credentials, peer, is_change=is_change)
    )
    connection = request.scope.get(SCOPE_KEY)
    if connection is not None:
        connection.identified(principal.name)
    return principal


async def scraper(request: Request, credentials: Credentials) -> Principal:
    """Return who may read /metrics: any caller, with a token of any scope. Raises as `admitted`."""
    principal = await admitted(request, credentials)
    require_scope(principal, "metrics")
    return principal


async def scraper_or_nobody(request: Request, credentials: Credentials) -> Principal | None:
    """Return who reads /metrics, or None for a caller without a token. Raises as `scraper` for a wrong one."""
    return None if "Authorization" not in request.headers else await scraper(request, credentials)


async def authenticated(request: Request, credentials: Credentials) -> Principal:
    """Return the caller of a route that changes nothing.

    Raises:
        Unauthenticated, TooManyCalls: as `admitted`.
        NotAllowed: with a token that is for /metrics only.
    """
    principal = await admitted(request, credentials)
    require_scope(principal, "read")
    return principal


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
        received_bytes = 0

        async def receive_bounded() -> Message:
            nonlocal received_bytes
            message = await receive()
            received_bytes += len(message.get("body", b""))
            if received_bytes > MAX_BODY_BYTES:  # of a chunked body, which announces no length
                raise _too_large()
            return message

        async def send_with_headers(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            async with AsyncExitStack() as open_calls:
                scope[_OPEN_CALLS] = open_calls
                await self._answer(scope, receive_bounded, send_with_headers)
        finally:
            # The template of the route, so that paths that were tried at random share one series.
            route = getattr(scope.get("route"), "path", None) or "unmatched"
            self._on_http(scope["method"], route, code, time.perf_counter() - started_s)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get("content-length", "0")
        is_number = given.isascii() and given.isdigit() and len(given) < 20
        if not is_number or int(given) > MAX_BODY_BYTES:
            await error_response(_too_large())(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _too_large() -> TooLarge:
    return TooLarge(
        f"the request body is larger than {MAX_BODY_BYTES} bytes; data is pushed with the horizon command, or gRPC"
    )


def error_body(error: HorizonError) -> ErrorBody:
    """Return the body of a domain error."""
    violations = [ViolationBody(field=v.field, description=v.description) for v in error.violations]
    return ErrorBody(error=ErrorDetail(reason=error.reason, message=error.message, violations=violations))


def error_response(error: HorizonError) -> JSONResponse:
    """Return the answer to a domain error."""
    headers: dict[str, str] = {}
    status = error.status.http
    if status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    return _response(status, error_body(error), headers)


async def _on_domain_error(_request: Request, error: HorizonError) -> JSONResponse:
    return error_response(error)


async def _on_malformed(_request: Request, error: RequestValidationError) -> JSONResponse:
    violations = []
    for problem in error.errors():
        name = ".".join(str(part) for part in problem.get("loc", ())[1:]) or "request"
        given = problem.get("input")
        # FastAPI's own answer echoes the input, which may be binary, huge or secret.
        is_short = isinstance(given, str) and given.isprintable() and len(given) <= _LONGEST_INPUT
        shown = f" is {given!r}" if is_short else ""
        # pydantic says which Python type it wants; a caller wants to know what to write.
        is_number = problem.get("type") == "int_parsing"
        rule = "it must be a whole number" if is_number else problem.get("msg", "it is not valid")
        violations.append(FieldViolation(field=name, description=f"{name}{shown}: {rule}"))
    refused = InvalidSpec(violations[0].description, violations=violations)
    return _response(HTTPStatus.UNPROCESSABLE_ENTITY, error_body(refused))


async def _on_http(request: Request, error: HTTPException) -> JSONResponse:
    status = error.status_code
    if status == HTTPStatus.NOT_FOUND:
        message = f"there is no {request.url.path!r:.200} here; GET /openapi.json lists what there is"
    elif status == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"{request.method:.20} is not possible here; GET /openapi.json lists what is"
    else:
        message = str(error.detail)
    detail = ErrorDetail(reason=HTTPStatus(status).name, message=message)
    return _response(status, ErrorBody(error=detail), error.headers)


async def _on_bug(_request: Request, _error: Exception) -> JSONResponse:
    body = error_body(HorizonError("something went wrong inside the daemon; its log says what"))
    # Starlette answers a bug outside all middleware.
    return _response(HTTPStatus.INTERNAL_SERVER_ERROR, body, SECURITY_HEADERS)


def _response(status: int, body: ErrorBody, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(body.model_dump(), status_code=status, headers=dict(headers or {}))


EXCEPTION_HANDLERS: Mapping[Any, Callable[[Request, Any], Any]] = {
    HorizonError: _on_domain_error,
    RequestValidationError: _on_malformed,
    HTTPException: _on_http,
    Exception: _on_bug,
}

"""What surrounds every request: who calls, its duration in the metrics, a bound on its body, and one shape for every
error. Below the paths of another API both are that API's own.

An error's code is from the one table of errors; an answer shows nothing of the daemon's insides.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
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
LONGEST_INPUT = 80
"""Of a refused value that an error message shows."""
_OPEN_CALLS = "horizon.open_calls"

_bearer = HTTPBearer(auto_error=False, description="A token from `horizond token create USER`.")


def services_of(request: Request) -> AllServices:
    """Return the services that the app was made with."""
    return cast(AllServices, request.app.state.services)


def until_answered(request: Request) -> AsyncExitStack:
    """Return what is left when the whole answer to a request has been sent."""
    stack: AsyncExitStack = request.scope[_OPEN_CALLS]
    return stack


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
    # An event stream is an open call too.
    principal = await until_answered(request).enter_async_context(
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


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How requests are answered below a path where another API than the daemon's own is spoken."""

    prefix: str
    """Of its paths, such as /v1/."""
    max_body_bytes: Callable[[str], int]
    """Of a request to that path."""
    error: Callable[[int, ErrorDetail, Mapping[str, str]], JSONResponse]
    """Makes the answer to a failed request: of its status, of what is wrong, and with these headers."""


def _own_error(status: int, detail: ErrorDetail, headers: Mapping[str, str]) -> JSONResponse:
    return JSONResponse(ErrorBody(error=detail).model_dump(), status_code=status, headers=dict(headers))


_OWN = Dialect(prefix="/", max_body_bytes=lambda _path: MAX_BODY_BYTES, error=_own_error)


def _dialect_of(scope: Scope) -> Dialect:
    """Return how a request is answered: as one of the dialects of `app.state.dialects`, or as the daemon's own."""
    dialects: tuple[Dialect, ...] = scope["app"].state.dialects
    return next((dialect for dialect in dialects if scope["path"].startswith(dialect.prefix)), _OWN)


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
        max_bytes = _dialect_of(scope).max_body_bytes(scope["path"])
        code = 500  # what a bug becomes further out
        received_bytes = 0

        async def receive_bounded() -> Message:
            nonlocal received_bytes
            message = await receive()
            received_bytes += len(message.get("body", b""))
            if received_bytes > max_bytes:  # of a chunked body, which announces no length
                raise _too_large(max_bytes)
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
                await self._answer(scope, receive_bounded, send_with_headers, max_bytes)
        finally:
            # The template of the route, so that paths that were tried at random share one series.
            route = getattr(scope.get("route"), "path", None) or "unmatched"
            self._on_http(scope["method"], route, code, time.perf_counter() - started_s)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, max_bytes: int) -> None:
        given = Headers(scope=scope).get("content-length", "0")
        is_number = given.isascii() and given.isdigit() and len(given) < 20
        if not is_number or int(given) > max_bytes:
            await _error_response(scope, _too_large(max_bytes))(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _too_large(max_bytes: int) -> TooLarge:
    return TooLarge(
        f"the request body is larger than {max_bytes} bytes; larger data is pushed with the horizon command, or gRPC"
    )


def error_detail(error: HorizonError) -> ErrorDetail:
    """Return what is said of a domain error."""
    violations = [ViolationBody(field=v.field, description=v.description) for v in error.violations]
    return ErrorDetail(reason=error.reason, message=error.message, violations=violations)


def error_body(error: HorizonError) -> ErrorBody:
    """Return the body of a domain error."""
    return ErrorBody(error=error_detail(error))


def _error_response(scope: Scope, error: HorizonError) -> JSONResponse:
    headers: dict[str, str] = {}
    status = error.status.http
    if status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    return _dialect_of(scope).error(status, error_detail(error), headers)


async def _on_domain_error(request: Request, error: HorizonError) -> JSONResponse:
    return _error_response(request.scope, error)


async def _on_malformed(request: Request, error: RequestValidationError) -> JSONResponse:
    violations = []
    for problem in error.errors():
        name = ".".join(str(part) for part in problem.get("loc", ())[1:]) or "request"
        given = problem.get("input")
        # FastAPI's own answer echoes the input, which may be binary, huge or secret.
        is_short = isinstance(given, str) and given.isprintable() and len(given) <= LONGEST_INPUT
        shown = f" is {given!r}" if is_short else ""
        # pydantic says which Python type it wants; a caller wants to know what to write.
        is_number = problem.get("type") == "int_parsing"
        rule = "it must be a whole number" if is_number else problem.get("msg", "it is not valid")
        violations.append(FieldViolation(field=name, description=f"{name}{shown}: {rule}"))
    refused = InvalidSpec(violations[0].description, violations=violations)
    return _dialect_of(request.scope).error(HTTPStatus.UNPROCESSABLE_ENTITY, error_detail(refused), {})


async def _on_http(request: Request, error: HTTPException) -> JSONResponse:
    status = error.status_code
    if status == HTTPStatus.NOT_FOUND:
        message = f"there is no {request.url.path!r:.200} here; GET /openapi.json lists what there is"
    elif status == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"{request.method:.20} is not possible here; GET /openapi.json lists what is"
    else:
        message = str(error.detail)
    detail = ErrorDetail(reason=HTTPStatus(status).name, message=message)
    return _dialect_of(request.scope).error(status, detail, error.headers or {})


async def _on_bug(request: Request, _error: Exception) -> JSONResponse:
    detail = error_detail(HorizonError("something went wrong inside the daemon; its log says what"))
    # Starlette answers a bug outside all middleware.
    return _dialect_of(request.scope).error(HTTPStatus.INTERNAL_SERVER_ERROR, detail, SECURITY_HEADERS)


EXCEPTION_HANDLERS: Mapping[Any, Callable[[Request, Any], Any]] = {
    HorizonError: _on_domain_error,
    RequestValidationError: _on_malformed,
    HTTPException: _on_http,
    Exception: _on_bug,
}

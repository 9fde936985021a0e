"""Errors as HTTP answers: one shape for all, the code from the one table in `api.status`, and nothing of the daemon's insides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from horizon_server.api.http.bodies import ErrorBody, ErrorDetail, ViolationBody
from horizon_server.api.status import status_of
from horizon_server.errors import FieldViolation, HorizonError, InvalidSpec

SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}
"""A route that sets one of them itself wins: the page has a policy of its own."""
_HTTP_REASONS = {404: "NOT_FOUND", 405: "METHOD_NOT_ALLOWED"}
_LONGEST_INPUT = 80


def error_body(error: HorizonError) -> ErrorBody:
    """Return the body of a domain error."""
    violations = [ViolationBody(field=v.field, description=v.description) for v in error.violations]
    return ErrorBody(error=ErrorDetail(reason=error.reason, message=error.message, violations=violations))


def error_response(error: HorizonError) -> JSONResponse:
    """Return the answer to a domain error."""
    headers: dict[str, str] = {}
    status = status_of(error).http
    if status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    return _response(status, error_body(error), headers)


def install_handlers(app: FastAPI) -> None:
    """Give the app its four ways to fail: a domain error, a malformed request, no such route, and a bug."""
    app.add_exception_handler(HorizonError, _on_domain_error)
    app.add_exception_handler(RequestValidationError, _on_malformed)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_bug)


async def _on_domain_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HorizonError)
    return error_response(error)


async def _on_malformed(_request: Request, error: Exception) -> JSONResponse:
    """Name the fields and never echo a body: it may be binary, huge or secret."""
    assert isinstance(error, RequestValidationError)
    violations = []
    for problem in error.errors():
        name = ".".join(str(part) for part in problem.get("loc", ())[1:]) or "request"
        given = problem.get("input")
        is_short = isinstance(given, str) and given.isprintable() and len(given) <= _LONGEST_INPUT
        shown = f" is {given!r}" if is_short else ""
        # pydantic says which Python type it wants; a caller wants to know what to write.
        rule = (
            "it must be a whole number"
            if problem.get("type") == "int_parsing"
            else problem.get("msg", "it is not valid")
        )
        description = f"{name}{shown}: {rule}"
        violations.append(FieldViolation(field=name, description=description))
    refused = InvalidSpec(violations[0].description, violations=violations)
    return _response(HTTPStatus.UNPROCESSABLE_ENTITY, error_body(refused))


async def _on_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    status = error.status_code
    if status == HTTPStatus.NOT_FOUND:
        message = f"there is no {request.url.path!r:.200} here; GET /openapi.json lists what there is"
    elif status == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"{request.method:.20} is not possible here; REST only reads, changes go through gRPC"
    else:
        message = str(error.detail)
    reason = _HTTP_REASONS.get(status, HTTPStatus(status).name)
    return _response(status, ErrorBody(error=ErrorDetail(reason=reason, message=message)), error.headers)


async def _on_bug(_request: Request, _error: Exception) -> JSONResponse:
    message = "something went wrong inside the daemon; its log says what"
    body = ErrorBody(error=ErrorDetail(reason=HorizonError.reason, message=message))
    return _response(HTTPStatus.INTERNAL_SERVER_ERROR, body, SECURITY_HEADERS)  # this answer bypasses the middleware


def _response(status: int, body: ErrorBody, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(body.model_dump(), status_code=status, headers=dict(headers or {}))

"""Errors as Tinker's SDK reads them."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi.responses import JSONResponse

from horizon_server.api.http.bodies import ErrorDetail
from horizon_server.api.http.middleware import Dialect, error_detail
from horizon_server.errors import HorizonError

MAX_REQUEST_BYTES = 4 * 2**20
"""Of any request: documents and prompts are the largest."""
# The SDK repeats every 409, for five minutes; here none of them ends differently.
_AS_BAD_REQUEST = (HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY)
_WORTH_REPEATING = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


def body_of_error(status: int, detail: ErrorDetail) -> dict[str, Any]:
    """Return the body of an answer, or the result of a future, that says what is wrong."""
    body: dict[str, Any] = {
        "error": detail.message,
        "category": "server" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "user",
        "code": detail.reason.lower(),
    }
    if detail.violations:
        body["fields"] = [{"field": one.field, "description": one.description} for one in detail.violations]
    return body


def body_of(error: HorizonError) -> dict[str, Any]:
    """Return the body of a domain error."""
    return body_of_error(error.status.http, error_detail(error))


def _error(status: int, detail: ErrorDetail, headers: Mapping[str, str]) -> JSONResponse:
    repeat = "Retry-After" in headers or status in _WORTH_REPEATING
    return JSONResponse(
        body_of_error(status, detail),
        status_code=HTTPStatus.BAD_REQUEST if status in _AS_BAD_REQUEST else status,
        headers={**headers, "x-should-retry": "true" if repeat else "false"},
    )


TINKER = Dialect(prefix="/api/v1/", max_body_bytes=lambda _path: MAX_REQUEST_BYTES, error=_error)

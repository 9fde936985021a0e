"""Errors as OpenAI writes them, so that its SDK raises its own classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from fastapi.responses import JSONResponse

from horizon_server.api.http.bodies import ErrorDetail
from horizon_server.api.http.middleware import Dialect, error_detail
from horizon_server.errors import FieldViolation, HorizonError, InvalidSpec, NotFound

# The body of a file besides its content: the other fields of the form, and what divides them.
_FORM_BYTES = 64 * 1024
# As OpenAI takes.
MAX_FILE_BYTES = 512 * 2**20
# Of any other request: prompts are the largest.
MAX_REQUEST_BYTES = 4 * 2**20
FILES_PATH = "/v1/files"

# What programs look for in `code`; every other code is our own reason in lower case.
_CODES = {
    "UNAUTHENTICATED": "invalid_api_key",
    "TOO_MANY_CALLS": "rate_limit_exceeded",
    "QUOTA_EXCEEDED": "insufficient_quota",
}
_TYPES = {
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}
# The SDK repeats a call after every 408, 409, 429 and 5xx unless it is told not to.
_WORTH_REPEATING = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


class BadParameter(InvalidSpec):
    """A parameter of OpenAI's API is refused; `reason` is the code that OpenAI gives."""

    def __init__(self, param: str, message: str, *, code: str = "invalid_value") -> None:
        super().__init__(message, violations=[FieldViolation(field=param, description=message)] if param else ())
        self.reason = code


def unsupported(param: str, why: str) -> BadParameter:
    """Return the refusal of a parameter that OpenAI has and that is not carried out here."""
    return BadParameter(param, f"Unsupported parameter: '{param}' {why}", code="unsupported_parameter")


def model_not_found(name: str) -> NotFound:
    """Return the error of a model that does not exist, or that the caller may not see."""
    return about_model(
        NotFound(f"The model {name!r:.200} does not exist or you do not have access to it; GET /v1/models lists yours")
    )


def about_model(error: NotFound) -> NotFound:
    """Make an error, which is returned, that of the model that a request names."""
    error.violations = (FieldViolation(field="model", description=error.message),)
    error.reason = "model_not_found"
    return error


@contextmanager
def called(names: Mapping[str, str]) -> Iterator[None]:
    """Raise what the block raises with its fields under the names that OpenAI's API has for them."""
    try:
        yield
    except HorizonError as error:
        error.violations = tuple(
            FieldViolation(field=names.get(violation.field, violation.field), description=violation.description)
            for violation in error.violations
        )
        raise


def body_of_error(status: int, detail: ErrorDetail) -> dict[str, Any]:
    """Return the body of an answer, or of an event of a stream, that says what is wrong."""
    kind = "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    return {
        "error": {
            "message": detail.message,
            "type": _TYPES.get(HTTPStatus(status), kind),
            "param": detail.violations[0].field if detail.violations else None,
            "code": _CODES.get(detail.reason, detail.reason.lower()),
        }
    }


def body_of(error: HorizonError) -> dict[str, Any]:
    """Return the body of a domain error."""
    return body_of_error(error.status.http, error_detail(error))


def _error(status: int, detail: ErrorDetail, headers: Mapping[str, str]) -> JSONResponse:
    if status == HTTPStatus.UNPROCESSABLE_ENTITY and detail.reason == InvalidSpec.reason:
        # A malformed parameter of the path or the query.
        status = HTTPStatus.BAD_REQUEST
    repeat = "Retry-After" in headers or status in _WORTH_REPEATING
    return JSONResponse(
        body_of_error(status, detail),
        status_code=status,
        headers={**headers, "x-should-retry": "true" if repeat else "false"},
    )


OPENAI = Dialect(
    prefix="/v1/",
    max_body_bytes=lambda path: MAX_FILE_BYTES + _FORM_BYTES if path == FILES_PATH else MAX_REQUEST_BYTES,
    error=_error,
)

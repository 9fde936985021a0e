"""How the body of a request is read: after its caller is known, strictly, and with OpenAI's words for what is wrong."""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, ValidationError

from horizon_server.api.http.middleware import LONGEST_INPUT
from horizon_server.api.openai.errors import BadParameter

BodyT = TypeVar("BodyT", bound="Body")


class Body(BaseModel):
    """A body, or a part of one: nothing unknown, no type guessed (strict), numbers finite. Null is as good as absent
    where a field has a default."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


async def read_body(request: Request, kind: type[BodyT]) -> BodyT:
    """Return the body of a request. A caller who is not known has been refused before: FastAPI's own way reads bodies
    first.

    Raises:
        BadParameter: it names the parameter.
        TooLarge: for a larger one than there may be.
    """
    try:
        return kind.model_validate_json(await request.body())
    except ValidationError as error:
        raise _refused(error.errors(include_url=False)[0]) from error


def _refused(problem: Any) -> BadParameter:
    # Of a union pydantic names the option that it has tried too.
    param = _path(part for part in problem["loc"] if isinstance(part, int) or (part.isidentifier() and part.islower()))
    match problem["type"]:
        case "json_invalid":
            return BadParameter("", f"the body is not JSON: {problem['ctx']['error']}", code="invalid_json")
        case "extra_forbidden":
            return BadParameter(param, f"Unknown parameter: '{param}'", code="unknown_parameter")
        case "missing":
            return BadParameter(param, f"Missing required parameter: '{param}'", code="missing_required_parameter")
        case "value_error":
            return BadParameter(param, f"Invalid value for '{param}': {problem['ctx']['error']}")
    given = problem.get("input")
    is_short = isinstance(given, int | float | str) and len(str(given)) <= LONGEST_INPUT and str(given).isprintable()
    shown = f" {given!r}" if is_short else ""
    return BadParameter(param, f"Invalid value{shown} for '{param}': {problem['msg']}")


def _path(parts: Any) -> str:
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path

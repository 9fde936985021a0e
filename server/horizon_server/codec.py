"""A record and its plain data, which JSON can hold: for requests, journals, events, the database and what processes
greet each other with.

A record is a dataclass, or a pydantic model, of such fields. Both ends are of one version, so there is nothing to
convert: a field that has no default must be there, and one that is unknown is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any, NewType, TypeVar

import pydantic_core
from pydantic import ConfigDict, TypeAdapter

RecordT = TypeVar("RecordT")

# A loss may be NaN or infinite, which pydantic would write as null.
_CONFIG = ConfigDict(extra="forbid", ser_json_inf_nan="constants")
_new_type: Any = NewType


def _make_adapter(kind: Any) -> TypeAdapter[Any]:
    # Under another name: pydantic takes no configuration for a dataclass itself, but hands it down to those inside of a
    # type.
    return TypeAdapter(_new_type("Record", kind), config=None if hasattr(kind, "model_config") else _CONFIG)


# Made once for each type: pydantic compiles a validator and a serializer.
_adapter: Callable[[Any], TypeAdapter[Any]] = cache(_make_adapter)


def to_plain(record: Any) -> Any:
    """Return the record as dictionaries, lists, texts and numbers."""
    return _adapter(type(record)).dump_python(record, mode="json")


def from_plain(kind: type[RecordT], plain: Any) -> RecordT:
    """Return the record that `to_plain` made plain. Raises ValueError where it is not one, naming each field that is
    wrong."""
    record: RecordT = _adapter(kind).validate_python(plain)
    return record


def to_json(record: Any, *, indent: int | None = None) -> str:
    """Return the record as JSON, in ASCII: in one line, or indented for people who look at it."""
    # Not by pydantic, which fails at half a surrogate pair in a text.
    return json.dumps(to_plain(record), indent=indent, separators=None if indent else (",", ":"))


def from_json(kind: type[RecordT], text: str | bytes) -> RecordT:
    """Return the record that `to_json` wrote. Raises ValueError where it is not one."""
    try:
        return from_plain(kind, json.loads(text))
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def parsed(text: str) -> Any:
    """Return the plain data of JSON that `to_json` wrote, without a look at what record it is of."""
    try:
        return pydantic_core.from_json(text)
    except ValueError:
        return json.loads(text)  # half a surrogate pair, which pydantic refuses

"""A record and its plain data, which JSON can hold: for requests, journals, events, the database and what processes greet each other with.

A record is a dataclass, or a pydantic model, of such fields. Both ends are of one version, so there is nothing to convert.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter

RecordT = TypeVar("RecordT")

# Made once for each type: pydantic compiles a validator and a serializer.
_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def to_plain(record: Any) -> Any:
    """Return the record as dictionaries, lists, texts and numbers."""
    return _adapter(type(record)).dump_python(record, mode="json")


def from_plain(kind: type[RecordT], plain: Any) -> RecordT:
    """Return the record that `to_plain` made plain. Raises ValueError where it is not one, naming each field that is wrong."""
    record: RecordT = _adapter(kind).validate_python(plain)
    return record

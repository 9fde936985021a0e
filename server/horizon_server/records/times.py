"""Times in records, and what they are called in gRPC and REST."""

from __future__ import annotations

from typing import Annotated, Any, get_args

UnixTime = Annotated[float, "Unix seconds"]
"""The type of a field that is a time. Its name ends with `_s`, as those of durations do."""

# Records have the participle, the wire has the verb.
_VERBS = {
    "created": "create",
    "queued": "queue",
    "started": "start",
    "ended": "end",
    "added": "add",
    "expires": "expire",
    "revoked": "revoke",
    "disabled": "disable",
    "last_used": "last_use",
}
_PARTICIPLES = {verb: participle for participle, verb in _VERBS.items()}


def is_time(hint: Any) -> bool:
    """Whether a field of this type, which may be optional, is a time."""
    return UnixTime in (hint, *get_args(hint))


def time_name(attribute: str) -> str:
    """Return what a time is called on the wire: `as_of_time` of `as_of_s`, `create_time` of `created_s`."""
    stem = attribute.removesuffix("_s")
    return f"{_VERBS.get(stem, stem)}_time"


def time_attribute(name: str) -> str:
    """Return the attribute of a record of which a field of the wire is filled; the opposite of `time_name`."""
    stem = name.removesuffix("_time")
    return f"{_PARTICIPLES.get(stem, stem)}_s"

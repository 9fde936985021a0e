"""Wire message -> dataclass of `resources`, by field name along the descriptor; and dataclass -> plain data for JSON and YAML.

A field that only the wire has is dropped; an enumeration value that this client does not know keeps its number.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, MutableSequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from horizon_client import resources
from horizon_client.job_spec import spec_to_mapping
from horizon_proto.v1 import job_pb2

ResourceT = TypeVar("ResourceT")

_EVENTS: dict[str, type[Any]] = {
    "state": resources.StateEvent,
    "step": resources.StepEvent,
    "prepare": resources.PrepareEvent,
    "eval": resources.EvalEvent,
    "checkpoint": resources.CheckpointEvent,
    "message": resources.MessageEvent,
}


def from_message(kind: type[ResourceT], message: Message, **extra: Any) -> ResourceT:
    """Return `kind` filled from the fields of `message` that have the same names; `extra` is passed on."""
    values: dict[str, Any] = {}
    for attribute in dataclasses.fields(kind):  # type: ignore[arg-type]
        descriptor = message.DESCRIPTOR.fields_by_name.get(attribute.name)
        if descriptor is not None:
            values[attribute.name] = _value(message, descriptor, attribute.metadata.get("of"))
    return kind(**{**values, **extra})


def event_from_message(message: job_pb2.JobEvent) -> resources.JobEvent:
    """Return the event; one of a kind that this client does not know becomes a message that says so."""
    time = message.time.ToDatetime(tzinfo=UTC) if message.HasField("time") else None
    which = message.WhichOneof("event")
    if which is None:
        text = "something happened that this client is too old to show; upgrade it to match the server"
        return resources.MessageEvent(sequence=message.sequence, time=time, level="info", text=text)
    event: resources.JobEvent = from_message(
        _EVENTS[which], getattr(message, which), sequence=message.sequence, time=time
    )
    return event


def to_plain(value: Any) -> Any:
    """Return plain data that JSON and YAML can write: datetimes as ISO text, numbers that are not finite as None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain = {attribute.name: to_plain(getattr(value, attribute.name)) for attribute in dataclasses.fields(value)}
        kind = getattr(value, "kind", None)
        return {"event": kind, **plain} if kind and plain.get("sequence") else plain
    if isinstance(value, Mapping):
        return {str(key): to_plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(inner) for inner in value]
    if isinstance(value, datetime):
        return value.isoformat()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def enum_text(descriptor: Any, number: int) -> str:
    """Return an enumeration value as users write it; empty when not set."""
    prefix = descriptor.values_by_number[0].name.removesuffix("UNSPECIFIED")
    known = descriptor.values_by_number.get(number)
    if known is None:
        return f"UNKNOWN_{number}"
    text: str = known.name.removeprefix(prefix)
    if number == 0:
        return ""
    return text if descriptor.name.endswith("State") else text.lower().replace("_", "-")


def _value(message: Message, descriptor: Any, nested: type[Any] | None) -> Any:
    value = getattr(message, descriptor.name)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, MutableSequence):
        return tuple(from_message(nested, item) if nested else item for item in value)
    if descriptor.has_presence and not message.HasField(descriptor.name):
        return {} if isinstance(value, job_pb2.JobSpec) else None
    if isinstance(value, Timestamp):
        return value.ToDatetime(tzinfo=UTC)
    if isinstance(value, Duration):
        return value.ToNanoseconds() / 1e9
    if isinstance(value, job_pb2.JobSpec):
        return spec_to_mapping(value)
    if isinstance(value, Message):
        return from_message(nested, value) if nested else None
    return enum_text(descriptor.enum_type, value) if descriptor.enum_type is not None else value

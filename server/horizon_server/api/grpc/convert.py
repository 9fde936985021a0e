"""The one converter between the server's records and protobuf messages, by field name, in both directions.

A message field takes the attribute of the same name: properties too, nested records, tuples, maps and optional values.
Times are Unix seconds here and Timestamps there, choices are text here (`RUNNING`, `prompt-completion`) and prefixed
enumerations there. Everything that does not follow the names is in the tables below.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, TypeAlias, TypeVar

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, EnumDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from pydantic import TypeAdapter, ValidationError

from horizon_server.api.cached_on import cached_on
from horizon_server.errors import FieldViolation, InvalidSpec, TooLarge
from horizon_server.events import KINDS, JobEvent, kind_of
from horizon_server.records.job import JobRecord
from horizon_server.records.times import time_attribute

# A FieldDescriptor, of which protobuf has two unrelated classes.
Field: TypeAlias = Any
MessageT = TypeVar("MessageT", bound=Message)
RecordT = TypeVar("RecordT")
Setter = Callable[[Any, Any], None]

# Made once: pydantic compiles a validator for each.
_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)

# Field of a message to the attribute of the record. Names of times follow a rule, as do those of durations.
_RENAMED: Mapping[str, str] = {
    "Job.state": "job_state",
    "StateEvent.state": "job_state",
    "Dataset.state": "ready",
    "Model.state": "ready",
}
# Choices that people write with underscores: as transformers has them, or names of formats of numbers.
_UNDERSCORED = frozenset({"LrSchedule", "Matmul"})
_COMPUTED: Mapping[str, Callable[[Any], object]] = {
    "Dataset.state": attrgetter("state"),
    "Model.state": attrgetter("state"),
    # One value in a job file, 4 or 2-8.
    "JobSpec.gpus": lambda spec: spec.gpus.least,
    "JobSpec.max_gpus": lambda spec: spec.gpus.most if spec.gpus.is_range else None,
    "JobSpec.nodes": lambda spec: spec.nodes.least,
    "JobSpec.max_nodes": lambda spec: spec.nodes.most if spec.nodes.is_range else None,
    # An absent max_grad_norm means the default, so "no clipping" is a field of its own (ADR 0003).
    "TrainSpec.no_clipping": lambda train: True if train.max_grad_norm is None else None,
}
# The message whose payload is a oneof: the field that is set is named after the payload's kind.
_PAYLOADS = "JobEvent"
# A message in which nothing but what is set counts: absent is not zero, but the default.
_REQUESTED = "JobSpec"
_LONGEST_DURATION_S = 1e9
_TIMES = (Timestamp.DESCRIPTOR, Duration.DESCRIPTOR)
# Frozen records that are sent many times: copying a message takes a fiftieth of filling one.
_SENT_OFTEN = (JobRecord, JobEvent)


def to_message(record: object, kind: type[MessageT]) -> MessageT:
    """Return a message filled from `record`. None leaves a field unset.

    Raises:
        TooLarge: when a number exceeds the field's 64 (or 32) bits.
    """
    message = kind()
    _fill(message, record)
    return message


def response(kind: type[MessageT], **fields: Any) -> MessageT:
    """Return a response of these records, lists of records and plain values; raises as `to_message`."""
    return to_message(SimpleNamespace(**fields), kind)


def packed(kind: type[Message], items: str, records: Iterable[object], **fields: Any) -> bytes:
    """Return a response with frozen records as it is sent, `items` being a list or one message: what is sent of a
    record is made once.

    It is kept with the record. Raises as `to_message`.
    """
    field: Field = kind.DESCRIPTOR.fields_by_name[items]
    name = f"{field.message_type.full_name} in {field.full_name}"
    item = message_factory.GetMessageClass(field.message_type)

    def piece(record: object) -> bytes:
        value = to_message(record, item)
        return kind(**{items: [value] if field.is_repeated else value}).SerializeToString()

    # A message is the fields that follow each other.
    pieces = [cached_on(record, name, functools.partial(piece, record)) for record in records]
    return b"".join([*pieces, response(kind, **fields).SerializeToString()])


def from_message(message: Message, kind: type[RecordT], **given: Any) -> RecordT:
    """Return a record of `kind` filled from `message`; attributes in `given` are taken from there.

    Fields without a counterpart are dropped, and unset optional ones take the record's defaults.

    Raises:
        InvalidSpec: with one violation per field that the record cannot hold, such as the number of an unknown choice.
    """
    return _build(kind, {**_plain(message, with_zeros=True), **given})


def seconds_of(message: Message, name: str) -> float:
    """Return a time of a request as Unix seconds, or a duration in seconds.

    Raises:
        InvalidSpec: when it is outside of what protobuf allows; the wire carries any numbers.
    """
    value = getattr(message, name)
    try:
        return float(value.ToNanoseconds()) / 1e9
    except ValueError as error:
        given = f"{value.seconds} seconds and {value.nanos} nanos"
        problem = f"{name} is {given}; it must be in the years 1 to 9999 with 0 to 999999999 nanos"
        if isinstance(value, Duration):
            problem = f"{name} is {given}; it must be at most 10000 years, with nanos of the same sign below 10^9"
        raise InvalidSpec.of(name, problem) from error


def set_fields(message: Message) -> dict[str, Any]:
    """Return what is set in a request as plain data for a parser, which knows the defaults of the rest and the limits.

    The number of a choice that a newer client sent becomes text, for the parser to refuse.
    """
    return _plain(message, with_zeros=False)


def enum_number(enum: EnumDescriptor, text: str) -> int:
    """Return the number of a choice: of `RUNNING` or `prompt-completion`."""
    number: int = enum.values_by_name[_prefix(enum) + text.upper().replace("-", "_")].number
    return number


def enum_text(enum: EnumDescriptor, number: int) -> str:
    """Return a choice as records have it: states in capitals, the rest as people write it; the number itself when
    unknown."""
    known = enum.values_by_number.get(number)
    if known is None:
        return str(number)
    text: str = known.name.removeprefix(_prefix(enum))
    if enum.name.endswith("State"):
        return text
    return text.lower() if enum.name in _UNDERSCORED else text.lower().replace("_", "-")


def choice(message: Message, name: str) -> str:
    """Return what is chosen in a field of a request, as `enum_text`; empty where nothing is."""
    field: Field = message.DESCRIPTOR.fields_by_name[name]
    number = getattr(message, name)
    return enum_text(field.enum_type, number) if number else ""


def attribute_of(field: Field) -> str:
    """Return the attribute of a record that a message's field is filled from."""
    is_time = field.message_type in _TIMES and not field.is_repeated
    attribute = time_attribute(field.name) if is_time else field.name
    return _RENAMED.get(f"{field.containing_type.name}.{field.name}", attribute)


def _prefix(enum: EnumDescriptor) -> str:
    return str(enum.values[0].name.removesuffix("UNSPECIFIED"))


def _fill(message: Message, record: object) -> None:
    if isinstance(record, _SENT_OFTEN):
        kind = type(message)
        message.CopyFrom(cached_on(record, message.DESCRIPTOR.full_name, lambda: _filled(kind(), record)))
    else:
        _filled(message, record)


def _filled(message: MessageT, record: object) -> MessageT:
    for name, read, write in _fields(message.DESCRIPTOR):
        try:
            if (value := read(record)) is not None:
                write(message, value)
        except ValueError as error:
            raise TooLarge(f"{name} is {value!r:.60}, which is more than an answer can carry: {error}") from error
    return message


# Looked up once: reading the descriptors for every message makes an event, and a job in a list, three times as
# expensive.
@cache
def _fields(descriptor: Descriptor) -> tuple[tuple[str, Callable[[Any], Any], Setter], ...]:
    """Return name, reader and writer of every field."""
    return tuple((field.name, _reader(field), _writer(field)) for field in descriptor.fields)


def _reader(field: Field) -> Callable[[Any], Any]:
    if field.containing_type.name == _PAYLOADS and field.containing_oneof is not None:
        return lambda event: event.payload if kind_of(event.payload) == field.name else None
    attribute = attribute_of(field)
    return _COMPUTED.get(f"{field.containing_type.name}.{field.name}", lambda record: getattr(record, attribute, None))


def _writer(field: Field) -> Setter:
    name, nested, enum = field.name, field.message_type, field.enum_type

    def write_messages(message: Any, records: Any) -> None:
        for record in records:
            _fill(getattr(message, name).add(), record)

    def write_message(message: Any, record: Any) -> None:
        getattr(message, name).SetInParent()  # an empty record is there all the same
        _fill(getattr(message, name), record)

    def write_time(message: Any, unix_s: float) -> None:
        if unix_s > 0:
            # Whole microseconds: a float of today's date holds no more, and so a time comes back equal.
            getattr(message, name).FromNanoseconds(round(unix_s * 1e6) * 1000)

    def write_duration(message: Any, seconds: float) -> None:
        if 0 < seconds < _LONGEST_DURATION_S:  # nan and inf are not
            getattr(message, name).FromMilliseconds(round(seconds * 1000))

    if nested is not None and nested.GetOptions().map_entry:
        return lambda message, value: getattr(message, name).update(value)
    if field.is_repeated:
        return write_messages if nested is not None else lambda message, value: getattr(message, name).extend(value)
    if enum is not None:
        return lambda message, value: setattr(message, name, enum_number(enum, value))
    if nested is None:
        return lambda message, value: setattr(message, name, value)
    if nested is Timestamp.DESCRIPTOR:
        return write_time
    return write_duration if nested is Duration.DESCRIPTOR else write_message


def _build(kind: type[RecordT], plain: Mapping[str, Any]) -> RecordT:
    try:
        record: RecordT = _adapter(kind).validate_python(plain)
    except ValidationError as error:
        violations = [
            FieldViolation(field=where, description=f"{where} is {problem['input']!r:.80}; {problem['msg']}")
            for problem in error.errors()
            for where in [".".join(str(part) for part in problem["loc"])]
        ]
        raise InvalidSpec(violations[0].description, violations=violations) from error
    return record


def _plain(message: Message, *, with_zeros: bool) -> dict[str, Any]:
    name = message.DESCRIPTOR.name
    with_zeros = with_zeros and name != _REQUESTED
    # ListFields leaves out what is unset, and zeros of fields that cannot tell zero from unset.
    fields = message.DESCRIPTOR.fields if with_zeros else [field for field, _ in message.ListFields()]
    plain = {
        attribute_of(field): value
        for field in fields
        if (value := _value(message, field, with_zeros=with_zeros)) is not None
    }
    if name == _PAYLOADS and (kind := message.WhichOneof("event")):
        plain["payload"] = _build(KINDS[kind], plain.pop(kind))
    if plain.pop("no_clipping", False):
        plain["max_grad_norm"] = None
    for field in ("gpus", "nodes"):
        if (most := plain.pop(f"max_{field}", None)) is not None:
            plain[field] = f"{plain.get(field, 1)}-{most}"
    if name in ("Dataset", "Model"):
        plain["ready"] = plain.get("ready") == "READY"
    return plain


def _value(message: Message, field: Field, *, with_zeros: bool) -> Any:
    value: Any = getattr(message, field.name)
    if field.is_repeated:
        if isinstance(value, Mapping):
            return dict(value)
        return [_plain(item, with_zeros=with_zeros) if field.message_type else item for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    if field.enum_type is not None:
        return enum_text(field.enum_type, value) if value else None
    if field.message_type is None:
        return value
    if field.message_type in _TIMES:
        return seconds_of(message, field.name)
    return _plain(value, with_zeros=with_zeros)

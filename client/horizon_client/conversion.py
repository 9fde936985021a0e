"""Messages of the contract <-> plain Python, by walking the descriptors: a new field of the contract needs no line
here.

A field that only the wire has is dropped; an enumeration value that this client does not know keeps its number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence
from datetime import timezone
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from horizon_client import resources
from horizon_client.errors import FieldViolation, InvalidRequest, InvalidSpec, did_you_mean
from horizon_formats.other_names import other_name, other_value
from horizon_proto.v1 import job_pb2

ResourceT = TypeVar("ResourceT")

REQUIRED = ("name", "model", "dataset")

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
# Choices that users write with underscores: as transformers has them, or names of formats of numbers.
_UNDERSCORED = frozenset({"LrSchedule", "Matmul"})
_BOOLEAN_WORDS = {True: ("true", "on"), False: ("false", "off")}
_CLIPPING_OFF = "no_clipping"
_CLIPPING = "max_grad_norm"
# A range such as 2-8 is one value of users, and two numbers of the contract.
_MOST = {"gpus": "max_gpus", "nodes": "max_nodes"}
_RANGE = re.compile(r"([0-9]+)-([0-9]+)", re.ASCII)
_INT_BITS = {FieldDescriptor.CPPTYPE_INT32: 32, FieldDescriptor.CPPTYPE_INT64: 64}


def from_message(kind: type[ResourceT], message: Message, **extra: Any) -> ResourceT:
    """Return `kind` filled from the fields of `message` that have the same names; `extra` is passed on."""
    return kind(**{field.name: _value(message, field) for field in message.DESCRIPTOR.fields}, **extra)


def event_from_message(message: job_pb2.JobEvent) -> resources.JobEvent:
    """Return the event; one of a kind that this client does not know becomes a message that says so."""
    time = message.time.ToDatetime(tzinfo=timezone.utc) if message.HasField("time") else None
    which = message.WhichOneof("event")
    if which is None:
        text = "something happened that this client is too old to show; upgrade it to match the server"
        return resources.MessageEvent(sequence=message.sequence, time=time, level="info", text=text)
    payload = getattr(message, which)
    kind: type[resources.JobEvent] = getattr(resources, payload.DESCRIPTOR.name)
    return from_message(kind, payload, sequence=message.sequence, time=time)


def _value(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, MutableSequence):
        return tuple(map(_plain, value))
    if field.has_presence and not message.HasField(field.name):
        return {} if isinstance(value, job_pb2.JobSpec) else None
    return _plain(value) if field.enum_type is None else _enum_text(field.enum_type, value)


def _plain(value: Any) -> Any:
    match value:
        case Timestamp():
            return value.ToDatetime(tzinfo=timezone.utc)
        case Duration():
            return value.ToNanoseconds() / 1e9
        case job_pb2.JobSpec():
            return spec_to_mapping(value)
        case Message():
            return from_message(getattr(resources, value.DESCRIPTOR.name), value)
    return value


def _enum_text(descriptor: Any, number: int) -> str:
    """Return an enumeration value as users read it, states in capitals; empty when not set."""
    if number == 0:
        return ""
    text = next((text for text, known in enum_choices(descriptor).items() if known == number), f"unknown-{number}")
    return text.upper().replace("-", "_") if descriptor.name.endswith("State") else text


def enum_choices(descriptor: Any) -> dict[str, int]:
    """Return the values of an enumeration as users write them: lower case, with dashes, without the prefix and the
    unset value."""
    prefix = descriptor.values_by_number[0].name.removesuffix("UNSPECIFIED")
    dash = "_" if descriptor.name in _UNDERSCORED else "-"
    return {
        v.name.removeprefix(prefix).lower().replace("_", dash): v.number for v in descriptor.values if v.number != 0
    }


def enum_number(enum: Any, field: str, text: str) -> Any:
    """Return the number of an enumeration's value as users write it: `prompt-completion`."""
    choices = enum_choices(enum.DESCRIPTOR)
    if text not in choices:
        raise InvalidRequest.of(field, f"{field} is {text!r}; it must be one of {', '.join(choices)}")
    return choices[text]


def spec_to_mapping(spec: Message) -> dict[str, Any]:
    """Return the plain mapping that `spec_to_proto` turns back into an equal spec (or section); unset fields are left
    out."""
    plain: dict[str, Any] = {}
    for field in spec.DESCRIPTOR.fields:
        name, value = field.name, getattr(spec, field.name)
        if isinstance(value, MutableMapping):
            if value:
                plain[name] = dict(sorted(value.items()))
        elif isinstance(value, MutableSequence):
            if value:
                plain[name] = [spec_to_mapping(item) if isinstance(item, Message) else item for item in value]
        elif field.has_presence and not spec.HasField(name):
            continue
        elif isinstance(value, Message):
            plain[name] = spec_to_mapping(value)
        elif name == _CLIPPING_OFF:
            if value:
                plain[_CLIPPING] = None
        elif field.enum_type is not None:
            if value:
                plain[name] = _enum_text(field.enum_type, value)
        elif field.has_presence or value:
            plain[name] = value
    for name, name_of_most in _MOST.items():
        if (most := plain.pop(name_of_most, None)) is not None:
            plain[name] = f"{plain.get(name, 1)}-{most}"
    return plain


class _Refused(Exception):
    """A value that a field cannot have; the text is the part of the message after "it"."""


def spec_to_proto(mapping: object) -> job_pb2.JobSpec:
    """Return the wire form of a job spec. The server checks the ranges.

    null means the default, except for `train.max_grad_norm`, where it turns clipping off.

    Raises:
        InvalidSpec: with one violation for each key that is unknown, missing or of the wrong type.
    """
    if not isinstance(mapping, Mapping):
        kind = "nothing" if mapping is None else type(mapping).__name__
        fields = ", ".join(REQUIRED)
        raise InvalidSpec(f"the job spec must be a mapping of fields such as {fields}, not {kind}")
    spec = job_pb2.JobSpec()
    violations: list[FieldViolation] = []
    _fill(spec, mapping, "", violations)
    refused = {violation.field for violation in violations}
    # The data of a session comes with its calls.
    required = [name for name in REQUIRED if name != "dataset" or spec.method != job_pb2.METHOD_SESSION]
    violations += [
        FieldViolation(field=name, description=f"{name} is required")
        for name in required
        if not getattr(spec, name) and name not in refused
    ]
    if violations:
        more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
        raise InvalidSpec(f"{violations[0].description}{more}", violations=violations)
    return spec


def _field_paths() -> Iterator[str]:
    for name in _known_keys(job_pb2.JobSpec.DESCRIPTOR):
        yield name
        if section := job_pb2.JobSpec.DESCRIPTOR.fields_by_name[name].message_type:
            yield from (f"{name}.{key}" for key in _known_keys(section))


# What other tools call a field, where the name is not similar.
_USUAL_NAMES = {
    "lr": "learning_rate",
    "r": "rank",
    "max_length": "sequence_length",
    "target_modules": "targets",
    "wd": "weight_decay",
}


def _fill(message: Message, mapping: Mapping[Any, Any], prefix: str, violations: list[FieldViolation]) -> None:
    known = _known_keys(message.DESCRIPTOR)
    for key, value in mapping.items():
        path = f"{prefix}{key}"
        if key not in known:
            elsewhere = [other for other in _field_paths() if other.rpartition(".")[2] == key]
            if (usual := _USUAL_NAMES.get(str(key))) in known:
                elsewhere = [str(usual)]
            hint = f"did you mean {' or '.join(elsewhere)}?" if elsewhere else did_you_mean(str(key), known)
            hint = (other_name(str(key)) if not elsewhere else "") or hint or f"fields: {', '.join(known)}"
            text = f"{path} is not a field of the job spec; {hint}"
            violations.append(FieldViolation(field=path, description=text))
            continue
        try:
            _set(message, message.DESCRIPTOR.fields_by_name[key], value, path, violations)
        except _Refused as refused:
            text = repr(value)
            shown = text if len(text) <= 60 else f"{text[:57]}..."
            what = other_value(path, value) or f"it {refused}"
            violations.append(FieldViolation(field=path, description=f"{path} is {shown}; {what}"))


def _set(message: Message, field: Any, value: object, path: str, violations: list[FieldViolation]) -> None:
    if value is None:
        if field.name == _CLIPPING:
            setattr(message, _CLIPPING_OFF, True)
        return
    if field.name in _MOST and isinstance(value, str) and not _NUMBER.fullmatch(value):
        ends = _RANGE.fullmatch(value)
        if ends is None:
            raise _Refused("must be a whole number, or a range of them such as 2-8")
        for name, number in zip((field.name, _MOST[field.name]), ends.groups(), strict=True):
            setattr(message, name, _whole(number, 32))
        return
    current = getattr(message, field.name)
    if isinstance(current, MutableMapping):
        if not isinstance(value, Mapping):
            raise _Refused("must be a mapping of names")
        to = field.message_type.fields_by_name["value"]
        for name, item in value.items():
            if not isinstance(name, str) or not name:
                raise _Refused("must have names as its keys; put them in quotes")
            current[name] = _converted(to, item)
    elif isinstance(current, MutableSequence):
        # `trainable: all` is a list of one.
        if isinstance(value, str) and field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            value = [value]
        if not isinstance(value, list | tuple):
            raise _Refused("must be a list")
        if field.message_type is not None:
            items: Any = current
            for index, item in enumerate(value):
                if not isinstance(item, Mapping):
                    raise _Refused(
                        f"must be a list of mappings, each with {', '.join(_known_keys(field.message_type))}"
                    )
                _fill(items.add(), item, f"{path}[{index}].", violations)
            return
        current.extend([_converted(field, item) for item in value])
    elif isinstance(current, Message):
        if not isinstance(value, Mapping):
            raise _Refused(f"must be a mapping with some of: {', '.join(_known_keys(current.DESCRIPTOR))}")
        current.SetInParent()  # an empty section is a section too
        _fill(current, value, f"{path}.", violations)
    else:
        setattr(message, field.name, _converted(field, value))


def _known_keys(descriptor: Any) -> list[str]:
    return [field.name for field in descriptor.fields if field.name not in (_CLIPPING_OFF, *_MOST.values())]


def _converted(field: Any, value: object) -> object:
    if field.enum_type is not None:
        choices = enum_choices(field.enum_type)
        # YAML reads not only true and false as booleans, but on and off too.
        words = _BOOLEAN_WORDS[value] if isinstance(value, bool) else (value,)
        text = next((word for word in words if isinstance(word, str) and word in choices), None)
        if text is None:
            raise _Refused(f"must be one of {', '.join(choices)}")
        return choices[text]
    if field.cpp_type in _INT_BITS:
        return _whole(value, _INT_BITS[field.cpp_type])
    if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE:
        return _number(value)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        if not isinstance(value, bool):
            raise _Refused("must be true or false")
        return value
    assert field.cpp_type == FieldDescriptor.CPPTYPE_STRING  # noqa: S101 - the contract has no other kind
    if not isinstance(value, str):
        raise _Refused("must be text; put it in quotes")
    try:
        value.encode()  # protobuf would refuse a lone surrogate with an error of its own
    except UnicodeEncodeError:
        raise _Refused("must be valid Unicode text") from None
    return value


def _number(value: object) -> float:
    # YAML 1.1 reads `1e-5`, which has no dot, as text
    is_text = isinstance(value, str) and _NUMBER.fullmatch(value)
    if not is_text and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise _Refused("must be a number")
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:  # an int of more than 308 digits
        number = math.inf
    if not math.isfinite(number):
        raise _Refused("must be a finite number")
    return number


def _whole(value: object, num_bits: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        try:
            number = _number(value)
        except _Refused:
            raise _Refused("must be a whole number") from None
        if not number.is_integer():
            raise _Refused("must be a whole number")
        # Digits directly, because a float has 53 bits only
        value = int(value) if isinstance(value, str) and value.lstrip("+-").isdigit() else int(number)
    if not -(2 ** (num_bits - 1)) <= value < 2 ** (num_bits - 1):
        raise _Refused(f"must be a whole number of at most {num_bits} bits")
    return value

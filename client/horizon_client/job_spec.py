"""Job spec, plain mapping <-> wire, by walking the descriptor of `JobSpec`: a new field of the contract needs no line here.

Refuses unknown keys and wrong types before anything is sent, each with its path and what is allowed; the server checks the ranges. null
means the default, except for `train.max_grad_norm`, where it turns clipping off. YAML reads `1e-5` as text, so number fields also accept
numbers written as text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, MutableSequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from horizon_client.errors import FieldViolation, InvalidSpec, did_you_mean
from horizon_proto.v1 import job_pb2

REQUIRED = ("name", "model", "dataset")

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_CLIPPING_OFF = "no_clipping"
_CLIPPING = "max_grad_norm"
_INT_BITS = {FieldDescriptor.CPPTYPE_INT32: 32, FieldDescriptor.CPPTYPE_INT64: 64}


class _Refused(Exception):
    """A value that a field cannot have; the text is the part of the message after "it"."""


def spec_to_proto(mapping: object) -> job_pb2.JobSpec:
    """Return the wire form of a job spec.

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
    violations += [
        FieldViolation(field=name, description=f"{name} is required")
        for name in REQUIRED
        if not getattr(spec, name) and name not in refused
    ]
    if violations:
        more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
        raise InvalidSpec(f"{violations[0].description}{more}", violations=violations)
    return spec


def spec_to_mapping(spec: Message) -> dict[str, Any]:
    """Return the plain mapping that `spec_to_proto` turns back into an equal spec (or section); unset fields are left out."""
    plain: dict[str, Any] = {}
    for descriptor in spec.DESCRIPTOR.fields:
        name, value = descriptor.name, getattr(spec, descriptor.name)
        if isinstance(value, MutableSequence):
            if value:
                plain[name] = list(value)
        elif descriptor.has_presence and not spec.HasField(name):
            continue
        elif isinstance(value, Message):
            plain[name] = spec_to_mapping(value)
        elif name == _CLIPPING_OFF:
            if value:
                plain[_CLIPPING] = None
        elif descriptor.enum_type is not None:
            texts = {number: text for text, number in enum_choices(descriptor.enum_type).items()}
            if value:
                plain[name] = texts.get(value, f"unknown-{value}")
        elif descriptor.has_presence or value:
            plain[name] = value
    return plain


def enum_choices(descriptor: Any) -> dict[str, int]:
    """Return the values of an enumeration as users write them: lower case, with dashes, without the prefix and the unset value."""
    prefix = descriptor.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return {v.name.removeprefix(prefix).lower().replace("_", "-"): v.number for v in descriptor.values if v.number != 0}


def _fill(message: Message, mapping: Mapping[Any, Any], prefix: str, violations: list[FieldViolation]) -> None:
    known = _known_keys(message.DESCRIPTOR)
    for key, value in mapping.items():
        path = f"{prefix}{key}"
        if key not in known:
            hint = did_you_mean(str(key), known) or f"fields: {', '.join(known)}"
            text = f"{path} is not a field of the job spec; {hint}"
            violations.append(FieldViolation(field=path, description=text))
            continue
        try:
            _set(message, message.DESCRIPTOR.fields_by_name[key], value, path, violations)
        except _Refused as refused:
            text = repr(value)
            shown = text if len(text) <= 60 else f"{text[:57]}..."
            violations.append(FieldViolation(field=path, description=f"{path} is {shown}; it {refused}"))


def _set(message: Message, descriptor: Any, value: object, path: str, violations: list[FieldViolation]) -> None:
    if value is None:
        if descriptor.name == _CLIPPING:
            setattr(message, _CLIPPING_OFF, True)
        return
    current = getattr(message, descriptor.name)
    if isinstance(current, MutableSequence):
        if not isinstance(value, list | tuple):
            raise _Refused("must be a list")
        current.extend([_converted(descriptor, item) for item in value])
    elif isinstance(current, Message):
        if not isinstance(value, Mapping):
            raise _Refused(f"must be a mapping with some of: {', '.join(_known_keys(current.DESCRIPTOR))}")
        current.SetInParent()
        _fill(current, value, f"{path}.", violations)
    else:
        setattr(message, descriptor.name, _converted(descriptor, value))


def _converted(descriptor: Any, value: object) -> object:
    if descriptor.enum_type is not None:
        choices = enum_choices(descriptor.enum_type)
        text = str(value).lower() if isinstance(value, bool) else value  # YAML reads true and false as booleans
        if not isinstance(text, str) or text not in choices:
            raise _Refused(f"must be one of {', '.join(choices)}")
        return choices[text]
    if descriptor.cpp_type in _INT_BITS:
        return _whole(value, _INT_BITS[descriptor.cpp_type])
    if descriptor.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE:
        return _number(value)
    if descriptor.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        if not isinstance(value, bool):
            raise _Refused("must be true or false")
        return value
    assert descriptor.cpp_type == FieldDescriptor.CPPTYPE_STRING  # noqa: S101 - the contract has no other kind
    if not isinstance(value, str):
        raise _Refused("must be text; put it in quotes")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _Refused("must be valid Unicode text") from None
    return value


def _number(value: object) -> float:
    is_text = isinstance(value, str) and _NUMBER.fullmatch(value)
    if not is_text and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise _Refused("must be a number")
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:
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
        value = int(value) if isinstance(value, str) and value.lstrip("+-").isdigit() else int(number)
    if not -(2 ** (num_bits - 1)) <= value < 2 ** (num_bits - 1):
        raise _Refused(f"must be a whole number of at most {num_bits} bits")
    return value


def _known_keys(descriptor: Any) -> list[str]:
    return [field.name for field in descriptor.fields if field.name != _CLIPPING_OFF]

"""Requests for the fuzz test of gRPC, from nothing but the descriptors of the contract: plausible, random and mutated
ones."""

from __future__ import annotations

import base64
import random
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_WHOLE = {FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64}
_NATURAL = {FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64}
_NARROW = {FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32}
_REAL = {FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT}
_EDGES = (0, 1, -1, 2, 7, 63, 64, 1000, 10**9, 2**31 - 1, -(2**31), 2**53 + 1, 10**18, 2**62, 2**63 - 1, -(2**63))
_REALS = (0.0, -0.0, 1.0, -1.0, 1e-5, 5e-324, 1e308, -1e308, float("nan"), float("inf"), float("-inf"))
_TEXTS = (
    "",
    " ",
    ".",
    "..",
    "../../etc/passwd",
    "/",
    "/proc/self/environ",
    "a/b",
    "a\\b",
    "\0",
    "a\0b",
    "\n",
    "\u202etxt.exe",
    "\u00b2",
    "-1",
    "%s",
    "${x}",
    "{{ 7*7 }}",
    "' OR 1=1 --",
    "x" * 64,
    "x" * 5000,
    "\U0001f600" * 70,
    "newest",
    "best",
    "None",
    "0" * 64,
    "9" * 40,
)
# Page tokens of other lists, and such that name what no list has.
_TOKENS = tuple(
    base64.urlsafe_b64encode(text).decode()
    for text in (
        b"99999999999999999999",
        b"-1",
        b'[1.0, "\\ud800"]',
        b'[1.0, "a"]',
        b'[NaN, "a"]',
        b"[[], {}]",
        b"\xff\xfe",
        b"1e999",
    )
)
_DEEPEST = 5


class Requests:
    """Makes requests; `known` are values that exist, by the kind of thing that they name."""

    def __init__(self, seed: int, known: Mapping[str, Sequence[str]]) -> None:
        self._random = random.Random(seed)
        self.known = known

    def raw(self, kind: type[Message]) -> bytes:
        """Bytes that are hardly ever a message, or one that was damaged on its way."""
        pick = self._random
        if pick.random() < 0.4:
            return pick.randbytes(pick.choice((1, 2, 5, 20, 200, 5000)))
        damaged = bytearray(self.plausible(kind).SerializeToString())
        for _ in range(pick.randint(1, 4)):
            at = pick.randint(0, len(damaged))
            damaged[at : at + pick.choice((0, 1, 1, 3))] = pick.randbytes(pick.choice((0, 1, 1, 2)))
        return bytes(damaged)

    def random(self, kind: type[Message]) -> Message:
        """A message of any fields with any values."""
        message = kind()
        self._fill(message, depth=0)
        return message

    def mutated(self, kind: type[Message]) -> Message:
        """A plausible message of which one to three fields, however deep, have any value."""
        message = self.plausible(kind)
        for _ in range(self._random.randint(1, 3)):
            inner, field = self._any_field(message)
            if field is not None:
                inner.ClearField(field.name)
                self._set(inner, field, depth=_DEEPEST - 1)
        return message

    def plausible(self, kind: type[Message]) -> Message:
        """What a client would send: names and ids of things that there are, small numbers."""
        message = kind()
        self._fill_plausible(message, depth=0)
        return message

    def _fill_plausible(self, message: Message, depth: int) -> None:
        pick = self._random
        for field in message.DESCRIPTOR.fields:
            if field.containing_oneof is not None and pick.random() < 0.5:
                continue
            value = self._plausible_value(message.DESCRIPTOR.name, field)
            if field.message_type is not None:
                is_map = field.message_type.GetOptions().map_entry
                wanted = field.name in (
                    "spec",
                    "chunk",
                    "blob",
                    "blobs",
                    "files",
                    "train",
                    "filter",
                    "condition",
                    "grant",
                )
                if not is_map and depth < _DEEPEST and (wanted or pick.random() < 0.1):
                    inner = getattr(message, field.name)
                    self._fill_plausible(inner.add() if field.is_repeated else inner, depth + 1)
            elif value is not None:
                _assign(message, field, [value] if field.is_repeated else value)

    def _plausible_value(self, owner: str, field: Any) -> Any:
        """A value for a field that clients set, None for one that they leave out."""
        pick, name = self._random, field.name
        named = {
            "job_id": "job_id",
            "jobs": "job_id",
            "dataset": "dataset",
            "dataset_id": "dataset",
            "model": "model",
            "model_id": "model",
            "sha256": "sha256",
            "path": "path",
            "key": "job_id",
            "keys": "job_id",
        }.get(name)
        if name == "name":
            of = next((word for word in ("Preview", "Dataset", "Model") if word in owner and "Create" not in owner), "")
            named = {"Dataset": "dataset", "Preview": "dataset", "Model": "model"}.get(of)
            if named is None:
                return f"made-{pick.randrange(10**6)}"
        if named is not None:
            return pick.choice(self.known.get(named) or self._any_known())
        if name == "request_id":
            return str(uuid.UUID(int=pick.getrandbits(128), version=4))
        if name in ("max_steps", "size_bytes", "page_size", "step", "num_rows", "sequence_length", "tokens_per_step"):
            return pick.choice((1, 3, 64, 128))
        if name in ("offset", "after_sequence", "attempt"):
            return pick.choice((0, 0, 1, 3))
        if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM and pick.random() < 0.1:
            return pick.choice(field.enum_type.values).number
        if name in ("page_token", "data"):
            return None
        return self._value(field) if pick.random() < 0.01 else None

    def _any_known(self) -> list[str]:
        return [value for values in self.known.values() for value in values]

    def _fill(self, message: Message, depth: int) -> None:
        for field in message.DESCRIPTOR.fields:
            if self._random.random() < (0.6 if depth == 0 else 0.35):
                self._set(message, field, depth)

    def _set(self, message: Message, field: Any, depth: int) -> None:
        pick = self._random
        number = pick.choice((0, 1, 2, 3, 300)) if depth == 0 else pick.choice((0, 1, 2))
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
            if value.message_type is None:
                getattr(message, field.name).update({self._value(key): self._value(value) for _ in range(number)})
        elif field.message_type is not None:
            inner = getattr(message, field.name)
            for one in (inner.add() for _ in range(number)) if field.is_repeated else (inner,):
                if not field.is_repeated:
                    one.SetInParent()
                if depth < _DEEPEST:
                    self._fill(one, depth + 1)
        else:
            _assign(
                message, field, [self._value(field) for _ in range(number)] if field.is_repeated else self._value(field)
            )

    def _value(self, field: Any) -> Any:
        pick, kind = self._random, field.cpp_type
        if kind in _WHOLE | _NATURAL:
            lowest = 0 if kind in _NATURAL else -(2**31) if kind in _NARROW else -(2**63)
            highest = 2**31 - 1 if kind in _NARROW else 2**63 - 1
            return pick.choice([edge for edge in _EDGES if lowest <= edge <= highest])
        if kind in _REAL:
            return pick.choice(_REALS[:7] if kind == FieldDescriptor.CPPTYPE_FLOAT and pick.random() < 0.5 else _REALS)
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return pick.random() < 0.5
        if kind == FieldDescriptor.CPPTYPE_ENUM:
            return pick.choice((0, 1, 2, 3, 99, -1, 2**31 - 1))
        if field.type == FieldDescriptor.TYPE_BYTES:
            return pick.randbytes(pick.choice((0, 1, 30, 70000)))
        return pick.choice((*_TEXTS, *_TOKENS, *self._any_known()))

    def _any_field(self, message: Message) -> tuple[Message, Any]:
        """A field of the message or of one inside it."""
        if not message.DESCRIPTOR.fields:
            return message, None
        field: Any = self._random.choice(message.DESCRIPTOR.fields)
        single = field.message_type is not None and not field.is_repeated
        if single and message.HasField(field.name) and self._random.random() < 0.9:
            return self._any_field(getattr(message, field.name))
        return message, field


def _assign(message: Message, field: Any, value: Any) -> None:
    if field.is_repeated:
        getattr(message, field.name).extend(value)
    else:
        setattr(message, field.name, value)

"""Every record that travels as plain data comes back equal from JSON, with numbers that JSON does not have."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import math
import pkgutil
import types
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

import horizon_server.records
from horizon_formats.checks import DatasetReport
from horizon_server import events
from horizon_server.codec import from_json, from_plain, to_json, to_plain
from horizon_server.datasets import checking, preview, recipe
from horizon_server.datasets.reading import StoredFile
from horizon_server.figures import TransferFigures
from horizon_server.planning.ledger import LayerMemory
from horizon_server.planning.machine import Machine
from horizon_server.records.job import JobRecord
from horizon_server.spec import JobSpec, parse_job_spec
from horizon_server.worker_link import protocol

SPEC = parse_job_spec({"name": "a", "model": "m", "dataset": "d", "train": {"max_steps": 1}})
_ROOM = horizon_server.records
_RECORDS = [importlib.import_module(f"{_ROOM.__name__}.{found.name}") for found in pkgutil.iter_modules(_ROOM.__path__)]


def records() -> list[type[Any]]:
    """The dataclasses that these modules define, and those of others that travel."""
    modules = [*_RECORDS, events, checking, preview, recipe, protocol]
    found = [
        kind
        for module in modules
        for kind in vars(module).values()
        if dataclasses.is_dataclass(kind) and isinstance(kind, type) and kind.__module__ == module.__name__
        if not inspect.isabstract(kind)
    ]
    return [*found, Machine, LayerMemory, DatasetReport, StoredFile]


def example(kind: Any, *, number: float) -> Any:
    """A value of the type with every field given, `number` wherever a float is."""
    kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    origin, arguments = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind, include_extras=True)
        given = {
            field.name: example(hints[field.name], number=number) for field in dataclasses.fields(kind) if field.init
        }
        return kind(**given)
    if origin in (Union, types.UnionType):
        return example(next(one for one in arguments if one is not type(None)), number=number)
    if origin is Literal:
        return arguments[-1]
    if origin is tuple:
        return tuple(example(one, number=number) for one in arguments if one is not Ellipsis)
    if origin in (dict, Mapping):
        return {"a key": example(arguments[1], number=number)}
    if origin in (list, frozenset):
        return origin([example(arguments[0], number=number)])
    if kind is JobSpec:
        return SPEC
    if isinstance(kind, type) and issubclass(kind, Enum):
        return list(kind)[-1]
    # Half a surrogate pair, which no UTF-8 has.
    plain: dict[Any, Any] = {
        bool: True,
        int: 3,
        float: number,
        str: "a \u00e9\n\ud800",
        bytes: b"a",
        Path: Path("/a/b"),
    }
    return plain[kind]


@pytest.mark.parametrize("kind", records(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("number", [0.1, math.inf, -math.inf], ids=str)
def test_a_record_survives_the_way_through_json(kind: type[Any], number: float) -> None:
    record = example(kind, number=number)
    text = to_json(record)
    assert text.isascii()
    assert "\n" not in text
    back = from_json(kind, text)
    assert back == record
    # The same types too: 1 == 1.0 == True.
    assert repr(back) == repr(record)


@pytest.mark.parametrize("kind", records(), ids=lambda kind: kind.__name__)
def test_what_is_no_number_survives_too(kind: type[Any]) -> None:
    record = example(kind, number=math.nan)
    assert repr(from_json(kind, to_json(record))) == repr(record)
    assert repr(from_plain(kind, to_plain(record))) == repr(record)


def test_a_job_spec_survives_inside_of_a_record() -> None:
    record = example(JobRecord, number=1.5)
    assert from_json(JobRecord, to_json(record)).spec == SPEC
    assert from_json(JobSpec, to_json(SPEC)) == SPEC


@pytest.mark.parametrize("text", ["", "null", "[]", "1", '"a"', '{"bytes": "x"}', '{"bites": 1}', "[" * 100_000])
def test_what_is_no_such_record_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        from_json(TransferFigures, text)


def test_what_is_left_out_has_its_default_and_what_must_be_there_is_named() -> None:
    assert from_json(TransferFigures, "{}") == TransferFigures()
    with pytest.raises(ValueError, match="level"):
        from_plain(events.Message, {"text": "a"})


def test_json_for_people_is_indented() -> None:
    message = events.Message(level="info", text="a")
    assert to_json(message, indent=1) == json.dumps(dataclasses.asdict(message), indent=1)

"""The dataset formats: their names, the fields each needs, how `auto` distinguishes them, and how chats spell their
messages."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

from horizon_formats.problems import FieldViolation, InvalidFile, InvalidOption, listed, unwritable


class _Words(str, Enum):
    """Values that are their own text, as of an enum.StrEnum, which Python 3.10 does not have."""

    __str__ = str.__str__

    def __format__(self, spec: str) -> str:
        return str.__format__(self, spec)


class DatasetFormat(_Words):
    """How the rows of a file are written; the values are the names that users write and the wire carries."""

    AUTO = "auto"
    MESSAGES = "messages"
    PROMPT_COMPLETION = "prompt-completion"
    ALPACA = "alpaca"
    SHAREGPT = "sharegpt"
    TEXT = "text"
    TOKENS = "tokens"
    PREFERENCE = "preference"
    OPENAI_PREFERENCE = "openai-preference"
    KTO = "kto"
    SAMPLES = "samples"


class DataKind(_Words):
    """What can be learnt from a dataset: the values are the names that users read and a prepared dataset is marked
    with."""

    TEXT = "text"
    PREFERENCE = "preference"
    KTO = "kto"
    SAMPLES = "samples"


_KINDS = {
    DatasetFormat.PREFERENCE: DataKind.PREFERENCE,
    DatasetFormat.OPENAI_PREFERENCE: DataKind.PREFERENCE,
    DatasetFormat.KTO: DataKind.KTO,
    DatasetFormat.SAMPLES: DataKind.SAMPLES,
}


def kind_of(dataset_format: DatasetFormat) -> DataKind:
    """Return what can be learnt from data of this format: `text` (tokens to predict) from all but those that compare or
    judge answers.

    `auto` is not decided yet, and must not be asked for.
    """
    assert dataset_format is not DatasetFormat.AUTO, "the format is decided before the kind"
    return _KINDS.get(dataset_format, DataKind.TEXT)


@dataclass(frozen=True, kw_only=True)
class _Fields:
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return self.required + self.optional


_FIELDS = {
    DatasetFormat.MESSAGES: _Fields(required=("messages",), optional=("tools",)),
    DatasetFormat.PROMPT_COMPLETION: _Fields(required=("prompt", "completion"), optional=("weight",)),
    DatasetFormat.ALPACA: _Fields(
        required=("instruction", "output"), optional=("input", "system", "history", "weight")
    ),
    DatasetFormat.SHAREGPT: _Fields(required=("conversations",), optional=("system", "tools")),
    DatasetFormat.TEXT: _Fields(required=("text",)),
    DatasetFormat.TOKENS: _Fields(required=("input_ids",), optional=("labels", "attention_mask")),
    DatasetFormat.PREFERENCE: _Fields(required=("chosen", "rejected"), optional=("prompt", "tools")),
    DatasetFormat.OPENAI_PREFERENCE: _Fields(required=("input", "preferred_output", "non_preferred_output")),
    DatasetFormat.KTO: _Fields(required=("prompt", "completion", "label"), optional=("tools",)),
    DatasetFormat.SAMPLES: _Fields(
        required=("tokens", "logprobs"), optional=("advantage", "advantages", "prompt_length", "mask")
    ),
}
_ALL_FIELDS = tuple(dict.fromkeys(name for fields in _FIELDS.values() for name in fields.names))

# A map is in every answer about its dataset, and one message must hold a page of those.
MAX_COLUMN_BYTES = 256


def parse_format(name: str) -> DatasetFormat:
    """Return the format of that name. Raises: InvalidOption for an unknown name."""
    try:
        return DatasetFormat(name)
    except ValueError:
        problem = f"format is {name!r}; it must be one of {', '.join(DatasetFormat)}"
        raise InvalidOption(problem, violations=[FieldViolation(field="format", description=problem)]) from None


def check_field_map(dataset_format: DatasetFormat, field_map: Mapping[str, str]) -> None:
    """Refuse a map of fields to columns that names unknown fields, or one column twice.

    Raises: InvalidOption with one violation for each wrong entry.
    """
    known = _ALL_FIELDS if dataset_format is DatasetFormat.AUTO else _FIELDS[dataset_format].names
    violations = []
    columns: dict[str, str] = {}
    for field, column in field_map.items():
        path = f"field_map.{field}"
        if field not in known:
            problem = f"{path} is not a field of format {dataset_format}; its fields are {', '.join(known)}"
        elif not column:
            problem = f"{path} is empty; it must name a column of the file, as in --map {field}=COLUMN"
        elif len(column.encode("utf-8", "replace")) > MAX_COLUMN_BYTES:
            problem = (
                f"{path} is {column!r:.40}, which is longer than {MAX_COLUMN_BYTES} bytes; give the column a "
                "shorter name"
            )
        elif not column.isprintable():
            problem = (
                f"{path} is {column!r:.40}; it is shown to all who see the dataset, so it must be printable letters"
            )
        elif column in columns:
            problem = (
                f"{path} and field_map.{columns[column]} both name column {column!r}; give each field its own column"
            )
        else:
            columns[column] = field
            continue
        violations.append(FieldViolation(field=path, description=problem))
    if violations:
        raise InvalidOption(violations[0].description, violations=violations)


def detect_format(columns: Collection[str], field_map: Mapping[str, str], place: str) -> DatasetFormat:
    """Return the one format that a row with these columns fits; `place` is where messages say that it is.

    Raises: InvalidFile when a mapped column is missing, and when no format or more than one fits.
    """
    present = listed(columns, none="none")
    for field, column in field_map.items():
        if column not in columns:
            raise InvalidFile(
                f"{place}: there is no column {column!r:.40} for --map {field}={column:.40}; the columns are {present}"
            )
    # A mapped field that a format does not have rules it out, even where all that it needs is there.
    fitting = [
        name
        for name, fields in _FIELDS.items()
        if field_map.keys() <= set(fields.names)
        and all(field_map.get(field, field) in columns for field in fields.required)
    ]
    # Where one of them needs all that another needs and more, it is meant: `kto` is a prompt and a completion with a
    # label.
    needed = {name: set(_FIELDS[name].required) for name in fitting}
    fitting = [name for name in fitting if not any(needed[name] < other for other in needed.values())]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise InvalidFile(
            f"{place}: the columns ({present}) fit the formats {' and '.join(fitting)}; choose one with --format "
            f"{fitting[0]}"
        )
    if "chosen" in columns or "rejected" in columns:
        absent = [
            name for name in _FIELDS[DatasetFormat.PREFERENCE].required if field_map.get(name, name) not in columns
        ]
        raise InvalidFile(
            f"{place}: the row has {present}: for preference, {' and '.join(absent)} "
            f"{'is' if len(absent) == 1 else 'are'} missing; if yours has another name: horizon dataset push FILE "
            f"--map {absent[0]}=COLUMN"
        )
    needs = "; ".join(f"{name} needs {' and '.join(fields.required)}" for name, fields in _FIELDS.items())
    raise InvalidFile(
        f"{place}: the columns ({present}) fit no known format: {needs}; "
        "if yours have other names, name them: horizon dataset push FILE --map prompt=question --map completion=answer"
    )


def require_columns(
    dataset_format: DatasetFormat, columns: Collection[str], field_map: Mapping[str, str], name: str
) -> None:
    """Refuse a table that lacks a column, once for all its rows. Raises: InvalidFile."""
    for field in _FIELDS[dataset_format].names:
        column = field_map.get(field, field)
        if column not in columns and (field in _FIELDS[dataset_format].required or field in field_map):
            raise InvalidFile(
                f"{name} has no column {column!r:.40} for the field {field} of format {dataset_format}; its columns "
                f"are {listed(columns, none='none')}; name another column with --map"
            )


def columns_of(dataset_format: DatasetFormat, field_map: Mapping[str, str]) -> frozenset[str]:
    """Return the columns that rows of this format are made of, under the names that the file gives them."""
    return frozenset(field_map.get(field, field) for field in _FIELDS[dataset_format].names)


# ShareGPT's speaker of a tool call: an assistant whose value is the call, as JSON.
FUNCTION_CALL = "function_call"

# ShareGPT is a habit, not a standard: these are the names that public datasets use.
SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    FUNCTION_CALL: "assistant",
}


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """What a chat calls the speaker and the text of a message, and which role each speaker has."""

    speaker: str
    text: str
    roles: Mapping[str, str]

    @cached_property
    def keys(self) -> frozenset[str]:
        """Every key that a message of this spelling may hold."""
        extras = ("weight", "tool_calls", "name", "tool_call_id", "reasoning_content")
        return frozenset((self.speaker, self.text, *extras))


OPENAI = Spelling(
    speaker="role", text="content", roles={role: role for role in ("system", "user", "assistant", "tool")}
)
_FROM_VALUE = Spelling(speaker="from", text="value", roles=SPEAKERS)
_ROLE_CONTENT = Spelling(speaker="role", text="content", roles=SPEAKERS)


def sharegpt_spelling(message: object) -> Spelling:
    """Return the spelling of one message of a ShareGPT conversation: some files write role and content."""
    return _ROLE_CONTENT if isinstance(message, dict) and "role" in message else _FROM_VALUE


def text_of(content: object) -> str | None:
    """Return the text of a message's content: a string, null, or a list of text parts; None for anything else."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
    return "".join(parts) if all(isinstance(part, str) for part in parts) else None  # type: ignore[arg-type]


def parse_calls(text: str) -> list[dict[str, Any]] | None:
    """Return the function calls that a ShareGPT `function_call` spells out, or None when its text is not a call."""
    try:
        spoken = json.loads(text)
    except (ValueError, RecursionError):
        return None
    calls = spoken if isinstance(spoken, list) else [spoken]
    if not calls or not all(is_call(call) for call in calls) or unwritable(calls):
        return None
    return [{"name": call["name"], "arguments": call.get("arguments")} for call in calls]


def is_call(function: object) -> bool:
    """Whether this is a call of a function: its name, and its arguments as an object, as JSON text of one, or
    absent."""
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return False
    return arguments is None or isinstance(arguments, dict)

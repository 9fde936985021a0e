"""What a row of each format must hold, and the sentence for each way in which it does not.

Owns fields, types and roles. Must not know files, models or tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from horizon_server.datasets.formats import DatasetFormat
from horizon_server.datasets.rows import Row, json_kind
from horizon_server.errors import FieldViolation

ROLES = ("system", "user", "assistant")

_MESSAGE_KEYS = ("role", "content", "weight", "name")

Problem = tuple[str, str]


def check_row(row: Row, dataset_format: DatasetFormat, field_map: Mapping[str, str]) -> list[FieldViolation]:
    """Return everything that is wrong with the row for this format; empty when it is fine."""
    if row.violation is not None:
        return [row.violation]
    checks = {
        DatasetFormat.MESSAGES: _check_messages_row,
        DatasetFormat.PROMPT_COMPLETION: _check_prompt_completion_row,
        DatasetFormat.TEXT: _check_text_row,
    }
    problems = checks[dataset_format](row.columns, field_map)
    violations = []
    for field, problem in problems:
        path = f"line[{row.number}].{field}"
        violations.append(FieldViolation(field=path, description=f"{path} {problem}"))
    return violations


def is_trainable(message: Mapping[str, Any]) -> bool:
    """Tell whether a checked message is an assistant's with text to learn."""
    return message["role"] == "assistant" and bool(message["content"].strip()) and message.get("weight", 1) != 0


def _check_messages_row(columns: Mapping[str, Any], field_map: Mapping[str, str]) -> list[Problem]:
    column = field_map.get("messages", "messages")
    messages = columns.get(column)
    if column not in columns:
        return [_missing(column, columns)]
    if not isinstance(messages, list) or not messages:
        return [(column, f"is {_shown(messages)}; it must be a non-empty list of messages")]
    problems: list[Problem] = []
    for index, message in enumerate(messages):
        problems += _check_message(f"{column}[{index}]", message)
    if not problems and not any(is_trainable(message) for message in messages):
        problems.append((column, "has nothing to learn: no assistant message with text and a weight other than 0"))
    return problems


def _check_message(path: str, message: object) -> list[Problem]:
    if not isinstance(message, dict):
        return [(path, f"is {_shown(message)}; it must be an object with role and content")]
    problems: list[Problem] = []
    role, weight = message.get("role"), message.get("weight", 1)
    if role not in ROLES:
        problems.append((f"{path}.role", f"is {_shown(role)}; it must be one of {', '.join(ROLES)}"))
    problems += _check_string(f"{path}.content", message.get("content"))
    if isinstance(weight, bool) or weight not in (0, 1):
        problems.append((f"{path}.weight", f"is {_shown(weight)}; it must be 0 or 1"))
    problems += [
        (f"{path}.{key:.40}", f"is not understood by this version; a message holds {', '.join(_MESSAGE_KEYS)}")
        for key in message
        if key not in _MESSAGE_KEYS
    ]
    return problems


def _check_prompt_completion_row(columns: Mapping[str, Any], field_map: Mapping[str, str]) -> list[Problem]:
    problems: list[Problem] = []
    for field in ("prompt", "completion"):
        column = field_map.get(field, field)
        if column not in columns:
            problems.append(_missing(column, columns))
            continue
        found = _check_string(column, columns[column])
        if not found and field == "completion" and not columns[column].strip():
            found = [(column, "is empty; there is nothing to learn in this row")]
        problems += found
    return problems


def _check_text_row(columns: Mapping[str, Any], field_map: Mapping[str, str]) -> list[Problem]:
    column = field_map.get("text", "text")
    if column not in columns:
        return [_missing(column, columns)]
    problems = _check_string(column, columns[column])
    if not problems and not columns[column].strip():
        return [(column, "is empty; there is nothing to learn in this row")]
    return problems


def _check_string(path: str, value: object) -> list[Problem]:
    if not isinstance(value, str):
        return [(path, f"is {_shown(value)}; it must be a string")]
    if value.isascii():
        return []
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        return [(path, f"holds half a surrogate pair at character {error.start}; it cannot be written as UTF-8")]
    return []


def _missing(column: str, columns: Mapping[str, Any]) -> Problem:
    shown = ", ".join(f"{column:.40}" for column in sorted(columns)[:12]) or "no columns"
    return (column, f"is missing (the line has {shown}); add it or name another column with --map")


def _shown(value: object) -> str:
    if value is None:
        return "missing or null"
    return f"{value!r:.40}" if isinstance(value, str | int | float) else f"a JSON {json_kind(value)}"

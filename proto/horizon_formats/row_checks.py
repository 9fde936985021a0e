"""What a row of each format must hold, and the message for each way in which it does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from horizon_formats.files import Row
from horizon_formats.formats import DatasetFormat
from horizon_formats.messages import check_messages, check_tools, opens_with_system
from horizon_formats.problems import FieldViolation, Problem, check_learnable, check_string, listed, shown

UNTRAINED = -100
"""The label of a token that is not trained."""

_MAX_TOKEN_ID = 2**31 - 1

Columns = Mapping[str, Any]
FieldMap = Mapping[str, str]


def check_row(row: Row, dataset_format: DatasetFormat, field_map: FieldMap) -> list[FieldViolation]:
    """Return everything that is wrong with the row for this format; empty when it is fine."""
    if row.violation is not None:
        return [row.violation]
    problems = _CHECKS[dataset_format](row.columns, field_map)
    return [row.refusal(problem, field=field) for field, problem in problems] if problems else []


def _check_messages_row(columns: Columns, field_map: FieldMap) -> list[Problem]:
    column = field_map.get("messages", "messages")
    if column not in columns:
        return [_missing(column, columns)]
    problems = check_messages(column, columns[column], sharegpt=False)
    return problems + _check_optional(columns, field_map, "tools", check_tools)


def _check_sharegpt_row(columns: Columns, field_map: FieldMap) -> list[Problem]:
    column = field_map.get("conversations", "conversations")
    if column not in columns:
        return [_missing(column, columns)]
    problems = check_messages(column, columns[column], sharegpt=True)
    problems += _check_optional(columns, field_map, "system", check_string)
    system = field_map.get("system", "system")
    if not problems and columns.get(system) and opens_with_system(columns[column]):
        problems.append((system, f"is given, and {column}[0] is a system message too; keep one of them"))
    return problems + _check_optional(columns, field_map, "tools", check_tools)


def _check_prompt_completion_row(columns: Columns, field_map: FieldMap) -> list[Problem]:
    return [
        *_check_required(columns, field_map, "prompt", check_string),
        *_check_required(columns, field_map, "completion", check_learnable),
    ]


def _check_alpaca_row(columns: Columns, field_map: FieldMap) -> list[Problem]:
    return [
        *_check_required(columns, field_map, "instruction", check_string),
        *_check_required(columns, field_map, "output", check_learnable),
        *_check_optional(columns, field_map, "input", check_string),
        *_check_optional(columns, field_map, "system", check_string),
        *_check_optional(columns, field_map, "history", _check_history),
    ]


def _check_text_row(columns: Columns, field_map: FieldMap) -> list[Problem]:
    return _check_required(columns, field_map, "text", check_learnable)


def _check_tokens_row(columns: Columns, field_map: FieldMap) -> list[Problem]:
    problems = _check_required(columns, field_map, "input_ids", _check_ids)
    if problems:
        return problems
    ids = columns[field_map.get("input_ids", "input_ids")]

    def check_labels(path: str, labels: object) -> list[Problem]:
        return _check_labels(path, labels, ids)

    def check_attention(path: str, mask: object) -> list[Problem]:
        if isinstance(mask, list) and len(mask) == len(ids) and all(value == 1 for value in mask):
            return []
        return [(path, "must be 1 for each token: padding is not data; leave padding tokens out")]

    problems = _check_optional(columns, field_map, "labels", check_labels)
    return problems + _check_optional(columns, field_map, "attention_mask", check_attention)


_CHECKS: dict[DatasetFormat, Callable[[Columns, FieldMap], list[Problem]]] = {
    DatasetFormat.MESSAGES: _check_messages_row,
    DatasetFormat.PROMPT_COMPLETION: _check_prompt_completion_row,
    DatasetFormat.ALPACA: _check_alpaca_row,
    DatasetFormat.SHAREGPT: _check_sharegpt_row,
    DatasetFormat.TEXT: _check_text_row,
    DatasetFormat.TOKENS: _check_tokens_row,
}
Check = Callable[[str, object], list[Problem]]


def _check_required(columns: Columns, field_map: FieldMap, field: str, check: Check) -> list[Problem]:
    column = field_map.get(field, field)
    return check(column, columns[column]) if column in columns else [_missing(column, columns)]


def _check_optional(columns: Columns, field_map: FieldMap, field: str, check: Check) -> list[Problem]:
    column = field_map.get(field, field)
    value = columns.get(column)
    if value is None:
        return [_missing(column, columns)] if field in field_map and column not in columns else []
    return check(column, value)


def _check_history(path: str, history: object) -> list[Problem]:
    if not isinstance(history, list):
        return [(path, f"is {shown(history)}; it must be a list of [instruction, output] pairs")]
    problems: list[Problem] = []
    for index, turn in enumerate(history):
        if not isinstance(turn, list) or len(turn) != 2:
            problems.append((f"{path}[{index}]", f"is {shown(turn)}; it must be a pair [instruction, output]"))
            continue
        problems += check_string(f"{path}[{index}][0]", turn[0])
        problems += check_string(f"{path}[{index}][1]", turn[1])
    return problems


def _check_ids(path: str, ids: object) -> list[Problem]:
    if not isinstance(ids, list) or not ids:
        return [(path, f"is {shown(ids)}; it must be a non-empty list of token ids")]
    if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) > _MAX_TOKEN_ID:
        index = next(i for i, value in enumerate(ids) if type(value) is not int or not 0 <= value <= _MAX_TOKEN_ID)
        return [(f"{path}[{index}]", f"is {shown(ids[index])}; a token id is a whole number from 0 to {_MAX_TOKEN_ID}")]
    if len(ids) == 1:
        return [(path, "holds one token; nothing precedes the first token, so there is nothing to learn in this row")]
    return []


def _check_labels(path: str, labels: object, ids: list[int]) -> list[Problem]:
    if labels == ids:
        return []
    if not isinstance(labels, list) or len(labels) != len(ids):
        size = f"{len(labels)} labels" if isinstance(labels, list) else shown(labels)
        return [(path, f"is {size}; it must be a list as long as input_ids, which has {len(ids)} tokens")]
    for index, (label, token) in enumerate(zip(labels, ids, strict=True)):
        if label != UNTRAINED and (label != token or type(label) is not int):
            return [
                (
                    f"{path}[{index}]",
                    f"is {shown(label)} where input_ids holds {token}; a label is its own token, or {UNTRAINED} for one that is not "
                    "trained: training shifts labels to the next token itself",
                )
            ]
    if all(label == UNTRAINED for label in labels[1:]):
        return [(path, f"has nothing to learn: after the first token every label is {UNTRAINED}")]
    return []


def _missing(column: str, columns: Columns) -> Problem:
    present = listed(columns, none="no columns")
    return (column, f"is missing (the row has {present}); add it or name another column with --map")

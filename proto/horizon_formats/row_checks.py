"""What a row of each format must hold: the fields, and what is wrong with their values. `checks` reads the rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from horizon_formats.formats import (
    FUNCTION_CALL,
    OPENAI,
    SPEAKERS,
    Spelling,
    is_call,
    parse_calls,
    sharegpt_spelling,
    text_of,
)
from horizon_formats.problems import Problem, check_learnable, check_string, listed, shown, unwritable

# The label of a token that is not trained: the one that PyTorch's cross entropy ignores.
UNTRAINED = -100

# Weights of an assistant's message besides 0. What counts less is better left out, and what counts more would be all of
# a step.
MIN_WEIGHT, MAX_WEIGHT = 0.001, 100

# Prepared tokens are kept in 4 bytes each.
_MAX_TOKEN_ID = 2**31 - 1

Columns = Mapping[str, Any]
FieldMap = Mapping[str, str]
Check = Callable[[str, object], list[Problem]]


def check_fields(checks: Mapping[str, tuple[Check, bool]], columns: Columns, field_map: FieldMap) -> list[Problem]:
    """Check these fields of a row, each with its check and whether the row must have it."""
    problems: list[Problem] = []
    for field, (check, required) in checks.items():
        column = field_map.get(field, field)
        value = columns.get(column)
        # Null is absent: tables write it where other rows have a value. A column that the map names must be there all
        # the same.
        if value is not None or (required and column in columns):
            problems += check(column, value)
        elif column not in columns and (required or field in field_map):
            problems.append(missing(column, columns))
    return problems


def check_answer_row(checks: Mapping[str, tuple[Check, bool]], columns: Columns, field_map: FieldMap) -> list[Problem]:
    """Return everything that is wrong with a row of a question and its answer, which may have a weight."""
    problems = check_fields(checks, columns, field_map)
    weight = field_map.get("weight", "weight")
    if not problems and columns.get(weight) == 0 and not columns.get(field_map.get("history", "history")):
        problems.append((weight, "is 0, so there is nothing to learn in this row; leave the row out"))
    return problems


def missing(column: str, columns: Columns) -> Problem:
    """Return the problem of a column that the row lacks."""
    present = listed(columns, none="no columns")
    return column, f"is missing (the row has {present}); add it or name another column with --map"


def check_chat_row(columns: Columns, field_map: FieldMap, *, sharegpt: bool) -> list[Problem]:
    """Return everything that is wrong with a row of `messages` or `sharegpt`."""
    field = "conversations" if sharegpt else "messages"
    column = field_map.get(field, field)
    if column not in columns:
        return [missing(column, columns)]
    problems = check_messages(column, columns[column], sharegpt=sharegpt)
    if sharegpt:
        problems += check_fields(_SYSTEM, columns, field_map)
        system = field_map.get("system", "system")
        if not problems and columns.get(system):
            first = columns[column][0]
            if first[sharegpt_spelling(first).speaker] == "system":
                problems.append((system, f"is given, and {column}[0] is a system message too; keep one of them"))
    return problems + check_fields(TOOLS, columns, field_map)


def check_prompt_row(columns: Columns) -> list[Problem]:
    """Return everything that is wrong with a chat that is to be answered: a row of `messages`, of which nothing need be
    trained."""

    def check_chat(path: str, messages: object) -> list[Problem]:
        if not isinstance(messages, list) or not messages:
            return [(path, f"is {shown(messages)}; it must be a non-empty list of messages")]
        found = ((index, check_message(message, OPENAI)) for index, message in enumerate(messages))
        return [(f"{path}[{index}]{key}", problem) for index, problems in found for key, problem in problems]

    return check_fields({"messages": (check_chat, True), **TOOLS}, columns, {})


def check_tokens_row(columns: Columns, field_map: FieldMap) -> list[Problem]:
    """Return everything that is wrong with a row of `tokens`."""
    problems = check_fields({"input_ids": (check_ids, True)}, columns, field_map)
    if problems:
        return problems
    ids: list[int] = columns[field_map.get("input_ids", "input_ids")]

    def check_labels(path: str, labels: object) -> list[Problem]:
        if labels == ids:
            return []
        if not isinstance(labels, list) or len(labels) != len(ids):
            size = f"{len(labels)} labels" if isinstance(labels, list) else shown(labels)
            return [(path, f"is {size}; it must be a list as long as input_ids, which has {len(ids)} tokens")]
        for index, (label, token) in enumerate(zip(labels, ids, strict=True)):
            if label != UNTRAINED and (label != token or type(label) is not int):
                # Labels that were shifted already look like data and would train the wrong thing.
                problem = (
                    f"is {shown(label)} where input_ids holds {token}; a label is its own token, or {UNTRAINED} for "
                    "one that is not "
                    "trained: training shifts labels to the next token itself"
                )
                return [(f"{path}[{index}]", problem)]
        if all(label == UNTRAINED for label in labels[1:]):
            return [(path, f"has nothing to learn: after the first token every label is {UNTRAINED}")]
        return []

    def check_attention(path: str, mask: object) -> list[Problem]:
        if isinstance(mask, list) and len(mask) == len(ids) and all(value == 1 for value in mask):
            return []
        return [(path, "must be 1 for each token: padding is not data; leave padding tokens out")]

    optional = {"labels": (check_labels, False), "attention_mask": (check_attention, False)}
    return check_fields(optional, columns, field_map)


def check_ids(path: str, ids: object) -> list[Problem]:
    """Return what is wrong with a list of token ids."""
    if not isinstance(ids, list) or not ids:
        return [(path, f"is {shown(ids)}; it must be a non-empty list of token ids")]
    # Long lists are common, and these three run in C; the bad element is searched for only where there is one.
    if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) > _MAX_TOKEN_ID:
        index = next(i for i, value in enumerate(ids) if type(value) is not int or not 0 <= value <= _MAX_TOKEN_ID)
        return [(f"{path}[{index}]", f"is {shown(ids[index])}; a token id is a whole number from 0 to {_MAX_TOKEN_ID}")]
    if len(ids) == 1:
        return [(path, "holds one token; nothing precedes the first token, so there is nothing to learn in this row")]
    return []


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


def check_tools(path: str, tools: object) -> list[Problem]:
    """Return what is wrong with the tools a chat may call: a list of JSON objects, or that list as JSON text."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            return [(path, f"is a string that is not JSON ({error}); it must be a list of tool descriptions")]
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        return [(path, f"is {shown(tools)}; it must be a list of tool descriptions, each a JSON object")]
    problem = unwritable(tools)
    return [(path, problem)] if problem else []


def check_messages(path: str, messages: object, *, sharegpt: bool) -> list[Problem]:
    """Return everything that is wrong with the messages at `path`; empty when there is something to learn in them."""
    if not isinstance(messages, list) or not messages:
        return [(path, f"is {shown(messages)}; it must be a non-empty list of messages")]
    problems: list[Problem] = []
    learnable = False
    for index, message in enumerate(messages):
        spelling = sharegpt_spelling(message) if sharegpt else OPENAI
        if found := check_message(message, spelling):
            problems += [(f"{path}[{index}]{key}", problem) for key, problem in found]
        elif not learnable and spelling.roles[message[spelling.speaker]] == "assistant" and message.get("weight") != 0:
            text = text_of(message.get(spelling.text)) or ""
            learnable = bool(message.get("tool_calls")) or bool(text.strip())
    if not problems and not learnable:
        problems.append((path, "has nothing to learn: no assistant message with text and a weight other than 0"))
    return problems


def check_message(message: object, spelling: Spelling) -> list[Problem]:
    """Return everything that is wrong with one message of a chat; paths are within it."""
    if not isinstance(message, dict):
        return [("", f"is {shown(message)}; it must be an object with {spelling.speaker} and {spelling.text}")]
    speaker, content = message.get(spelling.speaker), message.get(spelling.text)
    problems: list[Problem] = []
    if not isinstance(speaker, str) or speaker not in spelling.roles:
        allowed = ", ".join(spelling.roles)
        problems.append((f".{spelling.speaker}", f"is {shown(speaker)}; it must be one of {allowed}"))
    text = content if type(content) is str else text_of(content)
    # Null is a text only where the message calls tools instead: elsewhere the text was lost.
    if text is not None and (content is not None or message.get("tool_calls")):
        problems += check_string(f".{spelling.text}", text)
    else:
        problems.append((f".{spelling.text}", f"is {shown(content)}; it must be a string or a list of text parts"))
    # Most messages hold a speaker and a text alone; the rest is looked at only where there is some.
    if len(message) > 2 or content is None:
        problems += _check_extras(message, spelling)
    if speaker == FUNCTION_CALL and isinstance(content, str) and parse_calls(content) is None:
        problems.append(
            (f".{spelling.text}", 'is not a tool call; it must be JSON such as {"name": ..., "arguments": ...}')
        )
    return problems


def _check_extras(message: Mapping[str, Any], spelling: Spelling) -> Iterator[Problem]:
    """Yield what is wrong apart from speaker and text. Null is absent: tables write it where other rows have a
    value."""
    for key, value in message.items():
        if value is None or key == spelling.speaker or key == spelling.text:
            continue
        if key not in spelling.keys:
            held = ", ".join(sorted(spelling.keys))
            yield f".{key:.40}", f"is not understood by this version; a message holds {held}"
        elif key == "weight":
            if problem := _weight_problem(value, message.get(spelling.speaker)):
                yield ".weight", problem
        elif key == "tool_calls":
            yield from _check_calls(value, message.get(spelling.speaker))
        else:
            yield from check_string(f".{key}", value)


def _check_weight(path: str, weight: object) -> list[Problem]:
    problem = _weight_problem(weight, "assistant")
    return (
        [(path, f"{problem}: it says how much the answer counts; rename a column that means something else")]
        if problem
        else []
    )


def _weight_problem(weight: object, speaker: object) -> str:
    # True and False are 1 and 0 in Python.
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if is_number and weight in (0, 1):
        return ""
    if SPEAKERS.get(str(speaker)) != "assistant":
        return f"is {shown(weight)}; it must be 0 or 1: only an assistant's message can be weighted otherwise"
    # A NaN, which tables may hold, is in no range.
    if is_number and MIN_WEIGHT <= weight <= MAX_WEIGHT:  # type: ignore[operator]
        return ""
    return f"is {shown(weight)}; it must be 0, or a number from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"


def _check_calls(calls: object, speaker: object) -> Iterator[Problem]:
    if not isinstance(calls, list):
        yield ".tool_calls", f"is {shown(calls)}; it must be a list of calls"
        return
    if calls and SPEAKERS.get(str(speaker)) != "assistant":
        yield ".tool_calls", "is given, but only an assistant calls tools"
    for index, call in enumerate(calls):
        path = f".tool_calls[{index}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            yield path, 'must be an object such as {"function": {"name": ..., "arguments": ...}}'
        elif problem := unwritable(call):
            yield path, problem
        elif not is_call(function):
            yield f"{path}.function.arguments", "must be a JSON object, or a string that holds one"


_SYSTEM: dict[str, tuple[Check, bool]] = {"system": (check_string, False)}
_WEIGHT: dict[str, tuple[Check, bool]] = {"weight": (_check_weight, False)}
TOOLS: dict[str, tuple[Check, bool]] = {"tools": (check_tools, False)}
# Of a prompt, an instruction or an input nothing is trained, so it may be blank.
PAIR: dict[str, tuple[Check, bool]] = {"prompt": (check_string, True), "completion": (check_learnable, True), **_WEIGHT}
ALPACA: dict[str, tuple[Check, bool]] = {
    "instruction": (check_string, True),
    "output": (check_learnable, True),
    "input": (check_string, False),
    **_SYSTEM,
    "history": (_check_history, False),
    **_WEIGHT,
}

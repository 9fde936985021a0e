"""What a row of `preference`, `openai-preference`, `kto` and `samples` must hold."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

from horizon_formats.answers import as_preference, compared, of_targets
from horizon_formats.formats import OPENAI
from horizon_formats.problems import Problem, check_learnable, check_string, shown
from horizon_formats.row_checks import (
    TOOLS,
    Check,
    Columns,
    FieldMap,
    check_fields,
    check_ids,
    check_message,
    check_messages,
    missing,
)

# Prepared numbers are kept in 4 bytes each.
_MAX_NUMBER = 3.4028234e38


def check_preference_row(columns: Columns, field_map: FieldMap) -> list[Problem]:
    """Return everything that is wrong with a prompt, or none, and the two answers to compare."""
    problems = check_fields(_PREFERENCE, columns, field_map)
    if problems:
        return problems
    prompt, chosen, rejected = (columns.get(field_map.get(name, name)) for name in ("prompt", "chosen", "rejected"))
    found = compared(prompt, chosen, rejected)  # type: ignore[arg-type]  # both answers are there
    if isinstance(found, str):
        field, _, problem = found.partition(" ")
        return [(field_map.get(field, field), problem)]
    if found.chosen == found.rejected:
        return [(field_map.get("rejected", "rejected"), "is the same as chosen; there is nothing to prefer")]
    return []


def check_openai_preference_row(columns: Columns, field_map: FieldMap) -> list[Problem]:
    """Return everything that is wrong with a row of OpenAI's: a chat as input, and the two answers to compare."""
    column = field_map.get("input", "input")
    if column not in columns:
        return [missing(column, columns)]
    given = columns[column]
    if not isinstance(given, dict) or not isinstance(given.get("messages"), list):
        return [(column, f"is {shown(given)}; it must be an object with messages, a list of messages")]
    row, names = as_preference(columns, field_map)
    for answer in (names["chosen"], names["rejected"]):
        if answer not in columns:
            return [missing(answer, columns)]
        if not isinstance(columns[answer], list):
            return [(answer, f"is {shown(columns[answer])}; it must be a list of messages, the assistant's answer")]
    return check_preference_row(row, names)


def check_kto_row(columns: Columns, field_map: FieldMap) -> list[Problem]:
    """Return everything that is wrong with a prompt, its completion, and whether that is desirable."""
    problems = check_fields(_KTO, columns, field_map)
    completion = field_map.get("completion", "completion")
    if not problems and not isinstance(columns[completion], str) and columns[completion][0]["role"] != "assistant":
        problems.append((f"{completion}[0].role", "must be assistant: a completion is the reply to the prompt"))
    return problems


def check_samples_row(columns: Columns, field_map: FieldMap) -> list[Problem]:
    """Return everything that is wrong with recorded tokens, their log-probabilities and advantages."""
    problems = check_fields(_SAMPLES, columns, field_map)
    if problems:
        return problems

    def given(field: str) -> Any:
        return columns.get(field_map.get(field, field))

    tokens = given("tokens")
    for one, other, what in (
        ("prompt_length", "mask", "which tokens were sampled"),
        ("advantage", "advantages", "how good the sample is"),
    ):
        if (given(one) is None) == (given(other) is None):
            problems.append((one, f"or {other} says {what}; give one of the two"))
    if problems:
        return problems
    if given("mask") is None:
        length = given("prompt_length")
        if length >= len(tokens):
            return [
                (
                    field_map.get("prompt_length", "prompt_length"),
                    f"is {length} and the row has {len(tokens)} tokens; at least one must follow the prompt",
                )
            ]
        mask = [0] * length + [1] * (len(tokens) - length)
    else:
        mask = list(map(int, given("mask")))
        column = field_map.get("mask", "mask")
        if len(mask) != len(tokens):
            return [(column, f"has {len(mask)} elements; it must have one for each of the {len(tokens)} tokens")]
        if mask[0]:
            return [(f"{column}[0]", "is 1; it must be 0: nothing precedes the first token, so it was not sampled")]
        if not any(mask):
            return [(column, "is 0 for every token; there is nothing to learn in this row")]
    for field in ("logprobs", "advantages"):
        values, column = given(field), field_map.get(field, field)
        if values is not None:
            problems += _check_numbers(column, values, mask, is_logprob=field == "logprobs")
    return problems


def _check_numbers(path: str, values: Sequence[Any], mask: Sequence[int], *, is_logprob: bool) -> list[Problem]:
    numbers = of_targets(values, mask)
    if numbers is None:
        return [
            (
                path,
                f"has {len(values)} elements; it must have one for each of the {sum(mask)} sampled tokens, or for each "
                f"of all {len(mask)} tokens",
            )
        ]
    for index, value in enumerate(numbers):
        if problem := _number_problem(value):
            return [(path, f"holds {shown(value)} for sampled token {index}; {problem}")]
        if is_logprob and value > 0:
            return [(path, f"holds {shown(value)} for sampled token {index}; a log-probability is at most 0")]
    return []


def _number_problem(value: object) -> str:
    # True and False are numbers in Python.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "it must be a number"
    return "" if abs(value) <= _MAX_NUMBER and isfinite(value) else "it must be a finite number of 4 bytes"


def _check_prompt(path: str, prompt: object) -> list[Problem]:
    if not isinstance(prompt, list):
        if isinstance(prompt, str):
            return check_string(path, prompt)
        return [(path, f"is {shown(prompt)}; it must be a text or a list of messages")]
    if not prompt:
        return [(path, "is empty; it must be a text or a non-empty list of messages")]
    problems = [
        (f"{path}[{index}]{key}", problem)
        for index, message in enumerate(prompt)
        for key, problem in check_message(message, OPENAI)
    ]
    # A weight of 0 or 1 of what is not trained says nothing, and many files have it.
    problems = problems or [
        (f"{path}[{index}].weight", f"is {shown(message['weight'])}; no prompt is trained, so leave weight out")
        for index, message in enumerate(prompt)
        if message.get("weight") not in (None, 0, 1)
    ]
    if not problems and prompt[-1]["role"] == "assistant":
        return [(f"{path}[{len(prompt) - 1}].role", "is 'assistant'; a prompt ends before the assistant's reply")]
    return problems


def _check_answer(path: str, answer: object) -> list[Problem]:
    """Return what is wrong with a reply: a text, or messages; also of a conversation that has the prompt in it."""
    if not isinstance(answer, list):
        if isinstance(answer, str):
            return check_learnable(path, answer)
        return [(path, f"is {shown(answer)}; it must be a text or a list of messages")]
    problems = check_messages(path, answer, sharegpt=False)
    if problems:
        return problems
    # Objectives take the probability of a whole answer: a turn that is left out or weighted would compare something
    # else.
    return [
        (
            f"{path}[{index}].weight",
            f"is {shown(message['weight'])}; all of an answer counts alike, so leave weight out",
        )
        for index, message in enumerate(answer)
        if message.get("weight") not in (None, 1)
    ]


def _check_label(path: str, label: object) -> list[Problem]:
    if isinstance(label, bool) or (type(label) is int and label in (0, 1)):
        return []
    return [(path, f"is {shown(label)}; it must be true or 1 (desirable), or false or 0 (undesirable)")]


def _check_list(path: str, values: object) -> list[Problem]:
    return [] if isinstance(values, list) else [(path, f"is {shown(values)}; it must be a list of numbers")]


def _check_mask(path: str, mask: object) -> list[Problem]:
    if isinstance(mask, list) and all(type(value) in (int, bool) and value in (0, 1) for value in mask):
        return []
    return [(path, f"is {shown(mask)}; it must be a list with 1 for each sampled token and 0 for each other")]


def _check_number(path: str, value: object) -> list[Problem]:
    problem = _number_problem(value)
    return [(path, f"is {shown(value)}; {problem}")] if problem else []


def _check_length(path: str, length: object) -> list[Problem]:
    if type(length) is int and length >= 1:
        return []
    return [(path, f"is {shown(length)}; it must be the number of tokens before the first sampled one, at least 1")]


_PREFERENCE: dict[str, tuple[Check, bool]] = {
    "prompt": (_check_prompt, False),
    "chosen": (_check_answer, True),
    "rejected": (_check_answer, True),
    **TOOLS,
}
_KTO: dict[str, tuple[Check, bool]] = {
    "prompt": (_check_prompt, True),
    "completion": (_check_answer, True),
    "label": (_check_label, True),
    **TOOLS,
}
_SAMPLES: dict[str, tuple[Check, bool]] = {
    "tokens": (check_ids, True),
    "logprobs": (_check_list, True),
    "advantage": (_check_number, False),
    "advantages": (_check_list, False),
    "prompt_length": (_check_length, False),
    "mask": (_check_mask, False),
}

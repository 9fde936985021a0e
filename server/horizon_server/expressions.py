"""Regular expressions that users write, over names of tensors and answers of models: in bounded time and memory,
wherever they run.

Python's `re` backtracks: there are short expressions whose search never ends. RE2 takes time linear in the text and
bounded memory, and refuses what it would compile to more. It has no look-around and no references back, which neither
names nor answers need.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import re2

from horizon_server.errors import InvalidSpec

NOT = "!"
"""Before an expression of a list that takes names away."""
MAX_NAME_CHARS = 1024
"""What of a tensor's name is looked at. A model folder may have names of any length."""

_MEMORY_BYTES = 8 << 20
_SHOWN_NAMES = 3
_COMMA_IN_NUMBER = re.compile(r"(?<=[0-9]),(?=[0-9])")


def problem_of(expression: str) -> str:
    """Return why an expression cannot be used, as the part of a message after its field; empty where it can."""
    try:
        _compiled(expression)
    except re2.error as error:
        # RE2 gives its messages as bytes.
        reason = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else str(error)
        return f"holds {expression!r}, which is not a regular expression that can be used (syntax of RE2): {reason}"
    return ""


def fitting_names(field: str, expression: str, names: Sequence[str]) -> list[str]:
    """Return the names that an expression without a problem is found in (anywhere, not as a whole), in their order.

    Raises:
        InvalidSpec: it fits no name.
    """
    pattern = _compiled(expression)
    if found := [name for name in names if pattern.search(name[:MAX_NAME_CHARS])]:
        return found
    shown = names[:: max(1, len(names) // _SHOWN_NAMES)][:_SHOWN_NAMES]
    examples = ", ".join(name[:MAX_NAME_CHARS] for name in shown)
    raise InvalidSpec.of(
        field,
        f"{field}: {expression!r} fits none of the model's {len(names)} tensors, whose names are such as {examples}",
    )


def chosen_names(field: str, expressions: Sequence[str], names: Sequence[str], *, to: str) -> set[str]:
    """Return the names that the expressions leave, each in turn adding names or, after a NOT, taking them away.

    The first one being a NOT, all names are there before it. `to` says in a message what they are chosen for.

    Raises:
        InvalidSpec: an expression fits no name, or no name is left.
    """
    chosen = set(names) if expressions[0].startswith(NOT) else set[str]()
    for expression in expressions:
        found = fitting_names(field, expression.removeprefix(NOT), names)
        chosen = chosen.difference(found) if expression.startswith(NOT) else chosen.union(found)
    if not chosen:
        raise InvalidSpec.of(field, f"{field}: nothing is left to {to} after {expressions[-1]!r}; leave a tensor")
    return chosen


def problem_with_extraction(expression: str) -> str:
    """Return why an expression cannot find answers, as `problem_of` does: it needs a group."""
    if problem := problem_of(expression):
        return problem
    if not _compiled(expression).groups:
        return (
            f"holds {expression!r}, which has no group; put parentheses around the part that is the answer: #### "
            "(-?[0-9.,]+)"
        )
    return ""


def final_answer(expression: str, text: str) -> str | None:
    """Return the first group of the last match in a text, without white space around it and without commas between
    digits.

    None where there is no match, or its group took no part in it.
    """
    found: str | None = None
    for match in _compiled(expression).finditer(text):
        found = match.group(1)
    return None if found is None else _COMMA_IN_NUMBER.sub("", found.strip())


@lru_cache(maxsize=64)
def _compiled(expression: str) -> Any:
    options = re2.Options()
    options.max_mem = _MEMORY_BYTES
    options.log_errors = False
    return re2.compile(expression, options)

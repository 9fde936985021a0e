"""Regular expressions that users write, over the names of a model's tensors: in bounded time and memory, wherever they run.

`regex` runs them and not `re`, whose search cannot be stopped: some expressions backtrack for longer than anyone lives. A time limit is
not enough: a recursive expression takes a gigabyte in two seconds, and counts within counts take all memory before the first search.
So these are refused, with everything else that no tensor's name needs.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence

import regex

from horizon_server.errors import InvalidSpec

TIMEOUT_S = 2.0
"""For all expressions of a field over all names together."""
MAX_REPETITIONS = 1000
"""The product of all counts of an expression, such as 12 of `(a{3}b{4})`: `regex` writes them out."""
MAX_NAME_CHARS = 1024
"""What of a tensor's name is looked at. A model folder may have names of any length."""

_SHOWN_NAMES = 3
_ESCAPED = re.compile(r"\\.", re.DOTALL)
# Recursion, fuzzy matching, changes of the dialect and conditions begin with (? too.
_OTHER_GROUP = re.compile(r"\((?:\?(?!:|=|!|<=|<!|i\))|\*)")
_COUNT = re.compile(r"\{([^}]*)\}")
_PLAIN_COUNT = re.compile(r"([0-9]{0,9})(?:,([0-9]{0,9}))?")


def problem_of(expression: str) -> str:
    """Return why an expression cannot be used, as the part of a message after its field; empty where it can."""
    plain = _ESCAPED.sub("", expression)
    if found := _OTHER_GROUP.search(plain):
        example = plain[found.start() :][:4]
        return f"holds {expression!r}; of the groups with (?, only (?:, (?=, (?!, (?<=, (?<! and (?i) are allowed, not {example!r}"
    counts = []
    for count in _COUNT.findall(plain):
        numbers = _PLAIN_COUNT.fullmatch(count)
        if numbers is None:
            return f"holds {expression!r}; only numbers are allowed in {{}}, not {count!r}"
        counts.append(max(1, *(int(number) for number in numbers.groups() if number), 1))
    if math.prod(counts) > MAX_REPETITIONS:
        return f"holds {expression!r}, whose counts in {{}} multiply to {math.prod(counts)}; at most {MAX_REPETITIONS} are allowed"
    try:
        regex.compile(expression)
    except regex.error as error:
        return f"holds {expression!r}, which is not a regular expression: {error}"
    return ""


def fitting_names(field: str, expressions: Sequence[str], names: Sequence[str]) -> list[list[str]]:
    """Return for each expression without a problem the names that it is found in (anywhere, not as a whole), in their order.

    Raises:
        InvalidSpec: an expression fits no name, or all together take longer than `TIMEOUT_S`.
    """
    deadline_s = time.monotonic() + TIMEOUT_S
    return [_fitting(field, expression, names, deadline_s) for expression in expressions]


def _fitting(field: str, expression: str, names: Sequence[str], deadline_s: float) -> list[str]:
    assert not problem_of(expression), "the spec has refused it"
    pattern = regex.compile(expression)
    found = []
    for name in names:
        left_s = deadline_s - time.monotonic()
        try:
            if left_s <= 0:
                raise TimeoutError
            # Concurrent: the daemon's other threads continue meanwhile.
            if pattern.search(name[:MAX_NAME_CHARS], concurrent=True, timeout=left_s):
                found.append(name)
        except TimeoutError as error:
            problem = "takes too long to compare with the tensors' names; write it without nested repetitions"
            raise InvalidSpec.of(field, f"{field}: {expression!r} {problem}") from error
    if not found:
        examples = ", ".join(
            name[:MAX_NAME_CHARS] for name in names[:: max(1, len(names) // _SHOWN_NAMES)][:_SHOWN_NAMES]
        )
        problem = f"fits none of the model's {len(names)} tensors, whose names are such as {examples}"
        raise InvalidSpec.of(field, f"{field}: {expression!r} {problem}")
    return found

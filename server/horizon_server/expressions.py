"""Regular expressions that users write, over the names of a model's tensors: in bounded time and memory, wherever they run.

Python's `re` and `regex` backtrack: there are short expressions whose search never ends, or whose counts take all memory. The engine
that pydantic checks patterns with (Rust's regex) takes time linear in the text, and refuses what it would compile to more than 10 MiB.
It has no look-around and no references back, which no name needs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from pydantic_core import SchemaError, SchemaValidator, core_schema

from horizon_server.errors import InvalidSpec

MAX_REPETITIONS = 100
"""The product of all counts of an expression, such as 12 of `(a{3}b{4})`, which are written out where it is compiled."""
MAX_NAME_CHARS = 1024
"""What of a tensor's name is looked at. A model folder may have names of any length."""

_SHOWN_NAMES = 3
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_COUNT = re.compile(r"\{\s*([0-9]*)\s*(?:,\s*([0-9]*)\s*)?\}")


def problem_of(expression: str) -> str:
    """Return why an expression cannot be used, as the part of a message after its field; empty where it can."""
    counts = [max(1, *(int(number or 1) for number in found)) for found in _COUNT.findall(_ESCAPED.sub("", expression))]
    if math.prod(counts) > MAX_REPETITIONS:
        return f"holds {expression!r}, whose counts in {{}} multiply to {math.prod(counts)}; at most {MAX_REPETITIONS} are allowed"
    try:
        _compiled(expression)
    except SchemaError as error:
        # After a drawing of the place.
        reason = str(error).strip().splitlines()[-1].removeprefix("error: ").strip()
        return f"holds {expression!r}, which is not a regular expression that can be used: {reason}"
    return ""


def fitting_names(field: str, expression: str, names: Sequence[str]) -> list[str]:
    """Return the names that an expression without a problem is found in (anywhere, not as a whole), in their order.

    Raises:
        InvalidSpec: it fits no name.
    """
    pattern = _compiled(expression)
    if found := [name for name in names if pattern.isinstance_python(name[:MAX_NAME_CHARS])]:
        return found
    shown = names[:: max(1, len(names) // _SHOWN_NAMES)][:_SHOWN_NAMES]
    examples = ", ".join(name[:MAX_NAME_CHARS] for name in shown)
    raise InvalidSpec.of(
        field,
        f"{field}: {expression!r} fits none of the model's {len(names)} tensors, whose names are such as {examples}",
    )


def _compiled(expression: str) -> SchemaValidator:
    return SchemaValidator(core_schema.str_schema(pattern=expression, regex_engine="rust-regex"))

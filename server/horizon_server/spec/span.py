"""How many devices or nodes a job wants: one number, or a range of which it takes what is free."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from horizon_server.spec.fields import MAX_LANES
from horizon_server.spec.words import RULE

_RANGE = re.compile(r"([0-9]{1,2})-([0-9]{1,2})", re.ASCII)
_RANGE_RULE = "a range of them such as 2-8"
_RULE = f"a whole number from 1 to {MAX_LANES}, or {_RANGE_RULE}"


@dataclass(frozen=True, kw_only=True)
class Span:
    """At least and at most how many a job computes on; both are the same where it wants that many exactly."""

    least: int = 1
    most: int = 1

    @property
    def is_range(self) -> bool:
        """Whether it may compute on different numbers of them."""
        return self.most > self.least

    @property
    def plain(self) -> int | str:
        """As it is written in a job file: 4, or 2-8."""
        return f"{self.least}-{self.most}" if self.is_range else self.least

    def at_most(self, limit: int) -> Span:
        """The same with at most `limit`, which a refusal proposes."""
        least = min(self.least, limit) if self.is_range else limit
        return Span(least=least, most=limit)

    def within(self, limit: int) -> range:
        """The numbers that are possible where there are `limit`, the smallest first."""
        return range(self.least, min(self.most, limit) + 1)


def _read(given: Any) -> Span:
    if isinstance(given, Span):
        return given
    found = _RANGE.fullmatch(given) if isinstance(given, str) else None
    if found is not None:
        least, most = int(found[1]), int(found[2])
    elif isinstance(given, int) and not isinstance(given, bool):
        least = most = given
    else:
        least = most = 0
    if 1 <= most < least <= MAX_LANES:
        raise ValueError(f"is {given!r}; the smaller number comes first: use {most}-{least}")
    if not 1 <= least <= most <= MAX_LANES:
        raise ValueError(f"is {given!r:.60}; it must be {_RULE}")
    return Span(least=least, most=most)


SpanField = Annotated[
    Span,
    PlainValidator(_read),
    PlainSerializer(lambda given: given.plain, return_type=int | str),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1, "maximum": MAX_LANES},
                {"type": "string", "pattern": f"^{_RANGE.pattern}$", RULE: _RANGE_RULE},
            ]
        }
    ),
]
"""The field of a spec: a whole number, or a text with a range."""

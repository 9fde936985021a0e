"""The fields that rows of each dataset format need: enough to tell on the laptop a file that the server would refuse.

Looks at the columns of a row and whether each required one is a text or a list. What is inside them is the server's to judge.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

AUTO = "auto"
TEXT = "text"

_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}


@dataclass(frozen=True, kw_only=True)
class _Fields:
    required: Mapping[str, type]
    optional: tuple[str, ...] = ()

    def fit(self, row: Mapping[str, Any], field_map: Mapping[str, str]) -> bool:
        known = all(field in self.required or field in self.optional for field in field_map)
        return known and all(field_map.get(field, field) in row for field in self.required)


_FORMATS = {
    "messages": _Fields(required={"messages": list}, optional=("tools",)),
    "prompt-completion": _Fields(required={"prompt": str, "completion": str}),
    "alpaca": _Fields(required={"instruction": str, "output": str}, optional=("input", "system", "history")),
    "sharegpt": _Fields(required={"conversations": list}, optional=("system", "tools")),
    TEXT: _Fields(required={"text": str}),
    "tokens": _Fields(required={"input_ids": list}, optional=("labels", "attention_mask")),
}


class RowFields:
    """What the rows of one file must have. With `auto` the first row decides, as it does on the server."""

    def __init__(self, format: str, field_map: Mapping[str, str]) -> None:  # noqa: A002 - the name users know
        self.format = format
        self._field_map = field_map

    @property
    def decided(self) -> bool:
        """Whether the format is known by now."""
        return self.format != AUTO

    def problems(self, row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield the columns that are wrong, with the rest of the sentence; the empty column stands for the row."""
        if self.format == AUTO:
            fitting = [name for name, fields in _FORMATS.items() if fields.fit(row, self._field_map)]
            if len(fitting) != 1:
                yield "", _ambiguous(row, fitting)
                return
            self.format = fitting[0]
        for field, kind in _FORMATS[self.format].required.items():
            column = self._field_map.get(field, field)
            value = row.get(column)
            if column not in row:
                yield column, f"is missing (the row has {_names(row)}); add it or name another column with --map"
            elif not isinstance(value, kind) or (kind is list and not value):
                what = "an empty list" if value == [] else _KINDS.get(type(value), "a number")
                wanted = "a list with something in it" if kind is list else "a string"
                yield column, f"is {what}; it must be {wanted}"


def _ambiguous(row: Mapping[str, Any], fitting: list[str]) -> str:
    if fitting:
        return f"the columns ({_names(row)}) fit the formats {' and '.join(fitting)}; say which one with --format {fitting[0]}"
    needs = "; ".join(f"{name} needs {' and '.join(fields.required)}" for name, fields in _FORMATS.items())
    return f"the columns ({_names(row)}) fit no known format: {needs}; rename columns with --map, as in --map prompt=question"


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{column:.40}" for column in sorted(row)[:12]) or "none"

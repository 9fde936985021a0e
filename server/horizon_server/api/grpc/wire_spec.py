"""Choices of a preview on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def from_enums(wire: Any, enums: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of those that are set; a number that a newer client sent is left to the parser to refuse."""
    plain: dict[str, str] = {}
    for name, enum in enums.items():
        number = getattr(wire, name)
        if number in enum.values():
            text = enum.Name(number).removeprefix(name.upper() + "_")
            plain[name] = text.lower().replace("_", "-")
        else:
            plain[name] = str(number)
    return {name: value for name, value in plain.items() if value != "unspecified"}


def to_enums(spec: Any, wire: Any, enums: Mapping[str, Any]) -> None:
    """Set the fields of `wire` that are enumerations from the attributes of `spec` that have the same names."""
    for name, enum in enums.items():
        setattr(wire, name, enum.Value((name.upper() + "_") + getattr(spec, name).upper().replace("-", "_")))

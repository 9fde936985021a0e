"""One file of a dataset, and what readers make of it: rows, or pieces of text.

Must not open a file. The bounds of all readers stand here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horizon_server.datasets.values import writable
from horizon_server.errors import FieldViolation

MAX_ROW_BYTES = 16 * 1024 * 1024
"""The longest row, in bytes of its JSON or of its table cells."""


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """One file of a dataset: where its bytes are, and the name its user knows it by."""

    path: Path
    name: str

    @classmethod
    def at(cls, path: Path, *, name: str | None = None) -> DataFile:
        """Return the file at `path`, called by its own name unless another is given."""
        return cls(path=path, name=name or path.name)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row: its columns, or the reason why it has none."""

    number: int
    columns: Mapping[str, Any]
    num_bytes: int = 0
    violation: FieldViolation | None = None
    unit: str = "line"
    """What is counted: lines of a text, or the rows of a table or array."""

    @property
    def path(self) -> str:
        """Where it is in its file, as violations name it: `line[17]`."""
        return f"{self.unit}[{self.number}]"

    def refusal(self, problem: str, *, field: str = "") -> FieldViolation:
        """Return the violation that says `problem` of the row, or of one of its fields."""
        path = writable(f"{self.path}.{field}") if field else self.path
        return FieldViolation(field=path, description=f"{path} {problem}")

    @classmethod
    def refused(cls, number: int, problem: str, *, unit: str = "line") -> Row:
        """Return a row that could not be read, for this reason."""
        path = f"{unit}[{number}]"
        violation = FieldViolation(field=path, description=f"{path} {problem}")
        return cls(number=number, columns={}, violation=violation, unit=unit)


@dataclass(frozen=True, kw_only=True)
class TextPiece:
    """A piece of a plain text; `violation` says why bytes of line `number` could not be read."""

    number: int
    text: str
    violation: FieldViolation | None = None

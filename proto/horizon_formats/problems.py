"""What is wrong with data: violations, errors, and how single values are checked and quoted in messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Violations that are listed; all are counted.
MAX_KEPT = 100

# The path of a field within its row, and the rest of the message about it.
Problem = tuple[str, str]

_KINDS = {dict: "object", list: "array", str: "string", type(None): "null", bool: "boolean"}
_KINDS |= {int: "number", float: "number"}


@dataclass(frozen=True, kw_only=True)
class FieldViolation:
    """One refused field: its path and the reason, which is a whole sentence that begins with its place.

    The path is that of a spec (`train.learning_rate`) or a place in a file: `chats.jsonl:17:messages[2].role`, or
    `table.parquet:row 3` where rows are counted instead of lines.
    """

    field: str
    description: str


class FormatError(ValueError):
    """Root of what this package raises."""

    def __init__(self, message: str, *, violations: Sequence[FieldViolation] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.violations = tuple(violations)


class InvalidFile(FormatError):
    """A data file cannot be used as it is; `violations` name file, line and field."""


class InvalidOption(FormatError):
    """The format or the field map that came with the files is wrong."""


class ServerOnly(Exception):
    """Reading this file needs Arrow, which only the server has."""


class ViolationTally:
    """The first 100 violations of a file or dataset, and how many there were."""

    def __init__(self) -> None:
        self.kept: list[FieldViolation] = []
        self.total = 0

    def add(self, violations: Iterable[FieldViolation]) -> None:
        """Count these, keeping them while there is room."""
        for violation in violations:
            self.total += 1
            if len(self.kept) < MAX_KEPT:
                self.kept.append(violation)

    def refuse(self, name: str = "") -> None:
        """Raise InvalidFile with the first problem and the number of problems, unless there were none."""
        if not self.total:
            return
        count = "the only problem found" if self.total == 1 else f"the first of {self.total} problems"
        subject = f"{name}: " if name else ""
        raise InvalidFile(f"{subject}{self.kept[0].description} ({count})", violations=self.kept)


def json_kind(value: object) -> str:
    """Return what JSON calls this value, or the name of its type where only a table can hold it."""
    return _KINDS.get(type(value), type(value).__name__)


def shown(value: object) -> str:
    """Return the value for a message, cut to forty characters."""
    if value is None:
        return "missing or null"
    if isinstance(value, str | int | float):
        return f"{value!r:.40}"
    return f"of type {json_kind(value)}" if type(value) not in _KINDS else f"a JSON {json_kind(value)}"


def writable(text: str) -> str:
    """Return the text with what UTF-8 cannot encode spelled out, so that every message can be sent and printed."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def listed(columns: Iterable[str], *, none: str) -> str:
    """Return the first dozen names, each cut to forty characters."""
    return writable(", ".join(f"{name:.40}" for name in sorted(columns)[:12])) or none


def check_string(path: str, value: object) -> list[Problem]:
    """Return what is wrong with a text; nothing when it is a string that UTF-8 and every tokenizer can encode."""
    if not isinstance(value, str):
        return [(path, f"is {shown(value)}; it must be a string")]
    problem = _unwritable_text(value)
    return [(path, problem)] if problem else []


def check_learnable(path: str, value: object) -> list[Problem]:
    """Return what is wrong with a text that is trained: as `check_string`, and it may not be blank."""
    problems = check_string(path, value)
    if not problems and (not value or str(value).isspace()):
        return [(path, "is empty; there is nothing to learn in this row")]
    return problems


def unwritable(value: object) -> str | None:
    """Return why a string anywhere inside the value cannot be used, or None."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            problem = _unwritable_text(item)
            if problem:
                return problem
        elif isinstance(item, dict):
            pending += item.keys()
            pending += item.values()
        elif isinstance(item, list):
            pending += item
    return None


def _unwritable_text(text: str) -> str | None:
    if "\0" in text:
        return f"holds a NUL character at character {text.index(chr(0))}; remove it"
    if text.isascii():
        return None
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"holds half a surrogate pair at character {error.start}; it cannot be written as UTF-8"
    return None

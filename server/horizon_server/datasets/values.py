"""Single values of a row, whatever the format: their kind, how they are quoted, and the strings nothing can be made of.

Must not know fields, files or formats.
"""

from __future__ import annotations

from collections.abc import Iterable

Problem = tuple[str, str]
"""The path of a field within its row, and the rest of the sentence about it."""

_KINDS = {
    dict: "object",
    list: "array",
    str: "string",
    type(None): "null",
    bool: "boolean",
    int: "number",
    float: "number",
}


def json_kind(value: object) -> str:
    """Return what JSON calls this value, or the name of its type where only a table can hold it."""
    return _KINDS.get(type(value), type(value).__name__)


def shown(value: object) -> str:
    """Return the value for a sentence, cut to forty characters."""
    if value is None:
        return "missing or null"
    if isinstance(value, str | int | float):
        return f"{value!r:.40}"
    return f"of type {json_kind(value)}" if type(value) not in _KINDS else f"a JSON {json_kind(value)}"


def writable(text: str) -> str:
    """Return the text with what UTF-8 cannot take spelt out, so that every sentence can be sent and printed."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def listed(columns: Iterable[str], *, none: str) -> str:
    """Return the first dozen names, each cut to forty characters."""
    return writable(", ".join(f"{name:.40}" for name in sorted(columns)[:12])) or none


def check_string(path: str, value: object) -> list[Problem]:
    """Return what is wrong with a text; nothing when it is a string that UTF-8 and every tokenizer can take."""
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

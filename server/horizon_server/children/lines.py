"""The lines that a child process writes to the daemon: events, and at the end one answer or one error. Both sides use this module."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from horizon_server.errors import FieldViolation, HorizonError, WorkerFailed
from horizon_server.events import WorkerLine, decode, encode

MAX_LINE_BYTES = 16 * 2**20
"""Longest line a child may write. A preview's rows take the most: up to 12 bytes for each of its half a million characters."""


@dataclass(frozen=True)
class Answer:
    """What the child was asked for, as plain data."""

    value: Any


@dataclass(frozen=True)
class Failure:
    """Why the child cannot answer."""

    error: HorizonError


Line = WorkerLine | Answer | Failure


def encode_line(line: Line) -> bytes:
    """Return one line of JSON with its newline."""
    match line:
        case Answer():
            text = json.dumps({"answer": line.value}, separators=(",", ":"))
        case Failure():
            error = line.error
            plain = {
                "reason": error.reason,
                "message": error.message,
                "violations": [[violation.field, violation.description] for violation in error.violations],
                "retry_after_s": error.retry_after_s,
            }
            text = json.dumps({"error": plain}, separators=(",", ":"))
        case event:
            text = encode(event)
    return text.encode("ascii") + b"\n"


def decode_line(line: bytes) -> Line:
    """Return what a line says. An error has the class of the one error tree whose `reason` it names.

    Raises:
        WorkerFailed: when the line is not one that `encode_line` writes.
    """
    try:
        plain = json.loads(line)
        if "answer" in plain:
            return Answer(plain["answer"])
        if "error" not in plain:
            event: WorkerLine = decode(line)
            return event
        error = plain["error"]
        kind = next((kind for kind in HorizonError.__subclasses__() if kind.reason == error["reason"]), WorkerFailed)
        violations = [FieldViolation(field=field, description=text) for field, text in error["violations"]]
        return Failure(kind(str(error["message"]), violations=violations, retry_after_s=error["retry_after_s"]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WorkerFailed(f"a child process wrote a line that is not an event: {line[:120]!r}") from error

"""A child process, from its own side: reads its request, reports events, and ends with an answer or an error. It ends
with the daemon.

A module that can be a child has `if __name__ == "__main__": sys.exit(serve(work, who=...))`. It can be run by hand too:
without `--events-fd` its lines go to the standard output.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import json
import logging
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horizon_server import cpu_priority
from horizon_server.errors import FieldViolation, HorizonError, IoFailed, OutOfMemory, WorkerFailed, os_problem
from horizon_server.events import (
    AttemptReady,
    CheckpointWritten,
    EvalDone,
    Message,
    PrepareProgress,
    ReferencesDone,
    StepDone,
    WorkerLine,
    decode,
    encode,
)
from horizon_server.figures import EvalSetFigures
from horizon_server.texts import size_text

log = logging.getLogger(__name__)

# Longest line a child may write. A preview's rows take the most: up to 12 bytes for each of its half a million
# characters.
MAX_LINE_BYTES = 16 * 2**20
# Longest further request. The prompts of a call take the most: up to 12 bytes for each of their four million
# characters.
MAX_REQUEST_BYTES = 64 * 2**20
# What a child that is held waits for.
BEGIN = b"\n"
# Steps and progress are logged at most this often, so that a long run's log stays small; the events have them all.
_LOG_EVERY_S = 10.0

# How torch and the system's loader word that memory was refused, in errors of no class of their own.
_NO_MEMORY = (
    "can't allocate memory",
    "Cannot allocate memory",
    # CPython, of native code that could not allocate and raised nothing
    "error return without exception set",
)

_STANDARD_INPUT, _STANDARD_OUTPUT = 0, 1
_PR_SET_PDEATHSIG = 1

# Takes the request and returns the answer, both plain data.
Work = Callable[[Any, "EventWriter"], Any]


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
        case Answer(value):
            text = json.dumps({"answer": value}, separators=(",", ":"))
        case Failure(error):
            plain = {
                "reason": error.reason,
                "message": error.problem,
                "file": None if error.file is None else str(error.file),
                "violations": [[violation.field, violation.description] for violation in error.violations],
                "retry_after_s": error.retry_after_s,
            }
            text = json.dumps({"error": plain}, separators=(",", ":"))
        case event:
            text = encode(event)
    return text.encode("ascii") + b"\n"


def decode_line(line: bytes) -> Line:
    """Return what a line says. Raises WorkerFailed when it is not one that `encode_line` writes."""
    try:
        plain = json.loads(line)
        if "answer" in plain:
            return Answer(plain["answer"])
        if "error" not in plain:
            event: WorkerLine = decode(line)
            return event
        error = plain["error"]
        # The class of the one error tree that has this reason, so that callers can catch what the child raised.
        kind = next((kind for kind in HorizonError.__subclasses__() if kind.reason == error["reason"]), WorkerFailed)
        violations = [FieldViolation(field=field, description=text) for field, text in error["violations"]]
        file = None if error["file"] is None else Path(error["file"])
        return Failure(
            kind(str(error["message"]), file=file, violations=violations, retry_after_s=error["retry_after_s"])
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WorkerFailed(f"a child process wrote a line that is not an event: {line[:120]!r}") from error


def serve(work: Work, *, who: str, is_loading: bool = False, niceness: int = 0, stays: bool = False) -> int:
    """Do `work` on the request that the command line names, report how it ended, and return the exit code.

    With `is_loading` it is a part of loading a job, for which those that train do not wait. `niceness` is what the
    process has more of. With `stays` a process that has answered waits for further requests, one a line of the standard
    input, until that ends.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = spec.name.removesuffix(".__main__") if spec is not None else "MODULE"
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=f"Entry of {who}; started by horizond.")
    parser.add_argument("request", type=Path, help="JSON file with the request")
    parser.add_argument("--events-fd", type=int, default=_STANDARD_OUTPUT, help="descriptor to write events to")
    parser.add_argument("--held", action="store_true", help="wait for a byte on the standard input before starting")
    arguments = parser.parse_args()
    # The daemon decides when a child ends. Both may be inherited from the shell that started the daemon.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Writing to a daemon that is gone raises BrokenPipeError, which `EventWriter` handles.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    end_with_parent()
    if is_loading:
        cpu_priority.lower_for_good()
    os.nice(niceness)
    events = EventWriter(arguments.events_fd)
    if arguments.held:
        # However long the daemon takes to set its limits, it reads nothing without them.
        os.read(_STANDARD_INPUT, len(BEGIN))
    has_answered = _carry_out(work, arguments.request.read_bytes(), events, who)
    while has_answered and stays:
        line = sys.stdin.buffer.readline(MAX_REQUEST_BYTES)
        if not line.endswith(b"\n"):
            break
        has_answered = _carry_out(work, line, events, who)
    return 0 if has_answered else 1


def _carry_out(work: Work, request: bytes, events: EventWriter, who: str) -> bool:
    """Do the work and report how it ended; return whether it has an answer."""
    end = end_of(lambda: work(json.loads(request), events), who)
    # Made here, where the memory that the work took is free again.
    events.send(end or Failure(OutOfMemory(f"{who} ran out of memory")))
    return isinstance(end, Answer)


def end_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends, however it ends. To be called in the main
    thread."""
    # By the kernel, as this process cannot help: it may be inside a template that never ends.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A parent that was gone before this call: the other end of the standard input has closed with it.
    poll = select.poll()
    poll.register(_STANDARD_INPUT, 0)
    if any(what & select.POLLHUP for _, what in poll.poll(0)):
        sys.exit("the daemon is gone")


class EventWriter:
    """Logs lines and writes them to the daemon's pipe, where there is one. Thread: the child's main thread only."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = descriptor
        self._logged_s = float("-inf")
        if descriptor is not None:
            os.set_inheritable(descriptor, False)

    def send(self, line: Line) -> None:
        """Log one line and send it; blocks while the pipe is full, and only logs once the daemon is gone."""
        self._log(line)
        self.write(encode_line(line))

    def write(self, line: bytes) -> None:
        """Send what is a line already."""
        if self._descriptor is None:
            return
        data = memoryview(line)
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except BrokenPipeError:
            self._descriptor = None

    def _log(self, line: Line) -> None:
        if isinstance(line, StepDone | PrepareProgress):
            now_s = time.monotonic()
            is_last = isinstance(line, StepDone) and line.step == line.num_steps
            if now_s - self._logged_s < _LOG_EVERY_S and not is_last:
                return
            self._logged_s = now_s
        if text := log_text(line):
            log.info("%s", text)


def log_text(line: Line) -> str:
    """Return what the log says of a line, in words; "" for what is not for it. The figures, answers and rows are in the
    job's events."""
    match line:
        case StepDone():
            skipped = f", skipped: {line.skipped}" if line.skipped else ""
            return (
                f"step {line.step}/{line.num_steps}: loss {line.loss:.4f}, grad_norm {line.grad_norm:.3f}, "
                f"{line.tokens_per_second:,.0f} tokens/s{skipped}"
            )
        case PrepareProgress():
            counts = ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in line.report.items())
            of_total = f" of {line.total_rows:,}" if line.total_rows else ""
            return f"data prepared: {counts}" if counts else f"preparing data: {line.done_rows:,}{of_total} rows"
        case EvalDone():
            sets = "; ".join(map(_of_set, line.sets))
            took = f" in {line.duration_s:.1f} s" if line.duration_s else ""
            return f"evaluation at step {line.step}: {sets or f'loss {line.eval_loss:.4f}'}{took}"
        case CheckpointWritten():
            return f"checkpoint of step {line.step} written: {size_text(line.size_bytes)} in {line.duration_s:.1f} s"
        case Message():
            return line.text if line.level == "info" else f"{line.level}: {line.text}"
        case AttemptReady():
            of_epoch = f"; an epoch has {line.packed_rows:,} packed rows" if line.packed_rows else ""
            return f"ready on {line.device}: step {line.step} of {line.num_steps} is done{of_epoch}"
        case ReferencesDone():
            return f"reference log-probabilities of {line.done_tokens:,} of {line.total_tokens:,} tokens are done"
        case Answer():
            return "done"
        case Failure():
            return f"failed: {line.error.reason}: {line.error.message}"
        case _:
            # Turns, up to several for each step; what a user's model says; how each piece of a merge goes
            return ""


def _of_set(figures: EvalSetFigures) -> str:
    accuracy = "" if figures.accuracy is None else f", accuracy {figures.accuracy:.1%}"
    found = figures.exact_match
    matches = "" if found is None else f", exact match {found:.1%} ({figures.num_matches} of {figures.num_answers})"
    return f"{figures.name}: loss {figures.loss:.4f}{accuracy} on {figures.num_targets:,} tokens{matches}"


def end_of(work: Callable[[], Any], who: str) -> Answer | Failure | None:
    """Return how the work ended, None where it ran out of memory."""
    try:
        return Answer(work())
    except HorizonError as error:
        _print_traceback()
        return Failure(error)
    except MemoryError:
        return None
    except OSError as error:
        if error.errno == errno.ENOMEM:
            return None
        _print_traceback()
        return Failure(IoFailed(f"{who} could not read or write a file: {os_problem(error)}"))
    except Exception as error:  # noqa: BLE001  # whatever it is, the daemon learns the true reason
        _print_traceback()
        if any(words in str(error) for words in _NO_MEMORY):
            return None
        return Failure(WorkerFailed(f"{type(error).__name__}: {error}"))


def _print_traceback() -> None:
    # A log that may not grow any more is no reason to end.
    with contextlib.suppress(MemoryError, OSError):
        traceback.print_exc()

"""What both ends of the link agree on: the files of an attempt, the greeting, and what of it is never stored.

The worker appends its reports to `journal.jsonl`, one line of JSON each, and listens on `worker.sock`. A daemon
connects and sends one line, how many of the reports it has stored; the worker answers with one line, where it stands,
and the descriptors of its memory where these were asked for. Then it sends the reports that the daemon does not have,
and new ones as they come, with lines about turns and progress in between, which are in no journal: a daemon that
connects later learns from the greeting how turns stand.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from horizon_server.codec import from_json, to_json
from horizon_server.errors import WorkerFailed

PROTOCOL = 2
"""Version of what is said on the socket and written into the journal. A daemon of another version has the worker
checkpoint and end."""

JOURNAL_FILE, SOCKET_FILE, REQUEST_FILE, LOG_FILE = "journal.jsonl", "worker.sock", "request.json", "worker.log"
ALIVE_FILE = "alive"
"""Locked (flock) by the processes of the attempt, from before the worker starts until the last of them is gone."""
PID_FILE = "pid"
"""The worker's process id and the kernel's start time of it."""

MAX_GREETING_BYTES = 64 * 1024
GREETING_S = 10.0
"""How long either end waits for the other's greeting."""

TurnState = Literal["none", "wanted", "held"]


@dataclass(frozen=True, kw_only=True)
class DaemonGreeting:
    """What a daemon says first. `after`: the number of the journal's lines that it has stored."""

    protocol: int
    after: int
    wants_planes: bool


@dataclass(frozen=True, kw_only=True)
class WorkerGreeting:
    """What the worker answers: whether it has the turn on its device, or waits for it, whether it holds memory there,
    and the names of the planes whose descriptors come with it."""

    protocol: int
    version: str
    pid: int
    turn: TurnState
    holds_memory: bool
    planes: tuple[str, ...]


class OtherVersion(WorkerFailed):
    """The other end speaks another version of the protocol."""


def encode_greeting(greeting: DaemonGreeting | WorkerGreeting) -> bytes:
    """Return the greeting as one line."""
    return to_json(greeting).encode("ascii") + b"\n"


def decode_greeting(kind: type[Any], line: bytes) -> Any:
    """Return the greeting. Raises OtherVersion where it is of another version of the protocol, or none."""
    try:
        greeting = from_json(kind, line)
    except ValueError as error:
        raise OtherVersion(
            f"the other end of the link sent no greeting that this one knows, but {line[:80]!r}"
        ) from error
    if greeting.protocol != PROTOCOL:
        raise OtherVersion(f"the other end of the link speaks version {greeting.protocol}, this one {PROTOCOL}")
    return greeting


@contextmanager
def short_path(file: Path) -> Iterator[str]:
    """Yield another name of a socket's file: the kernel takes 107 bytes, and a state folder may have more."""
    descriptor = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{file.name}"
    finally:
        os.close(descriptor)


def start_time_of(pid: int) -> str | None:
    """Return the kernel's start time of a living process: with the pid it names one process forever, the pid alone does
    not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("ascii").rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    # Z: dead, but not yet collected by its parent; in a container without an init that may never happen.
    return None if fields[0] == "Z" else fields[19]

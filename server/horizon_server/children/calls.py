"""Several calls that one child answers at the same time: what the daemon tells it, and what comes back.

The daemon writes orders to the child's standard input, one a line. A line that the child writes begins with the number
of its call; one without a number is the end of the child itself, and so of all its calls. `children.shared` is the
daemon's side.
"""

from __future__ import annotations

import json
import queue
import threading
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeAlias

from horizon_server.children.entry import MAX_REQUEST_BYTES, EventWriter, Line, decode_line, encode_line
from horizon_server.errors import WorkerFailed

_BEGUN = b'"begun"\n'


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A new call. `user` is whose it is, for turns within the child; `request` is plain data."""

    call: int
    user: str
    request: Any


@dataclass(frozen=True, kw_only=True)
class Leave:
    """Nobody waits for the call any more."""

    call: int


@dataclass(frozen=True, kw_only=True)
class Hold:
    """The caller reads more slowly than the lines come: none until `Continue`."""

    call: int


@dataclass(frozen=True, kw_only=True)
class Continue:
    """The caller has read."""

    call: int


@dataclass(frozen=True, kw_only=True)
class Begun:
    """The call has what it waited for, and is being answered."""


Order: TypeAlias = Ask | Leave | Hold | Continue
CallLine: TypeAlias = Line | Begun

_ORDERS = {"ask": Ask, "leave": Leave, "hold": Hold, "continue": Continue}
_NAMES = {kind: name for name, kind in _ORDERS.items()}


def encode_order(order: Order) -> bytes:
    """Return one line of JSON with its newline."""
    line = json.dumps({_NAMES[type(order)]: vars(order)}).encode("ascii") + b"\n"
    assert len(line) <= MAX_REQUEST_BYTES, len(line)
    return line


def decode_order(line: bytes) -> Order:
    """Return what the daemon wrote."""
    ((name, fields),) = json.loads(line).items()
    order: Order = _ORDERS[name](**fields)
    return order


def encode_call_line(call: int, line: CallLine) -> bytes:
    """Return a line of one call."""
    return b"%d %b" % (call, _BEGUN if isinstance(line, Begun) else encode_line(line))


def decode_call_line(line: bytes) -> tuple[int | None, CallLine]:
    """Return the call of a line, None where it is the child's own, and what it says. Raises WorkerFailed when it is not
    one that a child writes."""
    if line[:1] == b"{":
        return None, decode_line(line)
    number, _, rest = line.partition(b" ")
    if not number.isdigit() or len(number) > 18:
        raise WorkerFailed(f"a child process wrote a line that is of no call: {line[:120]!r}")
    return int(number), Begun() if rest == _BEGUN else decode_line(rest)


class CallPipe:
    """The child's end: orders that have come, and lines that go. Thread: one driving thread; another one reads."""

    def __init__(self, orders: BinaryIO, events: EventWriter) -> None:
        """Orders are read from now on."""
        self._events = events
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(orders,), name="orders", daemon=True).start()

    def _read(self, orders: BinaryIO) -> None:
        try:
            while (line := orders.readline(MAX_REQUEST_BYTES)).endswith(b"\n"):
                self._orders.put(decode_order(line))
        finally:
            self._orders.put(None)

    def orders(self, *, wait: bool) -> list[Order] | None:
        """Return the orders that have come, or None once no more will. With `wait`, there is one at least."""
        found: list[Order] = []
        try:
            while True:
                order = self._orders.get(block=wait and not found)
                if order is None:
                    return None
                found.append(order)
        except queue.Empty:
            return found

    def send(self, call: int, line: CallLine) -> None:
        """Send a line of a call."""
        self._events.write(encode_call_line(call, line))

"""The worker's two lines to the daemon: events up, orders down.

When the daemon dies both lines end. The worker then takes the end of its orders as an order to checkpoint and stop, and goes on
without anybody reading its events: what it has trained is not lost.
"""

from __future__ import annotations

import os
import threading
from enum import Enum

from horizon_server.events import WorkerLine, encode

_STANDARD_INPUT = 0


class Order(Enum):
    """What the daemon wants of the worker at its next step boundary."""

    GO_ON = "go on"
    STOP = "stop"
    CANCEL = "cancel"


class EventWriter:
    """Writes events to the daemon's pipe.

    Thread: the worker's main thread only.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._daemon_gone = False
        os.set_inheritable(descriptor, False)

    def send(self, payload: WorkerLine) -> None:
        """Send one event; blocks while the pipe is full, and does nothing once the daemon is gone."""
        if self._daemon_gone:
            return
        data = memoryview(encode(payload).encode() + b"\n")
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except BrokenPipeError:
            self._daemon_gone = True


class Orders:
    """Listens on standard input for `stop` and `cancel`; the end of input means `stop`.

    Thread: `current` may be read from any thread.
    """

    def __init__(self) -> None:
        self._current = Order.GO_ON
        threading.Thread(target=self._listen, name="orders", daemon=True).start()

    @property
    def current(self) -> Order:
        """The newest order; a cancel is never taken back."""
        return self._current

    def _listen(self) -> None:
        pending = b""
        # Straight from the descriptor: a thread inside sys.stdin would hold its lock when the interpreter ends.
        while data := os.read(_STANDARD_INPUT, 64):
            *lines, pending = (pending + data).split(b"\n")
            if b"cancel" in lines:
                self._current = Order.CANCEL
                return
            if b"stop" in lines:
                self._current = Order.STOP
        self._current = Order.STOP

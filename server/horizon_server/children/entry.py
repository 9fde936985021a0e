"""The worker's two lines to the daemon: events up, orders down.

When the daemon dies both lines end. The worker then takes the end of its orders as an order to checkpoint and stop, and goes on
without anybody reading its events: what it has trained is not lost.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from enum import Enum

from horizon_server.events import StepDone, WorkerLine, encode

log = logging.getLogger(__name__)

_STEP_LOG_EVERY_S = 10.0
"""Steps are logged at most this often, so that a long run's log stays small; the events have them all."""

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
        self._step_logged_s = float("-inf")
        os.set_inheritable(descriptor, False)

    def send(self, payload: WorkerLine) -> None:
        """Log one event and send it; blocks while the pipe is full, and only logs once the daemon is gone."""
        self._log(payload)
        if self._daemon_gone:
            return
        data = memoryview(encode(payload).encode() + b"\n")
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except BrokenPipeError:
            self._daemon_gone = True

    def _log(self, payload: WorkerLine) -> None:
        if not isinstance(payload, StepDone):
            log.info("%s", encode(payload))
            return
        now_s = time.monotonic()
        if now_s - self._step_logged_s < _STEP_LOG_EVERY_S and payload.step < payload.num_steps:
            return
        self._step_logged_s = now_s
        log.info(
            "step %d/%d loss %.4f grad_norm %.3f %.0f tokens/s",
            payload.step,
            payload.num_steps,
            payload.loss,
            payload.grad_norm,
            payload.tokens_per_second,
        )


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

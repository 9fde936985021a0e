"""One life of a real worker on memory that outlives it: the whole `Training`, with its events on a pipe."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from horizon_server.children.entry import EventWriter, Line
from horizon_server.codec import from_plain
from horizon_server.events import AttemptReady, Message, StepDone
from horizon_server.worker.training import Training
from horizon_server.worker_link.orders import Orders
from horizon_server.worker_link.request import WorkerRequest

# Longer than anybody waits to kill it.
_REST_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Said:
    """What a life reports: where it began, the exact loss of a step, and warnings."""

    ready: int = -1
    step: int = -1
    loss: str = ""
    warning: str = ""


class Pipe(EventWriter):
    """Sends what a test wants to know, and logs nothing. Rests once it has told of `rests_after` steps, until it is
    killed."""

    def __init__(self, messages: Connection, rests_after: int | None) -> None:
        self._messages, self._steps_left = messages, rests_after

    def send(self, line: Line) -> None:
        match line:
            case AttemptReady():
                self._messages.send(Said(ready=line.step))
            case StepDone():
                self._messages.send(Said(step=line.step, loss=line.loss.hex()))
                if self._steps_left is not None:
                    self._steps_left -= 1
                    if not self._steps_left:
                        time.sleep(_REST_S)
            case Message(level="warning"):
                self._messages.send(Said(warning=line.text))
            case _:
                pass


def live(
    request: dict[str, Any], descriptors: dict[str, Any], log: Path, messages: Connection, rests_after: int | None
) -> None:
    """Run an attempt to its end on planes of the parent."""
    # What a worker prints belongs to its log.
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    planes = {name: descriptor.detach() for name, descriptor in descriptors.items()}
    made = from_plain(WorkerRequest, {**request, "planes": planes})
    training = Training(made, events=Pipe(messages, rests_after), orders=Orders())
    try:
        training.run()
    finally:
        training.close()
    messages.send("done")


__all__ = ["DupFd", "Said", "live"]

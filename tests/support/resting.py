"""Children of a test's daemon that wait where the test needs them: a worker after a step that it has reported, and any
child before it begins.

Without this, nobody knows how far a job is when a test looks again; on a busy machine it may be over. Files beside the
state folder say what waits, so that every daemon over that folder does the same.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from horizon_server import progress
from horizon_server.children.entry import Line
from horizon_server.events import ReferencesDone, StepDone
from horizon_server.records.job import StopRequest
from horizon_server.worker.device_turn import DeviceTurn
from horizon_server.worker_link.worker_end import WorkerEnd, serve_worker

REPOSITORY = Path(__file__).parents[2]
_LOOK_EVERY_S = 0.005
_SUFFIX = "-resting"
# Read by every Python process as it starts, before the module that it runs.
_SITECUSTOMIZE = """
import pathlib, sys, time

for argument in sys.orig_argv:
    if argument.startswith("horizon_server."):
        while pathlib.Path({folder!r}, f"{{argument}}.held").exists():
            time.sleep(0.005)
        if argument == "horizon_server.worker":
            from tests.support.resting import rest_in

            rest_in(pathlib.Path({folder!r}))
"""


class Resting:
    """What the children of the daemons over a state folder do. An order ends a rest, too; those that follow it may rest
    again."""

    def __init__(self, state_dir: Path) -> None:
        self.folder = state_dir.with_name(state_dir.name + _SUFFIX)

    def environment(self) -> dict[str, str]:
        """Make the folder, and return what a daemon's environment needs for the real children to rest."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "sitecustomize.py").write_text(_SITECUSTOMIZE.format(folder=str(self.folder)), "utf-8")
        return {"PYTHONPATH": os.pathsep.join([str(self.folder), str(REPOSITORY)])}

    def after(self, step: int) -> None:
        """Make workers wait once they have reported that step or a later one."""
        self._write("after", step)

    def in_references(self, place: int) -> None:
        """Make workers wait in the pass before the first step once at least `place` of its steps are recorded."""
        self._write("references", place)

    def go_on(self) -> None:
        """Let all workers train on, and to their end."""
        for name in ("after", "references"):
            (self.folder / name).unlink(missing_ok=True)

    def hold(self, module: str) -> None:
        """Have children that run `module` wait before they begin. They can be killed then."""
        self._write(f"{module}.held", 0)

    def let_begin(self, module: str) -> None:
        """Let children that run `module` begin."""
        (self.folder / f"{module}.held").unlink()

    def clear(self) -> None:
        """Have nothing rest any more."""
        self.go_on()
        for file in self.folder.glob("*.held"):
            file.unlink(missing_ok=True)

    def _write(self, name: str, number: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        written = self.folder / f"{name}.new"
        written.write_text(str(number), "ascii")
        written.replace(self.folder / name)


def rest(folder: Path, name: str, number: int, link: WorkerEnd, between: Callable[[], object]) -> None:
    """Rest in a worker while the file says so. `between` gives the device to others that want it."""
    while link.orders.current is StopRequest.NOTHING:
        try:
            after = int((folder / name).read_text("ascii"))
        except FileNotFoundError:
            return
        if number < after:
            return
        progress.advance()
        between()
        time.sleep(_LOOK_EVERY_S)


def references_done(state_dir: Path) -> int:
    """How many steps of a job's pass over the data are done for certain."""
    records = list(state_dir.glob("jobs/*/references/*.json"))
    return int(json.loads(records[0].read_text("utf-8"))["place"]) if records else 0


def rest_in(folder: Path) -> None:
    """Make the worker that is about to run in this process rest as the files of `folder` say."""
    init, send = DeviceTurn.__init__, WorkerEnd.send
    turns: list[DeviceTurn] = []
    state_dir = folder.with_name(folder.name.removesuffix(_SUFFIX))

    def noted(turn: DeviceTurn, **options: Any) -> None:
        init(turn, **options)
        turns.append(turn)

    def between() -> None:
        for turn in turns:
            turn.boundary()

    def rested(link: WorkerEnd, line: Line) -> None:
        send(link, line)
        if isinstance(line, StepDone):
            rest(folder, "after", line.step, link, between)
        elif isinstance(line, ReferencesDone):
            rest(folder, "references", references_done(state_dir), link, lambda: None)

    DeviceTurn.__init__ = noted  # type: ignore[assignment, method-assign]
    WorkerEnd.send = rested  # type: ignore[assignment, method-assign]


def work(request: Any, link: WorkerEnd) -> dict[str, str]:
    """Run one attempt of the real worker, for daemons in the test's process: their `worker_module` is this one."""
    from horizon_server.worker import __main__ as worker

    rest_in(Resting(Path(request["checkpoints"]).parents[2]).folder)
    return worker.work(request, link)


if __name__ == "__main__":
    serve_worker(work, who="the worker", progress_every_s=0.1)

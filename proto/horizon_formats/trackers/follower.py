"""Writes one job's points to one tracker: each step once, whatever was written before."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from horizon_formats.trackers.figures import Ending, Point, TrackedJob
from horizon_formats.trackers.known import TRACKERS, is_installed, package_problem

_MAX_MESSAGE_CHARS = 500
# No tracker's package reports its own use from here, and a server that is away is given up soon: who follows tries
# again with pauses of its own.
_PACKAGE_VARIABLES = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "WANDB_ERROR_REPORTING": "false",
}

Written = dict[str, int]
"""The last step that was written, by kind of point."""


class TrackerMissing(Exception):
    """The tracker's package is not installed; the message says how to install it."""


class TrackerFailed(Exception):
    """The tracker did not take what it was given, for now or for good; the message has its own words."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where the runs of a tracker are.

    `project` is the project or experiment; empty takes the job's project, or horizon. `folder` is where what is local
    lies: TensorBoard's logs, and what W&B and trackio keep. `uri` is an MLflow tracking URI; empty takes the package's
    own default (MLFLOW_TRACKING_URI).
    """

    folder: Path
    project: str = ""
    uri: str = ""

    def project_of(self, job: TrackedJob) -> str:
        """Return the project of the job's run."""
        return self.project or job.project or "horizon"


class TrackerRun(Protocol):
    """An open run of a tracker. What its methods raise is anything: `Follower` turns it into TrackerFailed."""

    where: str
    """Where people find it."""
    written: Written
    """What is there: read when it was opened, and kept with every write to be found again."""

    def write(self, points: Sequence[Point]) -> None:
        """Write points that are new; they are safe once it returns."""
        ...

    def close(self, ending: Ending | None) -> None:
        """Let go of the run; None where the job has not ended, so that it will be continued."""
        ...


OpenRun = Callable[[TrackedJob, Target], TrackerRun]


class Follower:
    """One run of one tracker. Opening it connects to the tracker.

    Thread: one at a time. Figures of a step that a job does again, from its newest checkpoint on, are left out: they
    are there, and most trackers cannot take any back.

    Raises:
        TrackerMissing: when its package is not installed.
        TrackerFailed: whenever the tracker refuses.
    """

    def __init__(self, tracker: str, job: TrackedJob, target: Target) -> None:
        self.tracker = tracker
        self._job, self._target = job, target
        for name, value in _PACKAGE_VARIABLES.items():
            os.environ.setdefault(name, value)
        try:
            if not is_installed(tracker):
                raise ModuleNotFoundError(TRACKERS[tracker])
            import_module(TRACKERS[tracker])
        except (ModuleNotFoundError, ValueError) as error:  # the latter of a module that is switched off
            raise TrackerMissing(f"{tracker} {package_problem(tracker)}") from error
        self._open_run = cast("OpenRun", import_module(f"horizon_formats.trackers.{tracker}_run").open_run)
        self._run: TrackerRun | None = self._opened()
        self.where = self._run.where

    def write(self, points: Sequence[Point]) -> None:
        """Write the points that are new. They may be given again after TrackerFailed."""
        run = self._run or self._opened()
        written, new = dict(run.written), []
        for point in points:
            if point.step > written.get(point.kind, -1):
                written[point.kind] = point.step
                new.append(point)
        try:
            with _in_its_words(self.tracker):
                if new:
                    run.write(new)
        except TrackerFailed:
            # What of it has arrived, the tracker says when the run is opened again.
            self._run = None
            with contextlib.suppress(Exception):
                run.close(None)
            raise
        self._run = run

    def close(self, ending: Ending | None) -> None:
        """End the run as the job has ended, or leave it to be continued."""
        if ending is None and self._run is None:
            return
        run = self._run or self._opened()
        with _in_its_words(self.tracker), _output_aside():
            run.close(ending)

    def _opened(self) -> TrackerRun:
        with _in_its_words(self.tracker), _output_aside():
            return self._open_run(self._job, self._target)


@contextmanager
def _in_its_words(tracker: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # Any: these packages raise errors of the network, of databases and their own.
        text = " ".join(str(error).split()) or type(error).__name__
        raise TrackerFailed(f"{tracker}: {text:.{_MAX_MESSAGE_CHARS}}") from error


@contextmanager
def _output_aside() -> Iterator[None]:
    """Send what a package prints to stderr: stdout is for what the user asked for."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


class WrittenFile:
    """Keeps what was written in a file next to a run that is local."""

    def __init__(self, folder: Path, project: str, job_id: str) -> None:
        self._path = folder / f".horizon-{project.replace('/', '_')}-{job_id}.json"

    def read(self) -> Written:
        """Return what was written; nothing where there is no file."""
        try:
            return {str(kind): int(step) for kind, step in json.loads(self._path.read_text("utf-8")).items()}
        except FileNotFoundError:
            return {}
        except (ValueError, AttributeError, TypeError) as error:
            raise ValueError(
                f"{self._path} cannot be read ({error}); remove it and the run, to write the run again"
            ) from error

    def keep(self, written: Written) -> None:
        """Replace the file."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(written), "utf-8")
        new.replace(self._path)


def add_to(written: Written, points: Sequence[Point]) -> None:
    """Count the points as written."""
    for point in points:
        written[point.kind] = max(point.step, written.get(point.kind, -1))


def local_name(job: TrackedJob) -> str:
    """Return the name of a run where runs with the same name would be one: the job's name and id."""
    return f"{job.name}-{job.job_id}"

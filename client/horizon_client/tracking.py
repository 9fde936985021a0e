"""Trackers that follow a watch: one thread each, so that neither a slow tracker nor one that is away holds up the watch
before its queue is full, and none holds up another."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from horizon_client.errors import InvalidRequest, TrackerFailed
from horizon_client.resources import Job, JobEvent
from horizon_formats import trackers
from horizon_formats.trackers import Ending, Follower, Point, Target, TrackedJob

_WAITING_POINTS = 1000
_BATCH = 200
_FULL_CHECK_S = 0.5
# Pauses before a tracker is tried again; after the last one the follower gives up.
_PAUSES_S = (1.0, 5.0, 15.0, 30.0, 60.0)
# How long the end of a watch waits for what is still to be written.
_CLOSING_S = 120.0

Notice = Callable[[str], None]


def tracked(job: Job) -> TrackedJob:
    """Return what a tracker records of a job."""
    return TrackedJob(job_id=job.job_id, name=job.name, owner=job.owner, spec=dict(job.spec))


class Followers:
    """The trackers of one job's watch. Opening them connects to all of them.

    Thread: `send` and `close` belong to one thread.

    Raises:
        InvalidRequest: when there is no such tracker, or its package is not installed.
        TrackerFailed: when a tracker refuses from the start.
    """

    def __init__(
        self, job: Job, to: Sequence[str], *, project: str = "", folder: Path = Path(), notice: Notice = lambda _: None
    ) -> None:
        names = list(dict.fromkeys(to))
        if unknown := [name for name in names if name not in trackers.TRACKERS]:
            known = ", ".join(trackers.TRACKERS)
            raise InvalidRequest.of("to", f"to is {unknown[0]!r}; the trackers are {known}")
        target, self._threads = Target(folder=folder, project=project), list[_Writer]()
        self._ending: Ending | None = None
        try:
            for name in names:
                follower = Follower(name, tracked(job), target)
                notice(f"{name}: {follower.where}")
                self._threads.append(_Writer(follower, notice))
        except trackers.TrackerMissing as error:
            self.close()
            raise InvalidRequest.of("to", str(error)) from error
        except trackers.TrackerFailed as error:
            self.close()
            raise TrackerFailed(str(error)) from error

    @property
    def is_full(self) -> bool:
        """Whether `send` would wait for a tracker that is behind."""
        return any(writer.waiting.full() for writer in self._threads)

    def wait_for_room(self) -> None:
        """Return when no tracker is too far behind. The daemon keeps all events, so nothing is lost meanwhile."""
        while self.is_full:
            time.sleep(_FULL_CHECK_S)

    def send(self, event: JobEvent) -> None:
        """Hand an event to all trackers."""
        if event.kind == "state":
            self._ending = trackers.ending_of(event.state)
        time_s = event.time.timestamp() if event.time else time.time()
        if (point := trackers.point_of(event.kind, event, time_s)) is None:
            return
        self.wait_for_room()
        for writer in self._threads:
            writer.waiting.put(point)

    def close(self) -> None:
        """Write what is waiting, and end the runs of a job that has ended.

        Raises:
            TrackerFailed: naming the trackers that do not have everything.
        """
        for writer in self._threads:
            writer.end(self._ending)
        until = time.monotonic() + _CLOSING_S
        problems = [problem for writer in self._threads if (problem := writer.joined(until - time.monotonic()))]
        self._threads.clear()
        if problems:
            raise TrackerFailed(
                f"{'; '.join(problems)}; the run is not complete: follow the job again, and what is missing is written"
            )


class _Writer:
    """Writes points to one tracker, in a thread of its own."""

    def __init__(self, follower: Follower, notice: Notice) -> None:
        self.waiting: queue.Queue[Point | None] = queue.Queue(_WAITING_POINTS)
        self._follower, self._notice = follower, notice
        self._ending: Ending | None = None
        self._closing = threading.Event()
        self._problem = ""
        # Of a tracker that never answers again, the process does not wait for the thread.
        self._thread = threading.Thread(target=self._write_all, name=f"to {follower.tracker}", daemon=True)
        self._thread.start()

    def end(self, ending: Ending | None) -> None:
        """Write what waits, then end the run; from now on a tracker that is away is not waited for."""
        self._ending = ending
        self._closing.set()
        # Where the queue stays full, `joined` says that the tracker does not answer.
        with contextlib.suppress(queue.Full):
            self.waiting.put(None, timeout=_CLOSING_S)

    def joined(self, seconds: float) -> str:
        """Return what went wrong, empty where everything is written."""
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            return f"{self._follower.tracker} did not answer within {_CLOSING_S:g} s"
        return self._problem

    def _write_all(self) -> None:
        is_over = False
        while not is_over:
            batch = [self.waiting.get()]
            while len(batch) < _BATCH and not self.waiting.empty():
                batch.append(self.waiting.get())
            is_over = None in batch
            points = [point for point in batch if point is not None]
            # One that was given up takes what comes and keeps nothing, so that the watch continues.
            if points and not self._problem:
                self._write(points)
        try:
            self._follower.close(self._ending if not self._problem else None)
        except trackers.TrackerFailed as error:
            self._problem = self._problem or str(error)

    def _write(self, points: Sequence[Point]) -> None:
        for pause_s in (*_PAUSES_S, None):
            try:
                self._follower.write(points)
                return
            except trackers.TrackerFailed as error:
                if pause_s is None or self._closing.is_set():
                    self._problem = str(error)
                    self._notice(f"{error}; no more is written there")
                    return
                self._notice(f"{error}; trying again in {pause_s:g} s, and the job continues meanwhile")
                self._closing.wait(pause_s)

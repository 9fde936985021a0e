"""The child process that writes one job's figures to one tracker. The tracker's package is loaded here and nowhere
else.

The first request opens the run; each further one has events, and is answered once their figures are safe.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horizon_formats.trackers import (
    Ending,
    Follower,
    Target,
    TrackedJob,
    TrackerFailed,
    TrackerMissing,
    point_of,
)
from horizon_server.children.entry import EventWriter, serve
from horizon_server.codec import from_plain
from horizon_server.errors import WorkerFailed
from horizon_server.events import decode, kind_of

# Training comes first.
_NICENESS = 10


@dataclass(frozen=True, kw_only=True)
class OpenRequest:
    """The job and where its run goes; fields as those of `TrackedJob` and `Target`."""

    tracker: str
    job_id: str
    name: str
    owner: str
    spec: dict[str, Any]
    folder: Path
    uri: str


@dataclass(frozen=True, kw_only=True)
class WriteRequest:
    """Events as (time, line of `events.encode`). With `ending`, a value of `Ending`, the run ends after them."""

    events: list[tuple[float, str]]
    ending: str = ""


class _Work:
    """Opens the run, then writes to it."""

    def __init__(self) -> None:
        self._follower: Follower | None = None

    def __call__(self, request: Any, events: EventWriter) -> str:
        try:
            if self._follower is None:
                self._follower = self._opened(from_plain(OpenRequest, request))
                return self._follower.where
            self._write(self._follower, from_plain(WriteRequest, request))
        except (TrackerMissing, TrackerFailed) as error:
            raise WorkerFailed(str(error)) from error
        return ""

    def _opened(self, request: OpenRequest) -> Follower:
        job = TrackedJob(job_id=request.job_id, name=request.name, owner=request.owner, spec=request.spec)
        return Follower(request.tracker, job, Target(folder=request.folder, uri=request.uri))

    def _write(self, follower: Follower, request: WriteRequest) -> None:
        found = []
        for time_s, line in request.events:
            payload = decode(line)
            if (point := point_of(kind_of(payload), payload, time_s)) is not None:
                found.append(point)
        follower.write(found)
        if request.ending:
            follower.close(Ending(request.ending))


if __name__ == "__main__":
    sys.exit(serve(_Work(), who="the tracker", niceness=_NICENESS, stays=True))

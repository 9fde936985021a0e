"""The loss curve of a job from its events, in bounded memory."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Generic, TypeVar

from horizon_server.api.http.bodies import CurveBody
from horizon_server.events import EvalDone, JobEvent, StepDone
from horizon_server.records.job import JobRecord

MAX_POINTS = 2000

_Done = TypeVar("_Done", StepDone, EvalDone)


class Curve(Generic[_Done]):
    """Collects points in the order of their steps; beyond `max_points` they get twice as far apart, but the last is always there."""

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        assert max_points >= 2
        self.points: list[_Done] = []
        self.every_steps = 1
        self._max_points = max_points

    def add(self, done: _Done) -> None:
        """Take a point in. One that repeats an earlier step (after a resume) replaces what it repeats."""
        points = self.points
        while points and points[-1].step >= done.step:
            points.pop()
        if len(points) >= 2 and points[-1].step - points[-2].step < self.every_steps:
            points.pop()  # it was there as the last one only
        points.append(done)
        while len(self.points) > self._max_points:
            self.every_steps *= 2
            self._thin()

    def _thin(self) -> None:
        last = self.points.pop()
        kept: list[_Done] = []
        for point in self.points:
            if not kept or point.step - kept[-1].step >= self.every_steps:
                kept.append(point)
        self.points = kept
        self.points.append(last)


async def read_curve(job: JobRecord, events: AsyncIterator[JobEvent]) -> CurveBody:
    """Read the events up to the newest that `job` knows of, so that a running job's curve ends too."""
    steps: Curve[StepDone] = Curve()
    evals: Curve[EvalDone] = Curve()
    try:
        while job.last_sequence > 0 and (event := await anext(events, None)) is not None:
            if isinstance(event.payload, StepDone):
                steps.add(event.payload)
            elif isinstance(event.payload, EvalDone):
                evals.add(event.payload)
            if event.sequence >= job.last_sequence:
                break
    finally:
        if isinstance(events, AsyncGenerator):
            await events.aclose()
    return CurveBody.model_validate(
        {
            "job_id": job.job_id,
            "num_steps": job.num_steps,
            "every_steps": steps.every_steps,
            "points": steps.points,
            "evals": evals.points,
        }
    )

"""The loss curve of a job from its events, in bounded memory; a repeated request reads only the events since the last one."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from horizon_server.api.http.bodies import CurveBody, CurvePoint, EvalPoint
from horizon_server.api.open_streams import closing
from horizon_server.events import EvalDone, JobEvent, StepDone
from horizon_server.records.job import JobRecord

MAX_POINTS = 2000
KEPT_CURVES = 32

PointT = TypeVar("PointT", CurvePoint, EvalPoint)


class Curve(Generic[PointT]):
    """Collects points in the order of their steps; beyond `max_points` they get twice as far apart, but the last is always there."""

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        assert max_points >= 2
        self.points: list[PointT] = []
        self.every_steps = 1
        self._max_points = max_points

    def add(self, point: PointT) -> None:
        """Take a point in. One that repeats an earlier step (after a resume) replaces what it repeats."""
        points = self.points
        while points and points[-1].step >= point.step:
            points.pop()
        if len(points) >= 2 and points[-1].step - points[-2].step < self.every_steps:
            points.pop()  # it was there as the last one only
        points.append(point)
        while len(self.points) > self._max_points:
            self.every_steps *= 2
            self._thin()

    def _thin(self) -> None:
        last = self.points.pop()
        kept: list[PointT] = []
        for point in self.points:
            if not kept or point.step - kept[-1].step >= self.every_steps:
                kept.append(point)
        self.points = kept
        self.points.append(last)


@dataclass
class _JobCurve:
    """What was read of one job, up to `sequence`. The lock lets requests at the same time share one reading."""

    sequence: int = 0
    steps: Curve[CurvePoint] = field(default_factory=Curve)
    evals: Curve[EvalPoint] = field(default_factory=Curve)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def add(self, event: JobEvent) -> None:
        if isinstance(event.payload, StepDone):
            self.steps.add(CurvePoint.model_validate(event.payload))
        elif isinstance(event.payload, EvalDone):
            self.evals.add(EvalPoint.model_validate(event.payload))
        self.sequence = event.sequence


class Curves:
    """Keeps the curves that were asked for last.

    Thread: one event loop.
    """

    def __init__(self, max_kept: int = KEPT_CURVES) -> None:
        self._kept: OrderedDict[str, _JobCurve] = OrderedDict()
        self._max_kept = max_kept

    async def read(self, job: JobRecord, events_after: Callable[[int], AsyncIterator[JobEvent]]) -> CurveBody:
        """Return the curve up to the newest event that `job` knows of, so that a running job's curve ends too."""
        curve = self._kept.setdefault(job.job_id, _JobCurve())
        self._kept.move_to_end(job.job_id)
        while len(self._kept) > self._max_kept:
            self._kept.popitem(last=False)
        async with curve.lock:
            if curve.sequence < job.last_sequence:
                async with closing(events_after(curve.sequence)) as events:
                    async for event in events:
                        curve.add(event)
                        if event.sequence >= job.last_sequence:
                            break
        return CurveBody(
            job_id=job.job_id,
            num_steps=job.num_steps,
            every_steps=curve.steps.every_steps,
            points=curve.steps.points,
            evals=curve.evals.points,
        )

"""The loss curve of a job from its events, in bounded memory; a repeated request reads only the events since the last
one."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pydantic import BaseModel

from horizon_server.api.http.bodies import Number
from horizon_server.records.job import JobRecord
from horizon_server.services.jobs import JobService

MAX_POINTS = 2000
KEPT_CURVES = 32
# Events read at a time, so that other calls get their turn in between.
_BATCH = 1000


class CurvePoint(BaseModel):
    """One step of the loss curve."""

    step: int
    loss: Number
    learning_rate: Number
    grad_norm: Number
    tokens_per_second: Number


class EvalPoint(BaseModel):
    """One evaluation."""

    step: int
    eval_loss: Number


class CurveBody(BaseModel):
    """The loss curve of a job: at most 2000 points, every `every_steps`-th step and the last one."""

    job_id: str
    num_steps: int
    every_steps: int
    points: list[CurvePoint]
    evals: list[EvalPoint]


_FIGURES = tuple({**CurvePoint.model_fields, **EvalPoint.model_fields})

PointT = TypeVar("PointT", CurvePoint, EvalPoint)


class Curve(Generic[PointT]):
    """Collects points in the order of their steps; beyond `max_points` they get twice as far apart, but the last is
    always there."""

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
            kept: list[PointT] = []
            for earlier in self.points[:-1]:
                if not kept or earlier.step - kept[-1].step >= self.every_steps:
                    kept.append(earlier)
            self.points = kept + self.points[-1:]


@dataclass
class _JobCurve:
    """What was read of one job, up to event `sequence`. The lock lets requests at the same time share one reading."""

    sequence: int = 0
    steps: Curve[CurvePoint] = field(default_factory=Curve)
    evals: Curve[EvalPoint] = field(default_factory=Curve)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Curves:
    """Keeps the curves that were asked for last.

    Thread: one event loop.
    """

    def __init__(self, max_kept: int = KEPT_CURVES) -> None:
        self._kept: OrderedDict[str, _JobCurve] = OrderedDict()
        self._max_kept = max_kept

    async def read(self, jobs: JobService, job: JobRecord) -> CurveBody:
        """Return the curve up to now."""
        curve = self._kept.setdefault(job.job_id, _JobCurve())
        self._kept.move_to_end(job.job_id)
        while len(self._kept) > self._max_kept:
            self._kept.popitem(last=False)
        async with curve.lock:
            # Up to what the caller's record knows of: a running job keeps writing, and this must end.
            while curve.sequence < job.last_sequence:
                batch = await jobs.figures(job, names=_FIGURES, after=curve.sequence, limit=_BATCH)
                for sequence, kind, figures in batch:
                    if kind == "step":
                        curve.steps.add(CurvePoint(**figures))
                    else:
                        curve.evals.add(EvalPoint(**figures))
                    curve.sequence = sequence
                if len(batch) < _BATCH:
                    curve.sequence = max(curve.sequence, job.last_sequence)  # what follows is of other kinds
        return CurveBody(
            job_id=job.job_id,
            num_steps=job.num_steps,
            every_steps=curve.steps.every_steps,
            points=curve.steps.points,
            evals=curve.evals.points,
        )

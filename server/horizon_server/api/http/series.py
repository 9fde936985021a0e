"""What a job's steps and evaluations measured, as curves, from its events: in bounded memory, and each event read
once."""

from __future__ import annotations

import asyncio
import json
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, Field

from horizon_server.api.http.bodies import Number, Time
from horizon_server.api.http.buckets import Buckets, Sampled
from horizon_server.records.job import ENDED, JobRecord, JobState, StopRequest
from horizon_server.services.jobs import JobService

MAX_POINTS = 2000
MAX_FIGURES = 40
"""Curves of one job: the figures of every step, and those that its method reports."""
MAX_EVALS = 2000
MAX_MARKS = 500
KEPT_SERIES = 16
# Steps that are read again, to show a part of a long job in more detail.
MAX_DETAIL_STEPS = 20_000
SKETCHED_EVENTS = 10_000
"""A sketch reads about so many steps."""
# Events read at a time, so that other calls get their turn in between.
_BATCH = 5000
_KINDS = ("step", "eval", "state", "checkpoint")
_FIGURES = ("loss", "grad_norm", "learning_rate", "tokens_per_second", "duration_s", "overlap_ratio")
_figures_of = itemgetter(*_FIGURES)
_MEMORY = ("host_memory_bytes", "device_memory_bytes")
_SET_FIGURES = ("loss", "perplexity", "accuracy", "exact_match")
_LAST = 2**62
# Stops of the daemon's own, after which the job continues.
_STOPPED = frozenset(stop.end("")[1] for stop in (StopRequest.DRAIN, StopRequest.DISPLACE, StopRequest.UNLOAD))


class CurvePoint(BaseModel):
    """One point of the loss curve: the means over its steps, of which `step` is the last."""

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
    """The loss curve of a job: at most 2000 points, each the mean of `every_steps` steps."""

    job_id: str
    num_steps: int
    every_steps: int
    points: list[CurvePoint]
    evals: list[EvalPoint]


class CurveOfFigure(BaseModel):
    """The values of one figure, one for each of `steps`; null where it is not a finite number."""

    mean: list[float | None]
    min: list[float | None] | None = Field(None, description="Absent where every point is one step.")
    max: list[float | None] | None = Field(None, description="Absent where every point is one step.")


class EvalSeries(BaseModel):
    """What evaluations measured: `eval_loss`, and of each named set loss, perplexity, accuracy and exact_match."""

    steps: list[int]
    series: dict[str, list[float | None]] = Field(description="By figure: eval_loss, or SET/FIGURE.")


class Mark(BaseModel):
    """Something that happened to the job at a step."""

    kind: Literal["start", "checkpoint", "restart", "pause", "resume", "end"]
    step: int = Field(description="The last step that was done then.")
    time: Time
    text: str


class SeriesBody(BaseModel):
    """Curves of a job, a point for each `every_steps` steps."""

    job_id: str
    num_steps: int
    last_sequence: int = Field(description="Number of the last event that is in the answer.")
    complete: bool = Field(description="False for a sketch, of which only some steps were read.")
    every_steps: int
    steps: list[int] = Field(description="The last step of each point.")
    series: dict[str, CurveOfFigure] = Field(
        description="By figure: loss, grad_norm, learning_rate, tokens_per_second, duration_s, overlap_ratio, "
        "host_memory_bytes, device_memory_bytes, and method/NAME for what the job's method reports."
    )
    evals: EvalSeries
    marks: list[Mark]


@dataclass(frozen=True, kw_only=True)
class AskedSeries:
    """Which curves a request asks for: at most so many points of a range of steps, all figures or those that are named.

    With `sketch`, where much is to be read first, only some of the steps are read.
    """

    points: int
    from_step: int = 0
    to_step: int = _LAST
    names: Sequence[str] = ()
    sketch: bool = False


class _Steps:
    """Steps on their way into buckets, many at a time."""

    def __init__(self, buckets: Buckets) -> None:
        self.buckets = buckets
        self._sequences: list[int] = []
        self._steps: list[int] = []
        self._figures: list[tuple[float | None, ...]] = []
        self._memory: list[tuple[float, float]] = []
        self._of_method: list[Mapping[str, float]] = []

    def add(self, sequence: int, event: Mapping[str, Any]) -> None:
        """Take in the next step."""
        self._sequences.append(sequence)
        self._steps.append(event["step"])
        self._figures.append(_figures_of(event))
        self._memory.append((sum(event["host_memory_bytes"].values()), sum(event["device_memory_bytes"].values())))
        self._of_method.append(event["method_figures"])

    def put(self) -> None:
        """Put those that were taken in into the buckets."""
        if not self._steps:
            return
        columns = dict(zip(_FIGURES, np.array(self._figures, np.float64).T, strict=True))
        columns |= zip(_MEMORY, np.array(self._memory, np.float64).T, strict=True)
        for name in dict.fromkeys(name for figures in self._of_method for name in figures):
            values = [figures.get(name) for figures in self._of_method]
            columns[f"method/{name}"] = np.array(values, np.float64)
        self.buckets.add(np.array(self._steps, np.int64), np.array(self._sequences, np.int64), columns)
        for taken in (self._sequences, self._steps, self._figures, self._memory, self._of_method):
            taken.clear()


class _JobSeries:
    """What was read of one job, up to event `sequence`. The lock lets requests at the same time share one reading."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.sequence = 0
        self.steps = Buckets(most=MAX_POINTS, most_figures=MAX_FIGURES)
        self.evals: list[tuple[int, Mapping[str, float | None]]] = []
        self.marks: list[Mark] = []
        self._coming = _Steps(self.steps)

    async def read(self, jobs: JobService, job: JobRecord, *, every: int = 1) -> None:
        """Read on, to the last event that the caller's record knows of: a running job keeps writing, and this must end.
        Of steps, about one in `every` is read."""
        while self.sequence < job.last_sequence:
            number = await jobs.visit_events(
                job, kinds=_KINDS, after=self.sequence, limit=_BATCH, visit=self._take, every=every
            )
            self._coming.put()
            if number < _BATCH:
                self.sequence = max(self.sequence, job.last_sequence)  # what follows is of other kinds

    def _take(self, sequence: int, time_s: float, event: Mapping[str, Any]) -> None:
        self.sequence = sequence
        if event["kind"] == "step":
            self._coming.add(sequence, event)
            return
        self._coming.put()  # a mark is at the last step before it
        if event["kind"] == "eval":
            self._add_eval(event)
        else:
            self._add_mark(event, time_s)

    def _add_eval(self, event: Mapping[str, Any]) -> None:
        figures = {"eval_loss": event["eval_loss"]}
        for one in event["sets"]:
            figures |= {f"{one['name']}/{name}": one[name] for name in _SET_FIGURES if one.get(name) is not None}
        while self.evals and self.evals[-1][0] >= event["step"]:
            self.evals.pop()  # of a run that is repeated
        self.evals.append((event["step"], figures))
        if len(self.evals) > MAX_EVALS:
            self.evals = [*self.evals[:-1:2], self.evals[-1]]

    def _add_mark(self, event: Mapping[str, Any], time_s: float) -> None:
        kind = self._mark_of(event)
        if kind is None:
            return
        step = max(0, self.steps.last_step) if event["kind"] == "state" else event["step"]
        text = event.get("message", "") if event["kind"] == "state" else f"checkpoint of step {step}"
        self.marks.append(Mark(kind=kind, step=step, time=time_s, text=text))  # type: ignore[arg-type]  # Time makes a date of it
        if len(self.marks) > MAX_MARKS:
            oldest = next((i for i, mark in enumerate(self.marks) if mark.kind == "checkpoint"), 0)
            del self.marks[oldest]

    def _mark_of(self, event: Mapping[str, Any]) -> Any:
        if event["kind"] == "checkpoint":
            return "checkpoint"
        before = next((mark.kind for mark in reversed(self.marks) if mark.kind != "checkpoint"), None)
        state = event["job_state"]
        if state == JobState.RUNNING:
            return "start" if before is None else "resume" if before in ("pause", "end") else "restart"
        if state == JobState.PAUSED or (state == JobState.QUEUED and event["reason"] in _STOPPED):
            return "pause"
        return "end" if state in ENDED else None


class SeriesOfJobs:
    """Keeps the series that were asked for last.

    Thread: one event loop.
    """

    def __init__(self, max_kept: int = KEPT_SERIES) -> None:
        self._kept: OrderedDict[str, _JobSeries] = OrderedDict()
        self._max_kept = max_kept

    async def curve(self, jobs: JobService, job: JobRecord) -> CurveBody:
        """Return the loss curve up to now."""
        async with self._read(jobs, job) as series:
            names = tuple(name for name in CurvePoint.model_fields if name != "step")
            sampled = series.steps.sampled(points=MAX_POINTS, from_step=0, to_step=_LAST, wanted=names)
            columns = [sampled.curves[name].mean.tolist() for name in names if name in sampled.curves]
            return CurveBody(
                job_id=job.job_id,
                num_steps=job.num_steps,
                every_steps=sampled.every_steps,
                points=[
                    CurvePoint(step=step, **dict(zip(names, values, strict=True)))
                    for step, *values in zip(sampled.steps.tolist(), *columns, strict=True)
                ],
                evals=[EvalPoint(step=step, eval_loss=figures["eval_loss"]) for step, figures in series.evals],
            )

    async def body(self, jobs: JobService, job: JobRecord, asked: AskedSeries) -> str:
        """Return a `SeriesBody` as JSON."""
        known = self._kept.get(job.job_id)
        every = (job.last_sequence - (known.sequence if known else 0)) // SKETCHED_EVENTS
        if asked.sketch and every > 1:
            series = _JobSeries()
            await series.read(jobs, job, every=every)
            return _body_text(job, series, series.steps, asked, complete=False)
        async with self._read(jobs, job) as series:
            steps = await self._detail(jobs, job, series, asked) or series.steps
            return _body_text(job, series, steps, asked, complete=True)

    @asynccontextmanager
    async def _read(self, jobs: JobService, job: JobRecord) -> AsyncIterator[_JobSeries]:
        """Give what is known of a job after a look at the events since the last one; nobody reads on in the block."""
        series = self._kept.setdefault(job.job_id, _JobSeries())
        self._kept.move_to_end(job.job_id)
        while len(self._kept) > self._max_kept:
            self._kept.popitem(last=False)
        async with series.lock:
            await series.read(jobs, job)
            yield series

    async def _detail(self, jobs: JobService, job: JobRecord, series: _JobSeries, asked: AskedSeries) -> Buckets | None:
        """Return the steps of a range, each for itself, read again; None where they are at hand, or too many."""
        from_step, to_step = max(1, asked.from_step), min(asked.to_step, series.steps.last_step)
        is_all = from_step == 1 and to_step == series.steps.last_step
        if is_all or series.steps.every_steps == 1 or not 0 <= to_step - from_step < MAX_DETAIL_STEPS:
            return None
        first = series.steps.first_event(from_step)
        end = series.steps.first_event(to_step + series.steps.every_steps) or series.sequence + 1
        if not 0 < end - first < 2 * MAX_DETAIL_STEPS:
            return None  # with much that was done again
        detail = Buckets(most=MAX_DETAIL_STEPS, most_figures=MAX_FIGURES, origin=from_step)
        coming = _Steps(detail)
        reached = first - 1

        def take(sequence: int, _time_s: float, event: Mapping[str, Any]) -> None:
            nonlocal reached
            reached = sequence
            if sequence < end and from_step <= event["step"] <= to_step:
                coming.add(sequence, event)

        number = _BATCH
        while number == _BATCH and reached < end - 1:
            number = await jobs.visit_events(job, kinds=("step",), after=reached, limit=_BATCH, visit=take)
            coming.put()
        return detail


def _body_text(job: JobRecord, series: _JobSeries, steps: Buckets, asked: AskedSeries, *, complete: bool) -> str:
    wanted, from_step, to_step = asked.names, asked.from_step, asked.to_step
    sampled = steps.sampled(points=asked.points, from_step=from_step, to_step=to_step, wanted=wanted or None)
    evals = [(step, figures) for step, figures in series.evals if from_step <= step <= to_step]
    names = dict.fromkeys(name for _, figures in evals for name in figures if not wanted or name in wanted)
    fields = {
        "job_id": json.dumps(job.job_id),
        "num_steps": str(job.num_steps),
        "last_sequence": str(series.sequence),
        "complete": json.dumps(complete),
        "every_steps": str(sampled.every_steps),
        "steps": json.dumps(sampled.steps.tolist(), separators=(",", ":")),
        "series": _object({name: _curve(sampled, name) for name in sampled.curves}),
        "evals": _object(
            {
                "steps": json.dumps([step for step, _ in evals]),
                "series": _object({name: _numbers(figures.get(name) for _, figures in evals) for name in names}),
            }
        ),
        "marks": f"[{','.join(mark.model_dump_json() for mark in series.marks)}]",
    }
    return _object(fields)


def _curve(sampled: Sampled, name: str) -> str:
    curve = sampled.curves[name]
    fields = {"mean": _numbers(curve.mean.tolist())}
    if sampled.every_steps > 1:
        fields |= {"min": _numbers(curve.min.tolist()), "max": _numbers(curve.max.tolist())}
    return _object(fields)


def _object(fields: Mapping[str, str]) -> str:
    return "{" + ",".join(f"{json.dumps(name)}:{text}" for name, text in fields.items()) + "}"


def _numbers(values: Iterable[float | None]) -> str:
    # Six digits are more than a plot shows, and a third of what Python would write.
    return "[" + ",".join("null" if v is None or not math.isfinite(v) else f"{v:.6g}" for v in values) + "]"

"""The loss curve: complete while short, thinned when long, and true after a resume."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import httpx

from horizon_server.api.http.bodies import CurvePoint, EvalPoint
from horizon_server.api.http.curve import MAX_POINTS, Curve, Curves
from horizon_server.events import EvalDone, JobEvent
from horizon_server.records.job import JobRecord, JobState
from horizon_server.spec import parse_job_spec


async def test_a_running_jobs_curve_ends(ann: httpx.AsyncClient, world: Any, make_step: Any) -> None:
    evaluated = EvalDone(step=2, eval_loss=1.75, num_targets=9)
    job = await world.job(make_step(1, 3.0), make_step(2, float("nan")), evaluated)
    curve = (await ann.get(f"/horizon/v1/jobs/{job.job_id}/metrics")).json()
    assert curve["points"][0] == {
        "step": 1, "loss": 3.0, "learning_rate": 1e-4, "grad_norm": 0.5, "tokens_per_second": 3.0,
    }  # fmt: skip
    assert [point["loss"] for point in curve["points"]] == [3.0, None]
    assert curve["evals"] == [{"step": 2, "eval_loss": 1.75}]
    assert (curve["every_steps"], curve["num_steps"]) == (1, 10)


async def test_a_job_without_steps_has_an_empty_curve(ann: httpx.AsyncClient, world: Any) -> None:
    job = await world.job()
    curve = (await ann.get(f"/horizon/v1/jobs/{job.job_id}/metrics")).json()
    assert (curve["points"], curve["evals"]) == ([], [])


def point(step: int, loss: float = 1.0) -> CurvePoint:
    return CurvePoint(step=step, loss=loss, learning_rate=0.1, grad_norm=1.0, tokens_per_second=3.0)


def test_a_long_curve_is_thinned_evenly_and_keeps_its_ends() -> None:
    curve: Curve[CurvePoint] = Curve()
    for step in range(1, 50_001):
        curve.add(point(step))
        assert curve.points[-1].step == step
    steps = [point.step for point in curve.points]
    assert MAX_POINTS // 2 <= len(steps) <= MAX_POINTS
    assert (steps[0], steps[-1]) == (1, 50_000)
    assert {after - before for before, after in itertools.pairwise(steps[:-1])} == {curve.every_steps}


def test_sparse_points_are_thinned_too() -> None:
    curve: Curve[EvalPoint] = Curve(max_points=10)
    for step in range(0, 10_000, 100):
        curve.add(EvalPoint(step=step, eval_loss=1.0))
    steps = [point.step for point in curve.points]
    assert 5 <= len(steps) <= 10
    assert (steps[0], steps[-1]) == (0, 9_900)


def test_steps_repeated_after_a_resume_replace_the_first_ones() -> None:
    curve: Curve[CurvePoint] = Curve()
    for step, loss in [(1, 5.0), (2, 4.0), (3, 3.0), (2, 4.5), (3, 3.5), (4, 3.0)]:
        curve.add(point(step, loss))
    assert [(point.step, point.loss) for point in curve.points] == [(1, 5.0), (2, 4.5), (3, 3.5), (4, 3.0)]


class Events:
    """An endless job; remembers what was read."""

    def __init__(self, make_step: Any) -> None:
        self.read: list[int] = []
        self.num_closed = 0
        self._make_step = make_step

    async def after(self, sequence: int) -> AsyncIterator[JobEvent]:
        try:
            while True:
                sequence += 1
                self.read.append(sequence)
                yield JobEvent(job_id="j-1", sequence=sequence, time_s=0.0, payload=self._make_step(sequence))
                await asyncio.sleep(0)
        finally:
            self.num_closed += 1


def job(last_sequence: int, job_id: str = "j-1") -> JobRecord:
    spec = parse_job_spec({"name": "a", "model": "m", "dataset": "d"})
    return JobRecord(
        job_id=job_id, owner="ann", spec=spec, model_id="m", dataset_id="d", eval_dataset_id="",
        job_state=JobState.RUNNING, last_sequence=last_sequence,
    )  # fmt: skip


async def test_each_event_is_read_once_whoever_asks_and_when(make_step: Any) -> None:
    curves, events = Curves(), Events(make_step)
    at_once = await asyncio.gather(*(curves.read(job(7), events.after) for _ in range(10)))
    assert all([point.step for point in curve.points] == list(range(1, 8)) for curve in at_once)
    later = await curves.read(job(9), events.after)
    assert [point.step for point in later.points] == list(range(1, 10))
    assert events.read == list(range(1, 10))
    assert events.num_closed == 2


async def test_only_the_newest_curves_are_kept(make_step: Any) -> None:
    curves, events = Curves(max_kept=2), Events(make_step)
    for number in range(3):
        await curves.read(job(1, f"j-{number}"), events.after)
    assert len(events.read) == 3
    await curves.read(job(1, "j-2"), events.after)
    assert len(events.read) == 3
    assert [point.step for point in (await curves.read(job(1, "j-0"), events.after)).points] == [1]
    assert len(events.read) == 4

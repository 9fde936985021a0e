"""The loss curve: complete while short, thinned when long, and true after a resume."""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import Any

import httpx
import pytest

from horizon_server.api.http.curve import MAX_POINTS, Curve, CurvePoint, Curves, EvalPoint
from horizon_server.events import EvalDone


async def test_a_running_jobs_curve_ends(ann: httpx.AsyncClient, world: Any, make_step: Any) -> None:
    evaluated = EvalDone(step=2, eval_loss=1.75, num_targets=9)
    job = await world.job(make_step(1, 3.0), make_step(2, float("nan")), evaluated)
    curve = (await ann.get(f"/horizon/v1/jobs/{job.job_id}/metrics")).json()
    assert curve["points"][0] == {
        "step": 1,
        "loss": 3.0,
        "learning_rate": 1e-4,
        "grad_norm": 0.5,
        "tokens_per_second": 3.0,
    }
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


def reads(world: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """After which event each reading of the database started."""
    store, started = world.journal.store, []
    figures_after = store.figures_after

    async def counted(job_id: str, sequence: int, *rest: Any) -> Any:
        started.append(sequence)
        return await figures_after(job_id, sequence, *rest)

    monkeypatch.setattr(store, "figures_after", counted)
    return started


async def test_each_event_is_read_once_whoever_asks_and_when(
    world: Any, make_step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = reads(world, monkeypatch)
    curves, jobs = Curves(), world.services.jobs
    job = await world.job(*(make_step(step) for step in range(1, 8)))
    at_once = await asyncio.gather(*(curves.read(jobs, job) for _ in range(10)))
    assert all([point.step for point in curve.points] == list(range(1, 8)) for curve in at_once)
    assert started == [0]
    later = await world.append(
        job, make_step(8), make_step(9, math.nan), EvalDone(step=9, eval_loss=1.5, num_targets=1)
    )
    curve = await curves.read(jobs, later)
    assert [point.step for point in curve.points] == list(range(1, 10))
    assert (curve.points[-1].loss, curve.evals[-1].eval_loss) == (None, 1.5)
    assert started == [0, job.last_sequence]


async def test_a_long_job_is_read_in_batches(world: Any, make_step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horizon_server.api.http.curve._BATCH", 3)
    started = reads(world, monkeypatch)
    job = await world.job(*(make_step(step) for step in range(1, 8)))
    curve = await Curves().read(world.services.jobs, job)
    assert [point.step for point in curve.points] == list(range(1, 8))
    assert started == [0, 4, 7]


async def test_only_the_newest_curves_are_kept(world: Any, make_step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started = reads(world, monkeypatch)
    curves = Curves(max_kept=2)
    made = [await world.job(make_step(1), name=f"j-{number}") for number in range(3)]
    for job in (*made, made[2], made[0]):
        assert len((await curves.read(world.services.jobs, job)).points) == 1
    assert len(started) == 4

"""The loss curve: complete while short, thinned when long, and true after a resume."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import AsyncIterator
from typing import Any

import httpx

from horizon_server.api.http.curve import MAX_POINTS, Curve, read_curve
from horizon_server.events import EvalDone, JobEvent, StepDone


async def test_a_running_jobs_curve_ends(ada: httpx.AsyncClient, services: Any, make_job: Any, make_step: Any) -> None:
    services.jobs.add(make_job())
    evaluated = EvalDone(step=2, eval_loss=1.75, num_targets=9)
    services.jobs.tell("j-1", make_step(1, 3.0), make_step(2, float("nan")), evaluated)
    curve = (await ada.get("/horizon/v1/jobs/j-1/metrics")).json()
    assert curve["points"][0] == {
        "step": 1, "loss": 3.0, "learning_rate": 1e-4, "grad_norm": 0.5, "tokens_per_second": 3.0,
    }  # fmt: skip
    assert [point["loss"] for point in curve["points"]] == [3.0, None]
    assert curve["evals"] == [{"step": 2, "eval_loss": 1.75}]
    assert (curve["every_steps"], curve["num_steps"]) == (1, 10)
    assert services.jobs.num_watching == 0


async def test_a_job_without_events_has_an_empty_curve(ada: httpx.AsyncClient, services: Any, make_job: Any) -> None:
    services.jobs.add(make_job())
    curve = (await ada.get("/horizon/v1/jobs/j-1/metrics")).json()
    assert (curve["points"], curve["evals"]) == ([], [])


def test_a_long_curve_is_thinned_evenly_and_keeps_its_ends(make_step: Any) -> None:
    curve: Curve[StepDone] = Curve()
    for step in range(1, 50_001):
        curve.add(make_step(step))
        assert curve.points[-1].step == step
    steps = [point.step for point in curve.points]
    assert MAX_POINTS // 2 <= len(steps) <= MAX_POINTS
    assert (steps[0], steps[-1]) == (1, 50_000)
    assert {after - before for before, after in itertools.pairwise(steps[:-1])} == {curve.every_steps}


def test_sparse_points_are_thinned_too() -> None:
    curve: Curve[EvalDone] = Curve(max_points=10)
    for step in range(0, 10_000, 100):
        curve.add(EvalDone(step=step, eval_loss=1.0, num_targets=1))
    steps = [point.step for point in curve.points]
    assert 5 <= len(steps) <= 10
    assert (steps[0], steps[-1]) == (0, 9_900)


def test_steps_repeated_after_a_resume_replace_the_first_ones(make_step: Any) -> None:
    curve: Curve[StepDone] = Curve()
    for step, loss in [(1, 5.0), (2, 4.0), (3, 3.0), (2, 4.5), (3, 3.5), (4, 3.0)]:
        curve.add(make_step(step, loss))
    assert [(point.step, point.loss) for point in curve.points] == [(1, 5.0), (2, 4.5), (3, 3.5), (4, 3.0)]


async def test_reading_stops_at_the_newest_known_event(make_job: Any, make_step: Any) -> None:
    closed = []

    async def endless() -> AsyncIterator[JobEvent]:
        sequence = 0
        try:
            while True:
                sequence += 1
                yield JobEvent(job_id="j-1", sequence=sequence, time_s=0.0, payload=make_step(sequence))
        finally:
            closed.append(sequence)

    curve = await read_curve(dataclasses.replace(make_job(), last_sequence=7), endless())
    assert [point.step for point in curve.points] == list(range(1, 8))
    assert closed == [7]

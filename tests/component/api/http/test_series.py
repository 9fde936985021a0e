"""Curves of a job: complete while short, in buckets when long, true after a restart, and each event read once."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Iterable
from typing import Any

import httpx
import numpy as np
import pytest

from horizon_server.api.http.buckets import Buckets, Sampled
from horizon_server.api.http.series import (
    MAX_EVALS,
    MAX_FIGURES,
    MAX_MARKS,
    MAX_POINTS,
    AskedSeries,
    SeriesOfJobs,
    _JobSeries,
)
from horizon_server.events import CheckpointWritten, EvalDone, StateChanged
from horizon_server.figures import EvalSetFigures
from horizon_server.records.job import JobState

END = 2**40


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


async def test_a_job_without_steps_has_empty_curves(ann: httpx.AsyncClient, world: Any) -> None:
    job = await world.job()
    curve = (await ann.get(f"/horizon/v1/jobs/{job.job_id}/metrics")).json()
    assert (curve["points"], curve["evals"]) == ([], [])
    body = (await ann.get(f"/horizon/v1/jobs/{job.job_id}/series")).json()
    assert (body["steps"], body["series"], body["evals"], body["marks"]) == ([], {}, {"steps": [], "series": {}}, [])


async def test_series_have_every_figure_of_steps_and_sets(ann: httpx.AsyncClient, world: Any, make_step: Any) -> None:
    memory = {"host_memory_bytes": {"planes": 5, "staging": 2}, "device_memory_bytes": {"slots": 3}}
    one_set = EvalSetFigures(name="gsm", loss=1.5, exact_match=0.25, num_targets=4, num_correct=1)
    evaluated = EvalDone(step=2, eval_loss=1.5, num_targets=4, sets=(one_set,))
    job = await world.job(
        make_step(1, 3.0, method_figures={"rewards/margins": 0.5}, **memory), make_step(2, math.inf), evaluated
    )
    body = (await ann.get(f"/horizon/v1/jobs/{job.job_id}/series")).json()
    assert (body["job_id"], body["num_steps"], body["every_steps"]) == (job.job_id, 10, 1)
    assert (body["steps"], body["last_sequence"]) == ([1, 2], job.last_sequence)
    assert body["series"]["loss"] == {"mean": [3.0, None]}  # one step a point: no other value
    assert body["series"]["host_memory_bytes"] == {"mean": [7, 0]}
    assert body["series"]["method/rewards/margins"] == {"mean": [0.5, None]}
    assert {"grad_norm", "learning_rate", "tokens_per_second", "duration_s", "overlap_ratio"} < body["series"].keys()
    assert body["evals"] == {"steps": [2], "series": {"eval_loss": [1.5], "gsm/loss": [1.5], "gsm/exact_match": [0.25]}}
    chosen = (await ann.get(f"/horizon/v1/jobs/{job.job_id}/series?name=loss&name=eval_loss&name=none")).json()
    assert (list(chosen["series"]), list(chosen["evals"]["series"])) == (["loss"], ["eval_loss"])


async def test_starts_checkpoints_pauses_restarts_and_ends_are_marked(world: Any, make_step: Any) -> None:
    series = _JobSeries()
    happened = (
        StateChanged(job_state="RUNNING"),
        make_step(1),
        make_step(2),
        CheckpointWritten(step=2, duration_s=0.1, size_bytes=1),
        StateChanged(job_state="PAUSED", message="paused by a user"),
        StateChanged(job_state="QUEUED", reason="RESUMED"),
        StateChanged(job_state="RUNNING"),
        make_step(3),
        StateChanged(job_state="STARTING", reason="RESTARTED"),
        StateChanged(job_state="RUNNING"),
        StateChanged(job_state="QUEUED", reason="DRAINED"),
        StateChanged(job_state="RUNNING"),
        StateChanged(job_state="SUCCEEDED"),
    )
    job = await world.job(*(one for one in happened))
    await series.read(world.services.jobs, job)
    assert [(mark.kind, mark.step) for mark in series.marks] == [
        ("start", 0),
        ("checkpoint", 2),
        ("pause", 2),
        ("resume", 2),
        ("restart", 3),
        ("pause", 3),
        ("resume", 3),
        ("end", 3),
    ]
    assert series.marks[2].text == "paused by a user"


def buckets(values: Iterable[tuple[int, float]], most: int = MAX_POINTS) -> Buckets:
    made = Buckets(most=most, most_figures=MAX_FIGURES)
    listed = list(values)
    for part in range(0, len(listed), 777):
        steps, losses = zip(*listed[part : part + 777], strict=True)
        made.add(np.array(steps), np.array(steps), {"loss": np.array(losses, float)})
    return made


def sampled(made: Buckets, points: int = MAX_POINTS, from_step: int = 0, to_step: int = END) -> Sampled:
    return made.sampled(points=points, from_step=from_step, to_step=to_step)


def test_a_long_curve_is_thinned_evenly_and_keeps_its_ends() -> None:
    made = buckets((step, 1.0 if step % 1000 else 9.0) for step in range(1, 50_001))
    all_of_it = sampled(made)
    steps = all_of_it.steps.tolist()
    assert MAX_POINTS // 2 <= len(steps) <= MAX_POINTS
    assert steps[-1] == 50_000
    assert {after - before for before, after in itertools.pairwise(steps[:-1])} == {all_of_it.every_steps}
    few = sampled(made, points=10)
    assert len(few.steps) <= 10
    # However few points: no peak is lost, and the mean is that of all steps.
    loss = few.curves["loss"]
    assert (loss.min.min(), loss.max.max()) == (1.0, 9.0)
    assert loss.mean.mean() == pytest.approx(1.008, rel=1e-3)


def test_steps_repeated_after_a_restart_replace_the_first_ones() -> None:
    made = buckets([(1, 5.0), (2, 4.0), (3, 3.0), (2, 4.5), (3, 3.5), (4, 3.0)])
    assert list(zip(sampled(made).steps, sampled(made).curves["loss"].mean, strict=True)) == [
        (1, 5.0),
        (2, 4.5),
        (3, 3.5),
        (4, 3.0),
    ]
    # In buckets of four steps: the one that the restart divides keeps the values of both.
    made = buckets([*((step, 1.0) for step in range(1, 32)), *((step, 3.0) for step in range(14, 21))], most=8)
    assert sampled(made).every_steps == 4
    assert sampled(made).steps.tolist() == [3, 7, 11, 15, 19, 20]
    assert sampled(made).curves["loss"].mean.tolist() == [
        1.0,
        1.0,
        1.0,
        pytest.approx((4 * 1.0 + 2 * 3.0) / 6),
        3.0,
        3.0,
    ]


def test_values_that_are_no_numbers_do_not_spoil_their_bucket() -> None:
    made = buckets([(step, math.nan if step == 5 or step > 8 else 2.0) for step in range(1, 20)], most=4)
    assert sampled(made).curves["loss"].mean.tolist()[0] == 2.0
    assert math.isnan(sampled(made).curves["loss"].mean[-1])


def test_figures_of_a_job_are_bounded() -> None:
    made = Buckets(most=4, most_figures=MAX_FIGURES)
    made.add(np.array([1]), np.array([1]), {f"method/{i}": np.array([1.0]) for i in range(MAX_FIGURES + 5)})
    assert len(sampled(made).curves) == MAX_FIGURES


def test_evaluations_and_marks_are_bounded() -> None:
    series = _JobSeries()
    for step in range(3 * MAX_EVALS):
        series._add_eval({"step": step, "eval_loss": 1.0, "sets": []})
        series._add_mark({"kind": "checkpoint", "step": step}, 1.0)
    assert MAX_EVALS // 2 <= len(series.evals) <= MAX_EVALS
    assert (series.evals[0][0], series.evals[-1][0]) == (0, 3 * MAX_EVALS - 1)
    assert (len(series.marks), series.marks[-1].step) == (MAX_MARKS, 3 * MAX_EVALS - 1)


async def test_a_part_of_a_long_job_is_shown_in_full(
    ann: httpx.AsyncClient, app: Any, world: Any, make_step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horizon_server.api.http.series.MAX_POINTS", 8)
    job = await world.job(*(make_step(step, float(step)) for step in (*range(1, 31), *range(21, 41))))
    url = f"/horizon/v1/jobs/{job.job_id}/series"
    assert (await ann.get(url)).json()["every_steps"] == 8
    part = (await ann.get(url, params={"from_step": 18, "to_step": 23})).json()
    assert (part["every_steps"], part["steps"]) == (1, [18, 19, 20, 21, 22, 23])
    assert part["series"]["loss"]["mean"] == [18, 19, 20, 21, 22, 23]
    monkeypatch.setattr("horizon_server.api.http.series.MAX_DETAIL_STEPS", 5)
    assert (await ann.get(url, params={"from_step": 18, "to_step": 23})).json()["every_steps"] == 8
    assert (await ann.get(url, params={"from_step": 99})).json()["steps"] == []


def reads(world: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """After which event each reading of the database started."""
    store, started = world.journal.store, []
    visit_events = store.visit_events

    async def counted(job_id: str, sequence: int, *rest: Any) -> Any:
        started.append(sequence)
        return await visit_events(job_id, sequence, *rest)

    monkeypatch.setattr(store, "visit_events", counted)
    return started


async def test_each_event_is_read_once_whoever_asks_and_when(
    world: Any, make_step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = reads(world, monkeypatch)
    series, jobs = SeriesOfJobs(), world.services.jobs
    job = await world.job(*(make_step(step) for step in range(1, 8)))
    curves, bodies = await asyncio.gather(
        asyncio.gather(*(series.curve(jobs, job) for _ in range(5))),
        asyncio.gather(*(series.body(jobs, job, AskedSeries(points=9)) for _ in range(5))),
    )
    assert all([point.step for point in curve.points] == list(range(1, 8)) for curve in curves)
    assert len(set(bodies)) == 1
    assert started == [0]
    later = await world.append(
        job, make_step(8), make_step(9, math.nan), EvalDone(step=9, eval_loss=1.5, num_targets=1)
    )
    curve = await series.curve(jobs, later)
    assert [point.step for point in curve.points] == list(range(1, 10))
    assert (curve.points[-1].loss, curve.evals[-1].eval_loss) == (None, 1.5)
    assert started == [0, job.last_sequence]


async def test_a_long_job_is_read_in_batches(world: Any, make_step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horizon_server.api.http.series._BATCH", 3)
    started = reads(world, monkeypatch)
    job = await world.job(*(make_step(step) for step in range(1, 8)), state=JobState.QUEUED)
    curve = await SeriesOfJobs().curve(world.services.jobs, job)
    assert [point.step for point in curve.points] == list(range(1, 8))
    assert len(started) == 3
    assert started[0] == 0


async def test_a_sketch_reads_some_of_the_steps_and_all_marks(
    ann: httpx.AsyncClient, world: Any, make_step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horizon_server.api.http.series.SKETCHED_EVENTS", 10)
    evaluated = EvalDone(step=40, eval_loss=1.0, num_targets=1)
    job = await world.job(*(make_step(step) for step in range(1, 41)), evaluated, state=JobState.SUCCEEDED)
    url = f"/horizon/v1/jobs/{job.job_id}/series"
    sketch = (await ann.get(url, params={"sketch": True})).json()
    assert sketch["complete"] is False
    assert 8 <= len(sketch["steps"]) <= 12
    assert ([mark["kind"] for mark in sketch["marks"]], sketch["evals"]["steps"]) == (["start", "end"], [40])
    whole = (await ann.get(url)).json()
    assert (whole["complete"], len(whole["steps"])) == (True, 40)
    assert (await ann.get(url, params={"sketch": True})).json() == whole, "once all of it was read there is no need"


async def test_only_the_newest_series_are_kept(world: Any, make_step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started = reads(world, monkeypatch)
    series = SeriesOfJobs(max_kept=2)
    made = [await world.job(make_step(1), name=f"j-{number}") for number in range(3)]
    for job in (*made, made[2], made[0]):
        assert len((await series.curve(world.services.jobs, job)).points) == 1
    assert len(started) == 4

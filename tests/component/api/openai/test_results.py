"""The file of a job's losses."""

from __future__ import annotations

import csv
from typing import Any

import pytest

from horizon_server.api.openai import results
from horizon_server.events import EvalDone


async def rows_of(world: Any, job: Any) -> list[dict[str, str]]:
    content = await results.result_of(world.services, job)
    return list(csv.DictReader(content.decode().splitlines()))


async def test_a_step_that_was_done_again_is_there_once(world: Any, make_step: Any) -> None:
    evaluated = EvalDone(step=2, eval_loss=1.75, num_targets=9)
    job = await world.job(make_step(1, 3.0), make_step(2, 2.5), make_step(2, 2.0), evaluated)
    assert await rows_of(world, job) == [
        {"step": step, "train_loss": loss, "train_accuracy": "", "valid_loss": valid, "valid_mean_token_accuracy": ""}
        for step, loss, valid in (("1", "3.0", ""), ("2", "2.0", "1.75"))
    ]


async def test_the_file_of_a_long_job_is_bounded(world: Any, make_step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_MOST_STEPS", 10)
    job = await world.job(*(make_step(step, 1.0) for step in range(1, 101)))
    steps = [int(row["step"]) for row in await rows_of(world, job)]
    assert 5 <= len(steps) <= 20 and steps == sorted(steps) and steps[-1] > 80

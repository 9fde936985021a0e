"""A job whose rows are longer than its chunks, through its worker."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.worker_attempts import Daemon, always, assert_same, attempt, result, spec_of

from horizon_server.events import EvalDone, StepDone
from horizon_server.worker.ending import Outcome

Inputs = Callable[[str], Path]
# Rows of all 96 tokens of the data.
TRAIN: dict[str, Any] = {"sequence_length": 128, "tokens_per_step": 128}


@pytest.fixture
def long_inputs(inputs: Inputs) -> Inputs:
    """A new folder with a model that has the positions."""

    def make(name: str) -> Path:
        folder = inputs(name)
        path = folder / "model" / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 128}))
        return folder

    return make


def run(folder: Path, num_steps: int = 4, *, resume_at: int | None = None, **train: Any) -> tuple[Daemon, Outcome]:
    spec = spec_of(
        num_steps, train={**TRAIN, **train}, eval_dataset="e", eval_every_steps=2, checkpoint={"every_steps": 2}
    )
    daemon = Daemon(always)
    return daemon, attempt(folder, spec, daemon, resume_at=resume_at)


def losses(daemon: Daemon) -> list[float]:
    return [line.loss if isinstance(line, StepDone) else line.eval_loss for line in daemon.said(StepDone, EvalDone)]


def test_a_job_trains_evaluates_and_resumes_in_chunks(long_inputs: Inputs) -> None:
    whole, chunked = long_inputs("whole"), long_inputs("chunked")
    wanted, _ = run(whole)
    found, _ = run(chunked, chunk_tokens=64)
    assert len(losses(found)) == 7, "two evaluations, and one before the first step"
    assert losses(found) == pytest.approx(losses(wanted), rel=1e-5)
    assert losses(found) != losses(wanted), "the rows were computed otherwise"

    straight = result(chunked, 4)
    shutil.rmtree(chunked / "checkpoints" / "step-00000004")
    resumed, _ = run(chunked, chunk_tokens=64, resume_at=2)
    assert losses(resumed)[-3:] == losses(found)[-3:]
    assert_same(result(chunked, 4), straight)

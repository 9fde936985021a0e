"""A checkpoint that is evaluated again has the figures of its job's own evaluation, to the last bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.worker_attempts import EVALUATED, Daemon, always, attempt, inputs, spec_of, worker_request

from horizon_server.codec import from_plain
from horizon_server.errors import InvalidModel
from horizon_server.events import EvalDone, EvaluationProgress
from horizon_server.records.checkpoint_evaluation import EvaluationRequest
from horizon_server.worker.checkpoint_evaluation import evaluate
from horizon_server.worker_link.request import WorkerRequest

__all__ = ["inputs"]

LORA = {"trainable": "lora", "lora": {"rank": 2, "dora": True}}
CASES: dict[str, dict[str, Any]] = {
    "whole model, exported in bf16": {"checkpoint": {"every_steps": 2, "dtype": "bf16"}},
    "whole model, exported in fp16": {"checkpoint": {"every_steps": 2, "dtype": "fp16"}},
    "adapter on a packed base": {"train": {"trainable": "lora", "lora": {"base": "int8"}}},
    "in lanes": {"train": {"lanes": 4}},
    "a merged adapter": {"train": LORA, "checkpoint": {"every_steps": 2, "export": "merged"}},
}


def trained(folder: Path, **changes: Any) -> tuple[list[EvalDone], EvaluationRequest]:
    """The evaluations of a job, and the request for the checkpoint of its step 2."""
    train = {"learning_rate": 1e-2, "warmup_steps": 0, **changes.pop("train", {})}
    spec = spec_of(**{**EVALUATED, "checkpoint": {"every_steps": 2}, **changes, "train": train})
    daemon = Daemon(always)
    attempt(folder, spec, daemon)
    with worker_request(folder, spec) as plain:
        plan = from_plain(WorkerRequest, plain).plan
    request = EvaluationRequest(
        spec=spec,
        step=2,
        model=folder / "model",
        checkpoint=folder / "checkpoints/step-00000002",
        prepared={"eval": folder / "prepared"},
        execution=plan.execution,
        trained_on="host",
        digests=folder / "digests",
    )
    return daemon.said(EvalDone), request


@pytest.mark.parametrize("case", CASES)
def test_the_figures_are_those_of_training(inputs: Callable[[str], Path], case: str) -> None:
    folder = inputs("job")
    evaluations, request = trained(folder, **CASES[case])
    events = Daemon()

    found, differences = evaluate(request, events)

    own = {done.step: done for done in evaluations}
    assert own[2].eval_loss != own[4].eval_loss
    assert (found.step, found.sets, found.judged) == (2, own[2].sets, own[2].judged)
    assert differences == []
    last = events.said(EvaluationProgress)[-1]
    assert last.done == last.total > 0


def test_what_was_computed_otherwise_is_said(inputs: Callable[[str], Path]) -> None:
    _, request = trained(inputs("job"))
    execution = dataclasses.replace(request.execution, num_threads=2)

    _, differences = evaluate(dataclasses.replace(request, execution=execution, trained_on="cuda"), Daemon())

    assert len(differences) == 2
    assert "GPU" in differences[0] and "CPU threads" in differences[1]


def test_a_damaged_checkpoint_is_named(inputs: Callable[[str], Path]) -> None:
    _, request = trained(inputs("job"))
    file = request.checkpoint / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)

    with pytest.raises(InvalidModel, match="checksum"):
        evaluate(request, Daemon())

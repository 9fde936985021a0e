"""Events survive the pipe, and what is not an event is refused."""

from __future__ import annotations

import math

import pytest

from horizon_server.errors import WorkerFailed
from horizon_server.events import (
    AttemptReady,
    CheckpointWritten,
    EvalDone,
    MemoryReleased,
    Message,
    PrepareProgress,
    StateChanged,
    StepDone,
    TurnEnded,
    TurnWanted,
    WorkerProgress,
    decode,
    encode,
)
from horizon_server.figures import TransferFigures

STEP = StepDone(
    step=1,
    num_steps=2,
    loss=2.5,
    grad_norm=1.5,
    learning_rate=1e-5,
    epoch=0.5,
    num_input_tokens_seen=10,
    num_tokens=10,
    tokens_per_second=3.5,
    duration_s=0.1,
    h2d=TransferFigures(bytes=8, busy_s=0.5, exposed_s=0.25),
    host_memory_bytes={"weights": 4},
    skipped="non-finite",
)


@pytest.mark.parametrize(
    "payload",
    [
        STEP,
        StateChanged(job_state="FAILED", reason="WORKER_DIED", message="gone", attempt=2),
        PrepareProgress(done_rows=3, total_rows=9, report={"rows": 9}),
        EvalDone(step=0, eval_loss=1.25, num_targets=7, num_tokens=9, h2d=TransferFigures(bytes=8, busy_s=0.5)),
        CheckpointWritten(step=5, duration_s=0.5, size_bytes=10, eval_loss=None),
        Message(level="info", text="line\nline"),
        AttemptReady(step=0, num_steps=4, device="host"),
        TurnWanted(),
        TurnEnded(released=True),
        MemoryReleased(),
        WorkerProgress(),
    ],
)
def test_every_payload_comes_back_equal(payload: StepDone) -> None:
    line = encode(payload)
    assert "\n" not in line
    assert decode(line) == payload


def test_a_loss_that_is_not_finite_survives() -> None:
    step = StepDone(**{**STEP.__dict__, "loss": math.nan, "grad_norm": math.inf})
    back = decode(encode(step))
    assert math.isnan(back.loss)
    assert back.grad_norm == math.inf


@pytest.mark.parametrize(
    "line", ["", "{}", "[]", '{"kind":"step"}', '{"kind":"nothing"}', "Traceback", '{"kind":"message","x":1}']
)
def test_a_line_that_is_not_an_event_is_refused(line: str) -> None:
    with pytest.raises(WorkerFailed, match="not an event"):
        decode(line)

"""What the log of a worker says: sentences, and nothing of the users' data."""

from __future__ import annotations

import pytest

from horizon_server.children.entry import Answer, Failure, Line, log_text
from horizon_server.errors import InvalidData
from horizon_server.events import (
    AttemptReady,
    CheckpointWritten,
    EvalAnswer,
    EvalDone,
    Message,
    PrepareProgress,
    ReferencesDone,
    SampledText,
    StepDone,
    TurnWanted,
)
from horizon_server.figures import EvalSetFigures

ANSWER = EvalAnswer(document=1, prompt="the data's prompt", answer="of the model", reference="the data's answer")
SETS = (
    EvalSetFigures(name="eval", loss=1.174, accuracy=0.829, num_targets=1578, num_correct=1308),
    EvalSetFigures(name="hard", loss=2.5, num_targets=9, num_correct=0, num_answers=8, num_matches=4, exact_match=0.5),
)
STEP = StepDone(
    step=3,
    num_steps=80,
    loss=2.5,
    grad_norm=1.5,
    learning_rate=1e-5,
    epoch=0.5,
    num_input_tokens_seen=10,
    num_tokens=10,
    tokens_per_second=2538.4,
    duration_s=0.1,
    skipped="non-finite",
)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (STEP, "step 3/80: loss 2.5000, grad_norm 1.500, 2,538 tokens/s, skipped: non-finite"),
        (
            EvalDone(step=40, eval_loss=1.174, num_targets=1578, sets=SETS, answers=(ANSWER,), duration_s=0.25),
            "evaluation at step 40: eval: loss 1.1740, accuracy 82.9% on 1,578 tokens; "
            "hard: loss 2.5000 on 9 tokens, exact match 50.0% (4 of 8) in 0.2 s",
        ),
        (EvalDone(step=0, eval_loss=1.25, num_targets=7), "evaluation at step 0: loss 1.2500"),
        (
            CheckpointWritten(step=5, duration_s=1.5, size_bytes=3 << 20),
            "checkpoint of step 5 written: 3.0 MiB in 1.5 s",
        ),
        (Message(level="warning", text="few threads"), "warning: few threads"),
        (Message(level="info", text="rows are packed"), "rows are packed"),
        (PrepareProgress(done_rows=3000, total_rows=9000), "preparing data: 3,000 of 9,000 rows"),
        (
            PrepareProgress(done_rows=9, report={"rows": 9, "trained_tokens": 4000}),
            "data prepared: 9 rows, 4,000 trained tokens",
        ),
        (
            AttemptReady(step=4, num_steps=80, device="host", packed_rows=17),
            "ready on host: step 4 of 80 is done; an epoch has 17 packed rows",
        ),
        (
            ReferencesDone(done_tokens=1000, total_tokens=2000),
            "reference log-probabilities of 1,000 of 2,000 tokens are done",
        ),
        (Answer(None), "done"),
        (Failure(InvalidData("row 3 is bad")), "failed: INVALID_DATA: row 3 is bad"),
        (TurnWanted(), ""),
        (SampledText(prompt=0, text="secret", num_tokens=1), ""),
    ],
)
def test_a_line_is_a_sentence(line: Line, text: str) -> None:
    assert log_text(line) == text

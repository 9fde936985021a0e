"""Limits and early stopping: where a job ends before its last step, what it keeps then, and that a stop on the way
changes nothing."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.orders import STOP
from tests.support.worker_attempts import EVALUATED, Daemon, always, assert_same, attempt, result, spec_of

from horizon_server.children.entry import Line
from horizon_server.errors import Stalled
from horizon_server.events import AttemptReady, CheckpointWritten, EvalDone, StepDone, TurnWanted
from horizon_server.spec import EvalSpec
from horizon_server.worker.ending import Ending, Outcome
from horizon_server.worker_link.request import RunLimits

NO_LIMITS = RunLimits()
# A learning rate of 0: no evaluation is better than that of the model as it was given.
NO_GAIN: dict[str, Any] = {"eval_dataset": "e", "eval_every_steps": 1, "train": {"learning_rate": 0.0}}


def ending(limits: RunLimits = NO_LIMITS, **evaluation: Any) -> Ending:
    return Ending(num_steps=10, limits=limits, evaluation=EvalSpec(**evaluation))


def test_a_job_without_limits_ends_after_its_last_step() -> None:
    assert ending().at(9) is None
    assert ending().at(10) == Outcome(outcome="succeeded")


def test_a_step_limit_ends_it_before_and_not_after_its_last_step() -> None:
    limited = ending(RunLimits(max_steps=4))
    assert (limited.last_step, limited.at(3)) == (4, None)
    assert limited.at(4) == Outcome(
        outcome="succeeded", reason="STEP_LIMIT", message="ended after step 4 of 10, which is limits.max_steps"
    )
    roomy = ending(RunLimits(max_steps=11))
    assert (roomy.last_step, roomy.at(10)) == (10, Outcome(outcome="succeeded"))


def test_a_deadline_ends_it_unless_there_is_nothing_to_keep() -> None:
    past, future = (RunLimits(deadline_s=time.time() + more_s) for more_s in (-1.0, 3600.0))
    assert ending(future).at(3) is None
    assert ending(past).at(3) == Outcome(
        outcome="succeeded",
        reason="WALL_CLOCK_LIMIT",
        message="ended after step 3 of 10, as limits.max_hours were over",
    )
    with pytest.raises(Stalled, match=r"limits\.max_hours were over before the job's first step; raise it"):
        ending(past).at(0)


def test_patience_counts_evaluations_in_a_row_that_are_not_better() -> None:
    stopping = ending(patience=2, min_delta=0.5)
    for loss in (3.0, 2.6, 2.4, 2.0, math.nan):
        assert stopping.at(5) is None
        stopping.observe(loss)
    # 2.6 was not far enough below 3.0; 2.4 was, and neither 2.0 nor no number is better than that by as much.
    assert stopping.at(5) == Outcome(
        outcome="succeeded",
        reason="EARLY_STOPPED",
        message="ended after step 5 of 10: eval.patience is 2, and as many evaluations were not better than 2.4",
    )
    assert stopping.at(10) == Outcome(outcome="succeeded")


def test_without_patience_no_evaluation_ends_it() -> None:
    patient = ending()
    for loss in (1.0, 2.0, 3.0):
        patient.observe(loss)
    assert patient.at(5) is None


def test_what_is_known_of_evaluations_survives_a_checkpoint() -> None:
    first, second = ending(patience=2), ending(patience=2)
    for loss in (1.0, 2.0):
        first.observe(loss)
    second.restore(json.loads(json.dumps(first.state())))
    second.observe(1.5)
    assert second.at(3) is not None


def test_a_step_limit_does_not_change_the_steps_before_it(inputs: Callable[[str], Path]) -> None:
    whole, limited, undisturbed, short = inputs("whole"), inputs("limited"), Daemon(always), Daemon(always)
    attempt(whole, spec_of(4, checkpoint={"every_steps": 2}, **EVALUATED), undisturbed)
    outcome = attempt(limited, spec_of(4, **EVALUATED), short, limits={"max_steps": 2})

    assert (outcome.outcome, outcome.reason) == ("succeeded", "STEP_LIMIT")
    assert_same(result(limited, 2), result(whole, 2))
    # The schedule is that of all steps, what is reported is the job's end.
    rates = [step.learning_rate for step in undisturbed.said(StepDone)]
    assert [step.learning_rate for step in short.said(StepDone)] == rates[:2]
    assert {line.num_steps for line in short.said(StepDone, AttemptReady)} == {2}
    assert short.said(StepDone)[-1].eta_s == 0.0
    assert [done.step for done in short.said(EvalDone)] == [0, 2]


def test_a_deadline_ends_a_worker_that_waits_for_its_turn(
    inputs: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0

    def give_one_turn(line: Line) -> bytes:
        nonlocal now_s
        if isinstance(line, StepDone):
            now_s = 300.0
        return always(line) + b"yield\n" if isinstance(line, TurnWanted) and now_s < 200 else b""

    monkeypatch.setattr("horizon_server.worker.ending.time.time", lambda: now_s)
    folder, daemon = inputs("job"), Daemon(give_one_turn)
    outcome = attempt(folder, spec_of(), daemon, limits={"deadline_s": 200.0})
    assert (outcome.outcome, outcome.reason) == ("succeeded", "WALL_CLOCK_LIMIT")
    assert [written.step for written in daemon.said(CheckpointWritten)] == [1]
    assert result(folder, 1)


def test_a_deadline_before_the_first_step_is_an_error(inputs: Callable[[str], Path]) -> None:
    folder, daemon = inputs("job"), Daemon()
    with pytest.raises(Stalled, match=r"limits\.max_hours"):
        attempt(folder, spec_of(), daemon, limits={"deadline_s": time.time() - 1})
    assert not (folder / "checkpoints").exists()


def stop_after_first_step(line: Line) -> bytes:
    return STOP if isinstance(line, StepDone) and line.step == 1 else always(line)


def test_a_job_that_was_stopped_ends_early_at_the_same_step(inputs: Callable[[str], Path]) -> None:
    whole, folder, spec = inputs("whole"), inputs("job"), spec_of(**NO_GAIN, eval={"patience": 2})
    undisturbed, second = Daemon(always), Daemon(always)
    outcome = attempt(whole, spec, undisturbed)
    assert (outcome.outcome, outcome.reason) == ("succeeded", "EARLY_STOPPED")
    assert [step.step for step in undisturbed.said(StepDone)] == [1, 2]
    assert undisturbed.said(CheckpointWritten)[-1].eval_loss is not None

    assert attempt(folder, spec, Daemon(stop_after_first_step)).outcome == "stopped"
    assert attempt(folder, spec, second, resume_at=1) == outcome
    assert [step.step for step in second.said(StepDone)] == [2]
    assert_same(result(folder, 2), result(whole, 2))

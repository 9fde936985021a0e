"""A worker that continues with the weights another one left in memory: what it reports, what it saves, and when it
loads them again."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tests.support.orders import CANCEL, MOVE, STOP
from tests.support.worker_attempts import Daemon, always, assert_same, result, spec_of, worker_request

from horizon_server.children.entry import Line
from horizon_server.codec import from_plain
from horizon_server.errors import InvalidSpec
from horizon_server.events import AttemptReady, CheckpointWritten, EvalDone, Message, StepDone, TurnWanted
from horizon_server.planning.model_folder import open_model_folder
from horizon_server.records.execution import Residency
from horizon_server.store.generations import PLANE, Generations
from horizon_server.worker.ending import Outcome
from horizon_server.worker.training import Training
from horizon_server.worker_link.request import WorkerRequest

Inputs = Callable[[str], Path]


class Killed(Exception):
    """Stands for the end of a process at a known moment; what is queued by then is dropped."""


def live(request: dict[str, Any], daemon: Daemon, *, then: Callable[[Training], None] = lambda _: None) -> Outcome:
    training = Training(from_plain(WorkerRequest, {**request, "turns": True}), events=daemon, orders=daemon.orders)
    try:
        return training.run()
    finally:
        then(training)
        training.close()


def dies_at(step: int) -> Daemon:
    """A daemon under which the worker ends once it has said that a step is done."""

    def react(line: Line) -> bytes:
        if isinstance(line, StepDone) and line.step == step:
            raise Killed
        return always(line)

    return Daemon(react)


def first_life(request: dict[str, Any], step: int) -> None:
    with pytest.raises(Killed):
        live(request, dies_at(step))


def test_it_continues_after_the_last_step_and_ends_with_the_same_bits(inputs: Inputs) -> None:
    spec = spec_of(6, checkpoint={"every_steps": 0})
    whole, killed = inputs("whole"), inputs("killed")
    with worker_request(whole, spec) as request:
        live(request, Daemon(always))
    daemon = Daemon(always)
    with worker_request(killed, spec) as request:
        first_life(request, 3)
        live({**request, "resume_from_memory": True}, daemon)
    assert [ready.step for ready in daemon.said(AttemptReady)] == [3]
    # Step 3 was reported by nobody: its worker ended while it sent the line.
    assert [done.step for done in daemon.said(StepDone)] == [3, 4, 5, 6]
    assert "continues after step 3, with the weights that are in memory" in [m.text for m in daemon.said(Message)]
    assert_same(result(whole, 6), result(killed, 6))


@pytest.mark.parametrize("max_grad_norm", [1.0, None])
def test_states_on_a_device_are_at_home_when_a_worker_has_ended_in_order(
    inputs: Inputs, max_grad_norm: float | None
) -> None:
    spec = spec_of(6, checkpoint={"every_steps": 0}, train={"max_grad_norm": max_grad_norm})
    whole, moved = inputs("whole"), inputs("moved")
    with worker_request(whole, spec) as request:
        live(request, Daemon(always))
    daemons = [
        Daemon(lambda line: MOVE if isinstance(line, StepDone) and line.step == 3 else always(line)),
        Daemon(always),
    ]
    with worker_request(moved, spec, kept=Residency(resident_layers=2, state_layers=2)) as request:
        assert live(request, daemons[0]).outcome == "moved"
        live({**request, "resume_from_memory": True}, daemons[1])
    assert [ready.step for ready in daemons[1].said(AttemptReady)] == [3]
    assert_same(result(whole, 6), result(moved, 6))


def test_a_step_that_was_reported_is_not_reported_again(inputs: Inputs) -> None:
    daemons = [
        Daemon(lambda line: STOP if isinstance(line, StepDone) and line.step == 2 else always(line)),
        Daemon(always),
    ]
    with worker_request(inputs("job"), spec_of(4)) as request:
        live(request, daemons[0])
        live({**request, "resume_from_memory": True}, daemons[1])
    assert [done.step for done in daemons[1].said(StepDone)] == [3, 4]
    tokens = [done.num_input_tokens_seen for daemon in daemons for done in daemon.said(StepDone)]
    assert len(tokens) == 4 and sorted(set(tokens)) == tokens


def test_weights_in_the_middle_of_an_update_are_loaded_again_and_it_says_so(inputs: Inputs) -> None:
    spec = spec_of(6, checkpoint={"every_steps": 2})
    whole, killed = inputs("whole"), inputs("killed")
    with worker_request(whole, spec) as request:
        live(request, Daemon(always))
    daemon = Daemon(always)
    with worker_request(killed, spec) as request:
        first_life(request, 5)
        layout = open_model_folder(killed / "model").layout
        Generations(layout, request["planes"][PLANE]).begin(1, 6)
        again = {**request, "resume_from": str(killed / "checkpoints/step-00000004"), "resume_from_memory": True}
        live(again, daemon)
    assert [ready.step for ready in daemon.said(AttemptReady)] == [4]
    [warning] = [message.text for message in daemon.said(Message) if message.level == "warning"]
    assert warning.startswith("the weights in memory cannot be continued, so they are loaded again: ")
    assert_same(result(whole, 6), result(killed, 6))


def test_memory_that_nothing_was_loaded_into_is_not_continued(inputs: Inputs) -> None:
    daemon = Daemon(always)
    with worker_request(inputs("job"), spec_of(2)) as request:
        live({**request, "resume_from_memory": True}, daemon)
    assert [ready.step for ready in daemon.said(AttemptReady)] == [0]
    assert any("nothing was kept there" in message.text for message in daemon.said(Message))


def test_steps_that_are_in_memory_alone_are_saved_when_an_order_comes_before_the_first_turn(inputs: Inputs) -> None:
    folder = inputs("job")
    with worker_request(folder, spec_of(6, checkpoint={"every_steps": 0})) as request:
        first_life(request, 3)
        daemon = Daemon(lambda line: STOP if isinstance(line, TurnWanted) else b"")
        assert live({**request, "resume_from_memory": True}, daemon).outcome == "stopped"
    assert [written.step for written in daemon.said(CheckpointWritten)] == [3]
    after = Daemon(always)
    with worker_request(folder, spec_of(6), resume_from=folder / "checkpoints/step-00000003") as request:
        live(request, after)
    assert [done.step for done in after.said(StepDone)] == [4, 5, 6]


def test_a_cancelled_job_writes_nothing_of_them(inputs: Inputs) -> None:
    folder = inputs("job")
    with worker_request(folder, spec_of(6, checkpoint={"every_steps": 0})) as request:
        first_life(request, 3)
        daemon = Daemon(lambda line: CANCEL if isinstance(line, TurnWanted) else b"")
        assert live({**request, "resume_from_memory": True}, daemon).outcome == "stopped"
    assert daemon.said(CheckpointWritten) == []


def test_a_stop_right_after_it_continued_saves_the_step_that_it_continued_at(inputs: Inputs) -> None:
    folder = inputs("job")
    with worker_request(folder, spec_of(6, checkpoint={"every_steps": 2})) as request:
        first_life(request, 3)
        daemon = Daemon(lambda line: STOP if isinstance(line, AttemptReady) else always(line))
        again = {**request, "resume_from": str(folder / "checkpoints/step-00000002"), "resume_from_memory": True}
        assert live(again, daemon).outcome == "stopped"
    assert [written.step for written in daemon.said(CheckpointWritten)] == [3]


def test_an_evaluation_that_was_done_is_not_done_again(inputs: Inputs) -> None:
    spec = spec_of(4, eval_dataset="e", eval_every_steps=2, checkpoint={"every_steps": 0})
    folder = inputs("job")
    first, second = Daemon(always), Daemon(always)

    def stop_at_the_evaluation_of_step_2(line: Line) -> bytes:
        return STOP if isinstance(line, EvalDone) and line.step == 2 else always(line)

    first = Daemon(stop_at_the_evaluation_of_step_2)
    with worker_request(folder, spec, evaluations={"eval": str(folder / "prepared")}) as request:
        live(request, first)
        live({**request, "resume_from_memory": True}, second)
    assert [done.step for done in first.said(EvalDone)] == [0, 2]
    assert [done.step for done in second.said(EvalDone)] == [4]


def test_what_could_not_be_continued_exactly_is_refused(inputs: Inputs) -> None:
    with worker_request(inputs("job"), spec_of(4)) as request:
        first_life(request, 2)
        with pytest.raises(InvalidSpec, match="cannot be continued exactly"):
            in_bf16 = {**request["plan"]["execution"], "compute_dtype": "bfloat16"}
            plan = {**request["plan"], "execution": in_bf16}
            live({**request, "plan": plan, "resume_from_memory": True}, Daemon(always))


def test_a_step_that_was_skipped_is_kept_as_one(inputs: Inputs) -> None:
    """Its loss is not a number, and its weights are those of the step before it."""
    folder = inputs("job")
    weights = load_file(folder / "model/model.safetensors")
    weights["model.norm.weight"].fill_(3e38)
    save_file(weights, folder / "model/model.safetensors", metadata={"format": "pt"})
    with worker_request(folder, spec_of(4)) as request:
        first_life(request, 2)
        daemon = Daemon(always)
        live({**request, "resume_from_memory": True}, daemon)
    steps = daemon.said(StepDone)
    assert [(done.step, done.skipped) for done in steps] == [(step, "non_finite_gradient") for step in (2, 3, 4)]
    assert all(math.isnan(done.loss) for done in steps)

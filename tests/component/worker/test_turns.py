"""A worker that has its device in turns: what it asks for and says when, and that no bit of its work depends on it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.linked_worker import LinkedWorker
from tests.support.orders import CANCEL, STOP
from tests.support.worker_attempts import (
    EVALUATED,
    Daemon,
    React,
    always,
    assert_same,
    attempt,
    result,
    spec_of,
    until,
    worker_request,
)

from horizon_server.children.entry import Answer, Line
from horizon_server.events import (
    AttemptReady,
    CheckpointWritten,
    EvalDone,
    MemoryReleased,
    Message,
    StepDone,
    TurnEnded,
    TurnWanted,
)
from horizon_server.records.job import StopRequest
from horizon_server.worker.device_turn import DeviceLock, DeviceTurn
from horizon_server.worker.ending import Outcome
from horizon_server.worker_link.orders import RELEASE, TURN, YIELD

WAIT_S = 120.0
ONE_STEP = TURN + YIELD


def turn_of(daemon: Daemon, *, shared: bool = True, deadline_s: float | None = None) -> tuple[DeviceTurn, list[str]]:
    """A turn, and a list of when memory was freed."""
    freed: list[str] = []
    turn = DeviceTurn(
        orders=daemon.orders, events=daemon, shared=shared, deadline_s=deadline_s, release=lambda: freed.append("freed")
    )
    return turn, freed


def test_without_turns_nothing_waits_and_nothing_is_said() -> None:
    daemon = Daemon()
    turn, freed = turn_of(daemon, shared=False)
    daemon.order(YIELD + RELEASE)
    until(lambda: daemon.orders.is_release_wanted)
    assert turn.take()
    turn.boundary()
    turn.give_back(release=True)
    assert (daemon.lines, freed) == ([], [])


def test_a_worker_locks_all_its_devices_or_none(tmp_path: Path) -> None:
    first, second, third = (tmp_path / f"host:{index}.lock" for index in range(3))
    joint, single, other = DeviceLock((first, second)), DeviceLock((second,)), DeviceLock((first, third))
    assert DeviceLock(()).take()
    assert single.take()
    assert not joint.take()
    # It has left the one that was free to others.
    assert other.take()
    other.give_back()
    single.give_back()
    assert joint.take()
    assert joint.take(), "it has them already"
    assert not single.take()
    assert not other.take()
    assert DeviceLock((third,)).take()
    joint.give_back()
    assert single.take()


def test_a_priority_that_could_not_be_restored_is_restored_at_a_later_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is alone keeps its turn: it would be lowered until its end."""
    worked = iter([False, False, True])
    monkeypatch.setattr("horizon_server.cpu_priority.restore", lambda: next(worked))
    turn, _ = turn_of(Daemon(lambda line: TURN if isinstance(line, TurnWanted) else b""))
    for _ in range(5):  # not asked for any more once it has worked
        assert turn.take()
        turn.boundary()
    assert next(worked, None) is None


def test_a_turn_is_kept_until_it_is_wanted_back() -> None:
    daemon = Daemon(lambda line: TURN if isinstance(line, TurnWanted) else b"")
    turn, freed = turn_of(daemon)
    for _ in range(3):
        assert turn.take()
        turn.boundary()
    assert daemon.lines == [TurnWanted()]
    daemon.order(YIELD)
    until(lambda: daemon.orders.is_turn_wanted_back)
    turn.boundary()
    assert daemon.lines == [TurnWanted(), TurnEnded(released=False)]
    assert turn.take()
    daemon.order(RELEASE)
    until(lambda: daemon.orders.is_turn_wanted_back)
    turn.boundary()
    assert daemon.lines[2:] == [TurnWanted(), TurnEnded(released=True)]
    assert freed == ["freed"]


def test_memory_is_freed_while_it_waits() -> None:
    daemon = Daemon(lambda line: {TurnWanted: RELEASE, MemoryReleased: TURN}.get(type(line), b""))
    turn, freed = turn_of(daemon)
    assert turn.take()
    assert (daemon.lines, freed) == ([TurnWanted(), MemoryReleased()], ["freed"])


def test_memory_that_it_kept_for_its_next_turn_is_freed_before_a_checkpoint() -> None:
    daemon = Daemon(lambda line: ONE_STEP if isinstance(line, TurnWanted) else b"")
    turn, freed = turn_of(daemon)
    assert turn.take()
    turn.boundary()
    for _ in range(2):
        turn.give_back(release=True)
    assert daemon.lines == [TurnWanted(), TurnEnded(released=False), MemoryReleased()]
    assert freed == ["freed"]


def test_a_request_to_give_back_that_came_too_late_does_not_end_the_next_turn() -> None:
    daemon = Daemon(lambda line: {TurnWanted: TURN, TurnEnded: YIELD}.get(type(line), b""))
    turn, _ = turn_of(daemon)
    assert turn.take()
    turn.give_back()
    assert turn.take()
    turn.boundary()
    assert daemon.lines == [TurnWanted(), TurnEnded(), TurnWanted()]


@pytest.mark.parametrize("order", [STOP, CANCEL])
def test_an_order_to_end_wakes_a_worker_that_waits(order: bytes) -> None:
    daemon = Daemon(lambda line: order if isinstance(line, TurnWanted) else b"")
    turn, _ = turn_of(daemon)
    assert not turn.take()
    # Whether or not it was granted just now, it has no turn from here on.
    assert daemon.lines == [TurnWanted(), TurnEnded()]


def test_so_does_the_jobs_deadline() -> None:
    late = Daemon()
    assert not turn_of(late, deadline_s=time.time() + 0.05)[0].take()
    assert late.orders.current is StopRequest.NOTHING


def test_a_cancel_is_not_taken_back() -> None:
    daemon = Daemon()
    daemon.order(CANCEL + STOP)
    daemon.hang_up()
    assert daemon.orders.wait(0.0)
    assert daemon.orders.current is StopRequest.CANCEL


# Attempts


def step_by_step(line: Line) -> bytes:
    """Grant turns that end at the next boundary, with the memory on the device."""
    return TURN + RELEASE if isinstance(line, TurnWanted) else b""


def test_no_bit_depends_on_turns(inputs: Callable[[str], Path]) -> None:
    one, other, kept, divided = inputs("one"), inputs("other"), Daemon(always), Daemon(step_by_step)
    spec = spec_of(**EVALUATED)
    assert attempt(one, spec, kept) == attempt(other, spec, divided) == Outcome(outcome="succeeded")
    assert_same(result(one, 4), result(other, 4))
    assert [done.eval_loss for done in kept.said(EvalDone)] == [done.eval_loss for done in divided.said(EvalDone)]
    # Before the last checkpoint, which needs no device, it is given back with its memory.
    assert kept.said(TurnWanted, TurnEnded) == [TurnWanted(), TurnEnded(released=True)]
    assert isinstance(kept.lines[-1], CheckpointWritten)
    # Between the three batches of each of the three evaluations too.
    assert len(divided.said(TurnWanted)) == 4 + 3 * 3


def test_a_turn_ends_before_its_step_is_reported(inputs: Callable[[str], Path]) -> None:
    daemon = Daemon(lambda line: ONE_STEP if isinstance(line, TurnWanted) else b"")
    attempt(inputs("job"), spec_of(2), daemon)
    kinds = [type(line) for line in daemon.lines if not isinstance(line, Message)]
    a_step = [TurnEnded, StepDone]
    assert kinds == [TurnWanted, AttemptReady, *a_step, TurnWanted, *a_step, MemoryReleased, CheckpointWritten]


def test_a_checkpoint_is_written_without_a_turn(inputs: Callable[[str], Path]) -> None:
    daemon = Daemon(always)
    attempt(inputs("job"), spec_of(2, checkpoint={"every_steps": 1}), daemon)
    kinds = [type(line) for line in daemon.lines if not isinstance(line, Message)]
    a_step = [StepDone, TurnEnded, CheckpointWritten]
    assert kinds == [TurnWanted, AttemptReady, *a_step, TurnWanted, *a_step]


def test_a_stop_before_the_first_turn_leaves_nothing(inputs: Callable[[str], Path]) -> None:
    folder, daemon = inputs("job"), Daemon(lambda line: STOP if isinstance(line, TurnWanted) else b"")
    assert attempt(folder, spec_of(), daemon) == Outcome(outcome="stopped")
    assert not (folder / "checkpoints").exists()
    assert not daemon.said(AttemptReady, StepDone)


def stop_in_the_evaluation_after(step: int) -> React:
    """Grant turns of one batch each, and stop the worker while it waits between two batches of an evaluation."""
    num_waits: int | None = None

    def react(line: Line) -> bytes:
        nonlocal num_waits
        if isinstance(line, StepDone) and line.step == step:
            num_waits = 0
        if not isinstance(line, TurnWanted):
            return b""
        num_waits = None if num_waits is None else num_waits + 1
        return STOP if num_waits == 2 else ONE_STEP

    return react


@pytest.mark.parametrize("step", [2, 4])
def test_an_evaluation_that_was_stopped_while_it_waited_is_done_by_the_next_attempt(
    step: int, inputs: Callable[[str], Path]
) -> None:
    whole, folder, spec = inputs("whole"), inputs("job"), spec_of(**EVALUATED)
    undisturbed = Daemon(always)
    attempt(whole, spec, undisturbed)

    first, second = Daemon(stop_in_the_evaluation_after(step)), Daemon(always)
    assert attempt(folder, spec, first) == Outcome(outcome="stopped")
    assert first.said(CheckpointWritten)[-1].eval_loss is None
    assert attempt(folder, spec, second, resume_at=step) == Outcome(outcome="succeeded")

    evaluated = [(done.step, done.eval_loss) for done in (*first.said(EvalDone), *second.said(EvalDone))]
    assert evaluated == [(done.step, done.eval_loss) for done in undisturbed.said(EvalDone)]
    assert_same(result(folder, 4), result(whole, 4))


# A process


def test_a_worker_waits_for_its_turn_and_gives_it_back_within_a_step(inputs: Callable[[str], Path]) -> None:
    folder, whole, spec = inputs("job"), inputs("whole"), spec_of(3)
    with worker_request(folder, spec, turns=True) as request:
        (folder / "request.json").write_text(json.dumps(request))
        with LinkedWorker(folder / "request.json") as worker:
            worker.connect()
            order, lines = worker.order, (line for line in worker.lines() if not isinstance(line, Message))
            assert next(lines) == TurnWanted()
            order(ONE_STEP)
            assert isinstance(next(lines), AttemptReady), "set up in its turn"
            assert next(lines) == TurnEnded(released=False)
            step = next(lines)
            assert isinstance(step, StepDone) and step.step == 1
            assert next(lines) == TurnWanted()
            order(RELEASE)
            assert next(lines) == MemoryReleased()
            order(TURN + RELEASE)
            assert next(lines) == TurnEnded(released=True)
            step = next(lines)
            assert isinstance(step, StepDone) and step.step == 2
            assert next(lines) == TurnWanted()
            order(STOP)
            assert next(lines) == TurnEnded(released=False)
            assert isinstance(next(lines), CheckpointWritten)
            assert next(lines) == Answer({"outcome": "stopped", "reason": "", "message": ""})
            assert list(lines) == []
            assert worker.wait() == 0

    assert attempt(folder, spec, Daemon(always), resume_at=2) == Outcome(outcome="succeeded")
    attempt(whole, spec, Daemon(always))
    assert_same(result(folder, 3), result(whole, 3))

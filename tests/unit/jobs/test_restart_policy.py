"""Which failures restart a job, how often, after which pause, and what a job says that has failed for good."""

from __future__ import annotations

import dataclasses

import pytest

from horizon_server.children.child import exit_reason
from horizon_server.errors import (
    DiskFull,
    Diverged,
    DoesNotFit,
    HorizonError,
    InvalidModel,
    InvalidSpec,
    IoFailed,
    OutOfMemory,
    TurnOverrun,
    WorkerCrashed,
    WorkerDied,
    WorkerFailed,
    WorkerSilent,
)
from horizon_server.jobs.recovery import FORGOTTEN, PAUSES_S, Failure, Verdict, judge
from horizon_server.records.job import JobRecord, JobState
from horizon_server.spec import parse_job_spec

NOW_S = 1000.0
KILLED = WorkerDied(exit_reason(-9, oom_killed=False))
OOM_KILLED = WorkerDied(exit_reason(-9, oom_killed=True))
CRASHED = WorkerCrashed(exit_reason(-11, oom_killed=False))
DRIVER_RESET = WorkerFailed("AcceleratorError: CUDA error: unspecified launch failure")


def job() -> JobRecord:
    return JobRecord(
        job_id="job_1",
        owner="ada",
        spec=parse_job_spec({"name": "j", "model": "m", "dataset": "d"}),
        model_id="m",
        dataset_id="d",
        eval_dataset_id="",
        job_state=JobState.RUNNING,
    )


def fail(record: JobRecord, error: Exception, step: int, *, max_restarts: int = 5) -> tuple[JobRecord, Verdict]:
    """Let it fail once; returns the job as it is stored afterwards."""
    verdict = judge(record, Failure.of(error, step=step), max_restarts=max_restarts, now_s=NOW_S)
    return dataclasses.replace(record, **verdict.fields), verdict


@pytest.mark.parametrize(
    "error",
    [
        KILLED,
        OOM_KILLED,
        CRASHED,
        DRIVER_RESET,
        OutOfMemory("x"),
        IoFailed("x"),
        DiskFull("x"),
        TurnOverrun("x"),
        WorkerSilent("x"),
        OSError(5, "x"),
    ],
)
def test_what_may_pass_is_restarted_after_a_pause(error: Exception) -> None:
    record, verdict = fail(job(), error, 7)
    assert verdict.restart and verdict.reason == "RESTARTED"
    assert (verdict.pause_s, record.not_before_s) == (1.0, NOW_S + 1)
    assert (record.num_restarts, record.failed_step) == (1, 7)
    assert "(after step 7); it is restarted in 1 s (restart 1 of at most 5 without progress)" in verdict.message


@pytest.mark.parametrize(
    "error",
    [
        InvalidSpec("x"),
        InvalidModel("x"),
        Diverged("x"),
        DoesNotFit("x"),
        WorkerFailed("KeyError: 'x'"),
        HorizonError("x"),
        ValueError("a defect"),
    ],
)
def test_what_would_end_the_same_way_fails_at_once_with_its_own_message(error: Exception) -> None:
    _, verdict = fail(job(), error, 7)
    assert not verdict.restart
    assert verdict.reason == getattr(error, "reason", "INTERNAL")
    assert verdict.message.endswith(str(error)) and "restart" not in verdict.message


def test_pauses_grow_and_the_row_ends_with_the_cause_and_what_to_do() -> None:
    record, pauses = job(), []
    for _ in PAUSES_S:
        record, verdict = fail(record, KILLED, 7)
        assert verdict.restart
        pauses.append(verdict.pause_s)
    record, verdict = fail(record, KILLED, 7)
    assert tuple(pauses) == PAUSES_S
    assert (verdict.restart, verdict.reason, record.num_restarts) == (False, "WORKER_DIED", 5)
    assert "restarted 5 times without progress, and failed again after step 7: the worker was killed" in verdict.message
    assert verdict.message.endswith("look at the last lines of its log, then run horizon job resume job_1")


def test_a_step_further_than_ever_ends_the_row_and_a_repeated_one_does_not() -> None:
    record, _ = fail(job(), KILLED, 7)
    record, verdict = fail(record, KILLED, 5)
    assert (record.num_restarts, record.failed_step, verdict.pause_s) == (2, 7, 30.0)
    record, _ = fail(record, KILLED, 7)
    assert record.num_restarts == 3
    record, verdict = fail(record, KILLED, 8)
    assert (record.num_restarts, record.failed_step, verdict.pause_s) == (1, 8, 1.0)


@pytest.mark.parametrize("error", [CRASHED, OOM_KILLED, DRIVER_RESET, IoFailed("x"), TurnOverrun("x")])
@pytest.mark.parametrize("step", [-1, 7])
def test_the_same_failure_twice_at_the_same_step_is_not_tried_a_third_time(error: Exception, step: int) -> None:
    record, _ = fail(job(), error, step)
    _, verdict = fail(record, error, step)
    assert not verdict.restart
    where = "before its first step" if step < 0 else "after step 7"
    assert verdict.message.startswith(f"it failed twice in the same way {where}: ")
    assert verdict.message.endswith("then run horizon job resume job_1")


def test_an_attempt_that_dies_while_it_loads_is_not_said_to_be_before_the_first_step_of_a_job_that_has_done_some() -> (
    None
):
    died = judge(dataclasses.replace(job(), step=11), Failure.of_daemon(step=-1), max_restarts=3, now_s=0.0)
    assert died.message.startswith(
        "the daemon and the worker died (before it continued after step 11); it is restarted"
    )
    died = judge(job(), Failure.of_daemon(step=-1), max_restarts=3, now_s=0.0)
    assert died.message.startswith("the daemon and the worker died (before its first step); it is restarted")


def test_another_failure_or_another_step_is_not_the_same() -> None:
    record, _ = fail(job(), CRASHED, 7)
    assert fail(record, IoFailed("x"), 7)[1].restart
    assert fail(record, CRASHED, 6)[1].restart
    # A device that is still resetting: the failure at the start is the first of its kind.
    assert fail(record, CRASHED, -1)[1].restart


@pytest.mark.parametrize("error", [KILLED, DiskFull("x"), WorkerSilent("x")])
def test_what_comes_from_outside_may_meet_the_same_step_twice(error: Exception) -> None:
    record, _ = fail(job(), error, 7)
    assert fail(record, error, 7)[1].restart


def test_a_kill_for_lack_of_memory_is_named_as_such() -> None:
    record, _ = fail(job(), OOM_KILLED, 7)
    _, verdict = fail(record, OOM_KILLED, 7)
    assert verdict.reason == "OUT_OF_MEMORY"
    assert "lower train.tokens_per_step or train.sequence_length" in verdict.message


def test_a_job_whose_daemon_died_too_is_restarted_without_a_pause_but_not_forever() -> None:
    record = job()
    for _ in range(3):
        verdict = judge(record, Failure.of_daemon(step=7), max_restarts=3, now_s=NOW_S)
        assert (verdict.restart, verdict.pause_s, verdict.not_before_s) == (True, 0.0, 0.0)
        record = dataclasses.replace(record, **verdict.fields)
    verdict = judge(record, Failure.of_daemon(step=7), max_restarts=3, now_s=NOW_S)
    assert (verdict.restart, verdict.reason) == (False, "DAEMON_DIED")


def test_memory_is_not_trusted_after_a_fault_of_the_workers_own_code() -> None:
    assert not fail(job(), CRASHED, 7)[1].trusts_memory
    others = (KILLED, OOM_KILLED, DRIVER_RESET, TurnOverrun("x"), WorkerSilent("x"))
    assert all(fail(job(), error, 7)[1].trusts_memory for error in others)


def test_no_restarts_are_a_setting() -> None:
    _, verdict = fail(job(), KILLED, 7, max_restarts=0)
    assert not verdict.restart
    assert "the setting max_restarts is 0" in verdict.message


def test_a_job_that_a_user_resumes_starts_its_count_again() -> None:
    record, _ = fail(job(), CRASHED, 7)
    record, verdict = fail(record, CRASHED, 7)
    assert not verdict.restart
    assert fail(dataclasses.replace(record, **FORGOTTEN), CRASHED, 7)[1].restart

"""Whether a job whose attempt failed is restarted by itself, after which pause, or fails with its cause. No clock, no
files: only rules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from horizon_server.children.child import OUT_OF_MEMORY_KILLER
from horizon_server.errors import (
    DiskFull,
    HorizonError,
    IoFailed,
    OutOfMemory,
    TurnOverrun,
    WorkerCrashed,
    WorkerDied,
    WorkerFailed,
    WorkerSilent,
    os_problem,
)
from horizon_server.records.job import JobRecord

PAUSES_S = (1.0, 30.0, 120.0, 600.0, 1800.0)
"""Before the first restart without progress, the second, and so on; the last one holds from there on."""

DAEMON_DIED = "DAEMON_DIED"
RESTARTED = "RESTARTED"
"""Reason of a job that is restarted after a failure."""

# Why a job is queued again that has not failed: these count as no restart.
HAD_NO_WORKER: dict[str, Any] = {
    "reason": "DAEMON_RESTARTED",
    "message": "the daemon ended before this attempt had a worker; the preparation starts again",
}
HAD_OTHER_VERSION = {
    "reason": "WORKER_REPLACED",
    "message": "its worker was of another version than the daemon and was ended; it continues from its newest "
    "checkpoint",
}

# What may end otherwise when it is done again: the node or its driver failed and not the job, as far as anybody can
# see.
_MAY_PASS = (WorkerDied, WorkerCrashed, TurnOverrun, WorkerSilent, OutOfMemory, IoFailed, DiskFull)
# How torch words the failures of a driver or device.
_DEVICE_FAILURES = ("CUDA error", "CUDA driver error", "CUDNN_STATUS", "CUBLAS_STATUS")
# Whatever the job does at a step, these come from elsewhere: that they meet the same step twice says nothing about it.
_FROM_OUTSIDE = frozenset({WorkerDied.reason, WorkerSilent.reason, DAEMON_DIED, DiskFull.reason})
# What to do about a cause that is known; all others are in the log.
_ADVICE = {
    OutOfMemory.reason: "lower train.tokens_per_step or train.sequence_length, or free memory on the node; then run",
    DiskFull.reason: "free space on the node's disk (horizon checkpoint delete, horizon dataset delete), then run",
    IoFailed.reason: "look at the node's disk and at the job's log, then run",
    DAEMON_DIED: "look at the daemon's log, then run",
}


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why an attempt failed: a stable `reason`, and the `message` of its error.

    `step` is the last step that this attempt is known to have done or to have continued after, -1 where it failed
    before that.
    """

    reason: str
    message: str
    step: int
    is_transient: bool
    trusts_memory: bool = True
    """Whether the weights that the worker left in memory may be continued, where they are whole. Not after a fault of
    its own code, which may have written to them before it was noticed."""

    @classmethod
    def of(cls, error: Exception, *, step: int) -> Failure:
        """Return the failure of an attempt that ended with `error`."""
        if isinstance(error, HorizonError):
            is_device = isinstance(error, WorkerFailed) and any(text in error.message for text in _DEVICE_FAILURES)
            is_killed_for_memory = isinstance(error, WorkerDied) and OUT_OF_MEMORY_KILLER in error.message
            reason = OutOfMemory.reason if is_killed_for_memory else error.reason
            is_transient = is_device or isinstance(error, _MAY_PASS)
            return cls(
                reason=reason,
                message=error.message,
                step=step,
                is_transient=is_transient,
                trusts_memory=not isinstance(error, WorkerCrashed),
            )
        if isinstance(error, OSError):
            return cls(
                reason=IoFailed.reason, message=f"the node failed: {os_problem(error)}", step=step, is_transient=True
            )
        message = f"the daemon could not carry out the attempt: {type(error).__name__}: {error}"
        return cls(reason=HorizonError.reason, message=message, step=step, is_transient=False)

    @classmethod
    def of_daemon(cls, *, step: int) -> Failure:
        """Return the failure of an attempt whose worker ended while no daemon was there, as at a reboot."""
        return cls(reason=DAEMON_DIED, message="the daemon and the worker died", step=step, is_transient=True)

    @property
    def identity(self) -> str:
        """What two failures share that are the same failure at the same step."""
        return f"{self.reason}@{'start' if self.step < 0 else self.step}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What becomes of a job after a failure: restarted after `pause_s`, or failed; with the `reason` and `message` that
    it gets."""

    restart: bool
    reason: str
    message: str
    num_restarts: int
    failed_step: int
    last_failure: str
    pause_s: float
    not_before_s: float
    trusts_memory: bool

    @property
    def fields(self) -> dict[str, Any]:
        """What of it the job's record keeps."""
        names = ("num_restarts", "failed_step", "last_failure", "not_before_s")
        return {name: getattr(self, name) for name in names}


FORGOTTEN: dict[str, Any] = {"num_restarts": 0, "failed_step": -1, "last_failure": "", "not_before_s": 0.0}
"""The fields of a job without a failure: where a user resumes it, the count starts again."""


def judge(job: JobRecord, failure: Failure, *, max_restarts: int, now_s: float) -> Verdict:
    """Decide whether a job is restarted.

    At most `max_restarts` times in a row; a step beyond the furthest that it had failed at ends the row. The same
    failure twice at the same step is not tried a third time, unless it comes from outside of the job.
    """
    # Steps that are only done again are no progress.
    num_before = 0 if failure.step > job.failed_step else job.num_restarts
    is_repeated = failure.reason not in _FROM_OUTSIDE and failure.identity == job.last_failure
    restart = failure.is_transient and not is_repeated and num_before < max_restarts
    where = f"after step {failure.step}"
    if failure.step < 0:
        where = f"before it continued after step {job.step}" if job.step > 0 else "before its first step"
    pause_s = 0.0
    if restart:
        # The daemon's own absence was the pause already.
        pause_s = 0.0 if failure.reason == DAEMON_DIED else PAUSES_S[min(num_before, len(PAUSES_S) - 1)]
        times = f"restart {num_before + 1} of at most {max_restarts} without progress"
        message = f"{failure.message} ({where}); it is restarted{f' in {pause_s:g} s' if pause_s else ''} ({times})"
    elif not failure.is_transient:
        message = failure.message
    else:
        if is_repeated:
            cause = f"it failed twice in the same way {where}: {failure.message}"
        elif max_restarts:
            cause = f"it was restarted {num_before} times without progress, and failed again {where}: {failure.message}"
        else:
            cause = f"it failed {where}, and the setting max_restarts is 0: {failure.message}"
        todo = _ADVICE.get(failure.reason, "look at the last lines of its log, then run")
        message = f"{cause}; {todo} horizon job resume {job.job_id}"
    return Verdict(
        restart=restart,
        reason=RESTARTED if restart else failure.reason,
        message=message,
        num_restarts=num_before + restart,
        failed_step=max(failure.step, job.failed_step),
        last_failure=failure.identity,
        pause_s=pause_s,
        not_before_s=math.ceil(now_s + pause_s) if pause_s else 0.0,
        trusts_memory=failure.trusts_memory,
    )

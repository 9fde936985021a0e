"""One tree of errors for users, picklable, each leaf with a stable `reason`.

A leaf says what went wrong in one sentence and what to do; `api.status` maps every leaf to its gRPC status and HTTP code. Leaves
also inherit the stdlib type they refine, so that code which knows nothing of horizon can still catch them. Programmer errors are
`assert`, never a HorizonError.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Self

from horizon_formats.problems import FieldViolation as FieldViolation


class HorizonError(Exception):
    """Root of every error that is shown to a user. `reason` is stable: scripts may match it."""

    reason = "INTERNAL"

    def __init__(
        self, message: str, *, violations: Sequence[FieldViolation] = (), retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.violations = tuple(violations)
        self.retry_after_s = retry_after_s

    @classmethod
    def of(cls, field: str, message: str, *, retry_after_s: float | None = None) -> Self:
        """Return the error of one refused field: its message is also its only violation."""
        return cls(message, violations=[FieldViolation(field=field, description=message)], retry_after_s=retry_after_s)

    def __reduce__(self) -> tuple[object, ...]:
        # By default an exception is rebuilt from its positional arguments alone.
        rebuild = partial(type(self), violations=self.violations, retry_after_s=self.retry_after_s)
        return (rebuild, (self.message,))


class InvalidSpec(HorizonError, ValueError):
    """A job spec or a request field is malformed; `violations` name the fields."""

    reason = "INVALID_SPEC"


class InvalidData(HorizonError, ValueError):
    """A dataset file cannot be used as it is; `violations` name file, line and field."""

    reason = "INVALID_DATA"


class InvalidModel(HorizonError, ValueError):
    """A model folder cannot be used as it is: not safetensors, truncated, a tensor missing or misshapen."""

    reason = "INVALID_MODEL"


class InvalidUpload(HorizonError, ValueError):
    """The bytes received do not match the announced size, offset or sha256."""

    reason = "INVALID_UPLOAD"


class UploadInProgress(HorizonError, RuntimeError):
    """Another connection of the same user is sending the same content right now; a retry after a while continues from there."""

    reason = "UPLOAD_IN_PROGRESS"


class Stalled(HorizonError, TimeoutError):
    """The caller sent nothing for too long, or what was asked for took too long."""

    reason = "STALLED"


class RequestIdReused(HorizonError, ValueError):
    """The same request_id came with another body."""

    reason = "REQUEST_ID_REUSED"


class NotFound(HorizonError, LookupError):
    """The resource does not exist, or the caller may not know that it does."""

    reason = "NOT_FOUND"


class AlreadyExists(HorizonError, ValueError):
    """The name is taken by a resource with other content."""

    reason = "ALREADY_EXISTS"


class Unauthenticated(HorizonError, PermissionError):
    """No token, or one that is wrong, expired or revoked."""

    reason = "UNAUTHENTICATED"


class NotAllowed(HorizonError, PermissionError):
    """The caller is known but may not do this."""

    reason = "NOT_ALLOWED"


class WrongJobState(HorizonError, RuntimeError):
    """The job is in a state that does not allow the call."""

    reason = "WRONG_JOB_STATE"


class InUse(HorizonError, RuntimeError):
    """The resource is held by a job that has not ended, or the state folder by another daemon."""

    reason = "IN_USE"


class DoesNotFit(HorizonError, MemoryError):
    """The memory plan exceeds the node's limit; the message carries the numbers and the smallest change that would fit."""

    reason = "DOES_NOT_FIT"


class DiskFull(HorizonError, OSError):
    """A write failed for lack of space; what was partially written is gone."""

    reason = "DISK_FULL"


class DatabaseUnavailable(HorizonError, RuntimeError):
    """The daemon cannot use its database for a reason that may pass, such as another process that writes for long."""

    reason = "DATABASE_UNAVAILABLE"


class TooManyCalls(HorizonError, RuntimeError):
    """The caller has too many calls under way; a retry after a moment is served."""

    reason = "TOO_MANY_CALLS"


class TooLarge(HorizonError, ValueError):
    """A message, file or wait exceeds its bound."""

    reason = "TOO_LARGE"


class NotAvailableYet(HorizonError, NotImplementedError):
    """The call has its shape in the contract but this version does not perform it."""

    reason = "NOT_AVAILABLE_YET"


class Draining(HorizonError, RuntimeError):
    """The daemon is shutting down and takes no new work."""

    reason = "DRAINING"


class WorkerFailed(HorizonError, RuntimeError):
    """A child process failed by a defect, or broke the protocol; the message carries the true reason."""

    reason = "WORKER_FAILED"


class WorkerDied(HorizonError, RuntimeError):
    """A child process ended without an answer: killed by a signal, or gone without a word. The same call may work when repeated."""

    reason = "WORKER_DIED"


class WorkerCrashed(HorizonError, RuntimeError):
    """A child process ended by a fault of its own, such as a segmentation fault. The same call will most likely end the same way."""

    reason = "WORKER_CRASHED"


class OutOfMemory(HorizonError, MemoryError):
    """A child process needed more memory than it may take, or than there is."""

    reason = "OUT_OF_MEMORY"


class IoFailed(HorizonError, OSError):
    """A child process could not read or write a file."""

    reason = "IO_ERROR"


class Diverged(HorizonError, RuntimeError):
    """Training was stopped because too many steps in a row could not be used: their loss or gradients were not finite."""

    reason = "DIVERGED"


class BadSetting(HorizonError, ValueError):
    """A setting or a command-line value of the daemon is unusable: port in use, no TLS off loopback, unknown key."""

    reason = "BAD_SETTING"

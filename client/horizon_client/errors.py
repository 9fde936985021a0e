"""Everything that can go wrong, as one tree of errors, and the similar names that a message suggests.

An error that the server answers has the server's own name and `reason` (`DoesNotFit`, DOES_NOT_FIT). Every error has a
message for people, the refused fields (`violations`) and the exit code of the `horizon` command. The reasons and exit
codes of what the server answers are in `horizon_formats.error_table`, which says what the codes mean.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from horizon_formats.error_table import ERRORS
from horizon_formats.problems import FieldViolation as FieldViolation

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "AlreadyExists",
    "BadConfig",
    "BadEndpoint",
    "BadFile",
    "BadSetting",
    "BoxLost",
    "CorruptDownload",
    "DatabaseUnavailable",
    "DeadlineExceeded",
    "DiskFull",
    "Diverged",
    "DoesNotFit",
    "Draining",
    "DriveFailed",
    "FieldViolation",
    "FileConflict",
    "HarnessFailed",
    "HorizonClientError",
    "InUse",
    "InvalidData",
    "InvalidModel",
    "InvalidRequest",
    "InvalidSpec",
    "InvalidUpload",
    "IoFailed",
    "NotAllowed",
    "NotAvailableYet",
    "NotFound",
    "OutOfMemory",
    "QuotaExceeded",
    "RequestIdReused",
    "ServerFailed",
    "Stalled",
    "TooLarge",
    "TooManyCalls",
    "TrackerFailed",
    "TurnOverrun",
    "Unauthenticated",
    "Unavailable",
    "UploadInProgress",
    "WorkerCrashed",
    "WorkerDied",
    "WorkerFailed",
    "WorkerSilent",
    "WrongJobState",
]

_SIMILAR = 0.6
_AS_SIMILAR = 0.08
_MOST_NAMES = 3


class HorizonClientError(Exception):
    """Root of everything this library raises on purpose."""

    reason = "CLIENT_ERROR"
    exit_code = 5

    def __init_subclass__(cls) -> None:
        if (status := ERRORS.get(cls.__name__)) is not None:
            cls.reason, cls.exit_code = status.reason, status.exit_code

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        violations: Sequence[FieldViolation] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or type(self).reason
        self.violations = tuple(violations)
        self.retry_after_s = retry_after_s

    @classmethod
    def of(cls, field: str, message: str) -> Self:
        """Return the error of one refused field: its message is also its only violation."""
        return cls(message, violations=[FieldViolation(field=field, description=message)])


class InvalidRequest(HorizonClientError, ValueError):
    """The request is malformed; `violations` name the fields. Raised by the server, or here before anything is sent."""

    reason = "INVALID_ARGUMENT"
    exit_code = 2


class InvalidSpec(InvalidRequest):
    """A job spec or a request field is malformed."""


class InvalidData(InvalidRequest):
    """A dataset file cannot be used as it is; `violations` name file, line and field."""


class InvalidModel(InvalidRequest):
    """A model folder cannot be used as it is."""


class InvalidUpload(InvalidRequest):
    """The bytes that arrived do not match the announced size, offset or sha256."""


class RequestIdReused(InvalidRequest):
    """The same request_id was sent before with another body."""


class TooLarge(InvalidRequest):
    """A message, file or wait exceeds its limit."""


class BadFile(InvalidRequest):
    """A local file cannot be pushed as it is."""

    reason = "INVALID_FILE"


class TrackerFailed(HorizonClientError):
    """A tracker, such as an MLflow server, did not take a job's figures. The job is not affected."""

    reason = "TRACKER_FAILED"


class HarnessFailed(HorizonClientError):
    """lm-evaluation-harness has ended without results."""

    reason = "HARNESS_FAILED"


class BadConfig(InvalidRequest):
    """No server is configured, or an address, profile, token or CA file is unusable."""

    reason = "BAD_CONFIG"


class FileConflict(InvalidRequest):
    """A download would overwrite a different file."""

    reason = "FILE_EXISTS"


class AlreadyExists(HorizonClientError, ValueError):
    """The name is taken by something with other content."""


class WrongJobState(HorizonClientError, RuntimeError):
    """The job is in a state that does not allow the call."""


class InUse(HorizonClientError, RuntimeError):
    """A job that has not ended needs it."""


class DoesNotFit(HorizonClientError, MemoryError):
    """The memory plan exceeds the node's limit; the message has the numbers and the smallest change that would fit."""


class QuotaExceeded(HorizonClientError, RuntimeError):
    """The user or project has what an admin allows them; the message has the numbers and what makes room."""


class DiskFull(HorizonClientError, OSError):
    """The server's disk is full."""


class NotAvailableYet(HorizonClientError, NotImplementedError):
    """This version of the server does not support the call."""

    reason = "NOT_AVAILABLE_YET"
    exit_code = 2


class Unauthenticated(HorizonClientError, PermissionError):
    """No token, or one that is wrong, expired or revoked."""


class NotAllowed(HorizonClientError, PermissionError):
    """The token is valid, but its owner may not do this."""


class NotFound(HorizonClientError, LookupError):
    """It does not exist, or is not the caller's. `kind` and `name` say what, where the caller named a job, dataset or
    model."""

    kind = name = ""


class Unavailable(HorizonClientError, ConnectionError):
    """The server cannot be reached, or cut the call; the same call may succeed later."""

    reason = "UNAVAILABLE"


class Draining(Unavailable):
    """The server is shutting down and takes no new work."""


class TooManyCalls(Unavailable):
    """The caller has too many calls in progress."""


class DatabaseUnavailable(Unavailable):
    """The server cannot use its database at the moment."""


class WorkerDied(Unavailable):
    """A child process of the server ended without an answer; the same call may succeed later."""


class UploadInProgress(Unavailable):
    """Another connection of the same user is sending the same content right now."""


class BadEndpoint(Unavailable):
    """What answers at the address is not a horizond that can be trusted: wrong port, CA or host name. A retry cannot
    help."""

    reason = "BAD_ENDPOINT"


class DeadlineExceeded(HorizonClientError, TimeoutError):
    """The server did not answer in time."""

    reason = "DEADLINE_EXCEEDED"


class Stalled(DeadlineExceeded):
    """The server waited too long for data, or the work took too long."""


class ServerFailed(HorizonClientError, RuntimeError):
    """The server met an error of its own."""

    reason = "INTERNAL"


class BoxLost(Unavailable):
    """The machine of the fleet that has the job does not answer; the job continues there."""


class WorkerFailed(ServerFailed):
    """A child process of the server failed; the message says why."""


class WorkerCrashed(ServerFailed):
    """A child process of the server crashed; the same call will most likely crash it again."""


class TurnOverrun(ServerFailed):
    """The worker of a job did not give the device back when it was asked to, and was killed."""


class WorkerSilent(ServerFailed):
    """The worker of a job made no progress for too long, and was killed."""


class OutOfMemory(ServerFailed):
    """A child process of the server needed more memory than it may use."""


class IoFailed(ServerFailed):
    """A child process of the server could not read or write a file."""


class DriveFailed(ServerFailed):
    """A drive of the server could not be read or written, or returned other data than it was given. The message names
    it."""


class Diverged(ServerFailed):
    """Training was stopped because the loss or the gradients were not finite for too many steps in a row."""


class BadSetting(ServerFailed):
    """A setting of the server is unusable."""


class CorruptDownload(ServerFailed):
    """What arrived is not what was listed."""

    reason = "CORRUPT_DOWNLOAD"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `did you mean X or Y?` with the most similar known names, or nothing when none is similar."""
    scored = {other: SequenceMatcher(None, name.lower(), other.lower()).ratio() for other in known}
    best = max(scored.values(), default=0.0)
    near = [other for other, score in scored.items() if score >= max(_SIMILAR, best - _AS_SIMILAR)]
    near.sort(key=scored.__getitem__, reverse=True)
    return f"did you mean {' or '.join(near[:_MOST_NAMES])}?" if near else ""


async def suggested(problem: NotFound, names_of: Mapping[str, Callable[[], Awaitable[Iterable[str]]]]) -> NotFound:
    """Return `problem` with names that are similar to the one that was named; `names_of` lists those of a kind (model,
    dataset, job)."""
    if problem.kind not in names_of:
        return problem
    try:
        hint = did_you_mean(problem.name, await names_of[problem.kind]())
    except HorizonClientError:
        hint = ""  # the first problem is the one to report
    if not hint:
        return problem
    text = f"{problem.kind} {problem.name!r} does not exist, or is not yours; {hint} See: horizon {problem.kind} list"
    found = NotFound(text, reason=problem.reason, violations=problem.violations)
    found.kind, found.name = problem.kind, problem.name
    return found

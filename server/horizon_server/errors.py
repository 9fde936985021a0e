"""One tree of errors for users, picklable.

A leaf says what went wrong and what to do; the table that the client reads too (`horizon_formats.error_table`) has its
stable `reason`, its gRPC status and its HTTP code. Leaves also inherit the stdlib type they refine, so that code which
knows nothing of horizon can still catch them. Programmer errors are `assert`, never a HorizonError.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Self

from horizon_formats.error_table import ERRORS, UNEXPECTED
from horizon_formats.problems import FieldViolation as FieldViolation


class HorizonError(Exception):
    """Root of every error that is shown to a user. `reason` is stable: scripts may match it."""

    status = UNEXPECTED
    reason = status.reason

    def __init_subclass__(cls) -> None:
        # A private refinement has no row: it is reported as what it refines.
        if (status := ERRORS.get(cls.__name__)) is not None:
            cls.status, cls.reason = status, status.reason

    def __init__(
        self,
        message: str,
        *,
        file: Path | None = None,
        violations: Sequence[FieldViolation] = (),
        retry_after_s: float | None = None,
    ) -> None:
        """With `file`, the message is what is wrong with that file or folder, and goes on after its name: "is empty",
        ": x is negative".

        The message shows the last part of the path alone; `with_names` puts the name there that the reader knows.
        """
        self.problem, self.file = message, file
        self.message = message if file is None else _after(file.name, message)
        super().__init__(self.message)
        self.violations = tuple(violations)
        self.retry_after_s = retry_after_s

    def with_names(self, names: Mapping[Path, str]) -> HorizonError:
        """Return the error with its file under the name that its reader knows, itself where no folder of `names` has
        the file.

        A file in a folder becomes `FILE of NAME`; of a folder without a name, whose files can only be the ones that are
        meant, `FILE`.
        """
        folders = [folder for folder in names if self.file is not None and self.file.is_relative_to(folder)]
        if self.file is None or not folders:
            return self
        # The innermost: a folder may be inside another one that has a name too.
        folder = max(folders, key=lambda folder: len(folder.parts))
        name, inside = names[folder], str(self.file.relative_to(folder))
        if inside != ".":
            name = f"{inside} of {name}" if name else inside
        called = name or "the folder"
        return type(self)(_after(called, self.problem), violations=self.violations, retry_after_s=self.retry_after_s)

    @classmethod
    def of(cls, field: str, message: str, *, retry_after_s: float | None = None) -> Self:
        """Return the error of one refused field: its message is also its only violation."""
        return cls(message, violations=[FieldViolation(field=field, description=message)], retry_after_s=retry_after_s)

    def __reduce__(self) -> tuple[object, ...]:
        # By default an exception is rebuilt from its positional arguments alone.
        rebuild = partial(type(self), file=self.file, violations=self.violations, retry_after_s=self.retry_after_s)
        return (rebuild, (self.problem,))


class InvalidSpec(HorizonError, ValueError):
    """A job spec or a request field is malformed; `violations` name the fields."""


class InvalidData(HorizonError, ValueError):
    """A dataset file cannot be used as it is; `violations` name file, line and field."""


class InvalidModel(HorizonError, ValueError):
    """A model folder cannot be used as it is: not safetensors, truncated, a tensor missing or misshapen."""


class InvalidUpload(HorizonError, ValueError):
    """The bytes received do not match the announced size, offset or sha256."""


class UploadInProgress(HorizonError, RuntimeError):
    """Another connection of the same user is sending the same content right now; a retry after a while continues from
    there."""


class Stalled(HorizonError, TimeoutError):
    """The caller sent nothing for too long, or what was asked for took too long."""


class RequestIdReused(HorizonError, ValueError):
    """The same request_id came with another body."""


class NotFound(HorizonError, LookupError):
    """The resource does not exist, or the caller may not know that it does. `kind` and `name` say what the caller has
    named, where that is a job, dataset or model; else both are empty."""

    kind = name = ""

    @classmethod
    def named(cls, kind: str, name: str) -> Self:
        """Return the error of a job, dataset or model that the caller has named."""
        error = cls(f"{kind} {name!r:.80} does not exist, or is not yours; see: horizon {kind} list")
        error.kind, error.name = kind, name
        return error

    def __reduce__(self) -> tuple[object, ...]:
        return (partial(type(self).named, self.kind, self.name), ()) if self.kind else super().__reduce__()


class AlreadyExists(HorizonError, ValueError):
    """The name is taken by a resource with other content."""


class Unauthenticated(HorizonError, PermissionError):
    """No token, or one that is wrong, expired or revoked."""


class NotAllowed(HorizonError, PermissionError):
    """The caller is known but may not do this."""


class WrongJobState(HorizonError, RuntimeError):
    """The job is in a state that does not allow the call."""


class InUse(HorizonError, RuntimeError):
    """The resource is held by a job that has not ended, or the state folder by another daemon."""


class DoesNotFit(HorizonError, MemoryError):
    """The memory plan exceeds the node's limit; the message carries the numbers and the smallest change that would
    fit."""


class QuotaExceeded(HorizonError, RuntimeError):
    """The user or project has what an admin allows them; the message carries the numbers and what makes room."""


class DiskFull(HorizonError, OSError):
    """A write failed for lack of space; what was partially written is gone."""


class DatabaseUnavailable(HorizonError, RuntimeError):
    """The daemon cannot use its database for a reason that may pass, such as another process that writes for long."""


class TooManyCalls(HorizonError, RuntimeError):
    """The caller has too many calls under way; a retry after a moment is served."""


class TooLarge(HorizonError, ValueError):
    """A message, file or wait exceeds its bound."""


class Draining(HorizonError, RuntimeError):
    """The daemon is shutting down and takes no new work."""


class BoxLost(HorizonError, RuntimeError):
    """The machine of the fleet that has the job, or is to have it, does not answer; a job that is there continues."""


class WorkerFailed(HorizonError, RuntimeError):
    """A child process failed by a defect, or broke the protocol; the message carries the true reason."""


class WorkerDied(HorizonError, RuntimeError):
    """A child process ended without an answer, such as when it is killed by a signal. The same call may work when
    repeated."""


class WorkerCrashed(HorizonError, RuntimeError):
    """A child process ended by a fault of its own, such as a segmentation fault. The same call will most likely end the
    same way."""


class TurnOverrun(HorizonError, RuntimeError):
    """A worker did not give the device back when it was asked to, and was killed so that others get it."""


class WorkerSilent(HorizonError, RuntimeError):
    """A worker that was to work made no progress for too long, and was killed."""


class OutOfMemory(HorizonError, MemoryError):
    """A child process needed more memory than it may take, or than there is."""


class IoFailed(HorizonError, OSError):
    """A child process could not read or write a file."""


class DriveFailed(HorizonError, OSError):
    """A drive of tier_dirs could not be read or written, or returned other data than it was given."""


class Diverged(HorizonError, RuntimeError):
    """Training was stopped because too many steps in a row could not be used: their loss or gradients were not
    finite."""


class BadSetting(HorizonError, ValueError):
    """A setting or a command-line value of the daemon is unusable: port in use, no TLS off loopback, unknown key."""


@contextmanager
def naming(names: Mapping[Path, str]) -> Iterator[None]:
    """Raise what the block raises with its file under the name that the reader knows: see `HorizonError.with_names`."""
    try:
        yield
    except HorizonError as error:
        if (named := error.with_names(names)) is error:
            raise
        raise named from error


def os_problem(error: OSError) -> str:
    """Return what the system says, and of the file the name alone: where the daemon keeps its files is not the user's
    concern."""
    name = f" ({Path(error.filename).name})" if isinstance(error.filename, str) else ""
    return f"{error.strerror or error}{name}"


def _after(name: str, problem: str) -> str:
    return f"{name}{problem}" if problem.startswith(":") else f"{name} {problem}"

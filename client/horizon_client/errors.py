"""What can go wrong, as one tree of errors. Knows neither grpc nor the command line; `rpc_errors` makes leaves from gRPC statuses.

Every leaf has a sentence (`message`), a stable `reason` (the server's, where it gave one), the refused fields (`violations`) and the exit
code of the `horizon` command:

    2  the request cannot be carried out as it is: malformed, name taken, wrong state, does not fit, not supported by this server
    3  not authenticated or not allowed
    4  not found
    5  the server cannot be reached, did not answer in time, or failed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Violation:
    """One refused field: its path (`train.learning_rate`, `line[17].messages[2].role`) and why, in one sentence."""

    field: str
    description: str


class HorizonClientError(Exception):
    """Root of everything this library raises on purpose."""

    reason = "CLIENT_ERROR"
    exit_code = 5

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        violations: Sequence[Violation] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or type(self).reason
        self.violations = tuple(violations)
        self.retry_after_s = retry_after_s


class InvalidRequest(HorizonClientError, ValueError):
    """The request is malformed; `violations` name the fields. Raised by the server, or here before anything is sent."""

    reason = "INVALID_ARGUMENT"
    exit_code = 2


class BadFile(InvalidRequest):
    """A local file cannot be pushed as it is."""

    reason = "INVALID_FILE"


class BadConfig(InvalidRequest):
    """No server is configured, or an address, profile, token or CA file is unusable."""

    reason = "BAD_CONFIG"


class FileConflict(InvalidRequest):
    """A download would overwrite a different file."""

    reason = "FILE_EXISTS"


class AlreadyExists(HorizonClientError, ValueError):
    """The name is taken by something else."""

    reason = "ALREADY_EXISTS"
    exit_code = 2


class WrongState(HorizonClientError, RuntimeError):
    """The resource is in a state that does not allow the call."""

    reason = "FAILED_PRECONDITION"
    exit_code = 2


class WouldNotFit(HorizonClientError, RuntimeError):
    """A limit of the node or a quota does not allow it."""

    reason = "RESOURCE_EXHAUSTED"
    exit_code = 2


class NotAvailable(HorizonClientError, NotImplementedError):
    """The server does not know or does not yet perform this call."""

    reason = "UNIMPLEMENTED"
    exit_code = 2


class NotAuthenticated(HorizonClientError, PermissionError):
    """No token, or one that is wrong, expired or revoked."""

    reason = "UNAUTHENTICATED"
    exit_code = 3


class NotAllowed(HorizonClientError, PermissionError):
    """The token is good, but its owner may not do this."""

    reason = "PERMISSION_DENIED"
    exit_code = 3


class NotFound(HorizonClientError, LookupError):
    """It does not exist, or is not the caller's."""

    reason = "NOT_FOUND"
    exit_code = 4


class Unavailable(HorizonClientError, ConnectionError):
    """The server cannot be reached, or cut the call; the same call may succeed later."""

    reason = "UNAVAILABLE"


class DeadlineExceeded(HorizonClientError, TimeoutError):
    """The server did not answer in time."""

    reason = "DEADLINE_EXCEEDED"


class ServerFailed(HorizonClientError, RuntimeError):
    """The server met an error of its own."""

    reason = "INTERNAL"


class CorruptDownload(ServerFailed):
    """What arrived is not what was listed."""

    reason = "CORRUPT_DOWNLOAD"

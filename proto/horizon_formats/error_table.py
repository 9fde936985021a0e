"""Every error that the server answers, a row for each: the one table of the server, for gRPC and for HTTP, and of the
client.

The server raises a class of that name (`horizon_server.errors`), the client raises its own of the same name
(`horizon_client.errors`). Exit codes of the `horizon` command:

    2  the request cannot be carried out as it is: malformed, name taken, wrong state, does not fit, not supported by
    this server 3  not authenticated or not allowed
    4  not found
    5  the server cannot be reached, did not answer in time, or failed
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ErrorStatus:
    """How an error is reported."""

    reason: str
    """Stable: scripts may match it."""
    grpc: str
    """Name of a gRPC status code."""
    http: int
    exit_code: int


ERRORS: Mapping[str, ErrorStatus] = {
    "InvalidSpec": ErrorStatus("INVALID_SPEC", "INVALID_ARGUMENT", 400, 2),
    "InvalidData": ErrorStatus("INVALID_DATA", "INVALID_ARGUMENT", 400, 2),
    "InvalidModel": ErrorStatus("INVALID_MODEL", "INVALID_ARGUMENT", 400, 2),
    "InvalidUpload": ErrorStatus("INVALID_UPLOAD", "INVALID_ARGUMENT", 400, 2),
    "UploadInProgress": ErrorStatus("UPLOAD_IN_PROGRESS", "ABORTED", 409, 5),
    "Stalled": ErrorStatus("STALLED", "DEADLINE_EXCEEDED", 408, 5),
    "RequestIdReused": ErrorStatus("REQUEST_ID_REUSED", "INVALID_ARGUMENT", 409, 2),
    "NotFound": ErrorStatus("NOT_FOUND", "NOT_FOUND", 404, 4),
    "AlreadyExists": ErrorStatus("ALREADY_EXISTS", "ALREADY_EXISTS", 409, 2),
    "Unauthenticated": ErrorStatus("UNAUTHENTICATED", "UNAUTHENTICATED", 401, 3),
    "NotAllowed": ErrorStatus("NOT_ALLOWED", "PERMISSION_DENIED", 403, 3),
    "WrongJobState": ErrorStatus("WRONG_JOB_STATE", "FAILED_PRECONDITION", 409, 2),
    "InUse": ErrorStatus("IN_USE", "FAILED_PRECONDITION", 409, 2),
    "DoesNotFit": ErrorStatus("DOES_NOT_FIT", "RESOURCE_EXHAUSTED", 422, 2),
    # Not 429, which clients repeat: only the user, or an admin, can make room.
    "QuotaExceeded": ErrorStatus("QUOTA_EXCEEDED", "RESOURCE_EXHAUSTED", 403, 2),
    "DiskFull": ErrorStatus("DISK_FULL", "RESOURCE_EXHAUSTED", 507, 2),
    "DatabaseUnavailable": ErrorStatus("DATABASE_UNAVAILABLE", "UNAVAILABLE", 503, 5),
    "TooManyCalls": ErrorStatus("TOO_MANY_CALLS", "RESOURCE_EXHAUSTED", 429, 5),
    "TooLarge": ErrorStatus("TOO_LARGE", "INVALID_ARGUMENT", 413, 2),
    "Draining": ErrorStatus("DRAINING", "UNAVAILABLE", 503, 5),
    "BoxLost": ErrorStatus("BOX_LOST", "UNAVAILABLE", 503, 5),
    "WorkerFailed": ErrorStatus("WORKER_FAILED", "INTERNAL", 500, 5),
    # A client repeats what is unavailable: a child that was killed may live the next time, one that crashed will not.
    "WorkerDied": ErrorStatus("WORKER_DIED", "UNAVAILABLE", 503, 5),
    "WorkerCrashed": ErrorStatus("WORKER_CRASHED", "INTERNAL", 500, 5),
    "TurnOverrun": ErrorStatus("TURN_OVERRUN", "INTERNAL", 500, 5),
    "WorkerSilent": ErrorStatus("WORKER_SILENT", "INTERNAL", 500, 5),
    "OutOfMemory": ErrorStatus("OUT_OF_MEMORY", "INTERNAL", 500, 5),
    "IoFailed": ErrorStatus("IO_ERROR", "INTERNAL", 500, 5),
    "DriveFailed": ErrorStatus("DRIVE_FAILED", "INTERNAL", 500, 5),
    "Diverged": ErrorStatus("DIVERGED", "ABORTED", 409, 5),
    "BadSetting": ErrorStatus("BAD_SETTING", "INTERNAL", 500, 5),
}
"""By the name of the class."""

UNEXPECTED = ErrorStatus("INTERNAL", "INTERNAL", 500, 5)
"""What has no row of its own: something went wrong inside the daemon."""

"""The one table from errors to wire status: gRPC name and HTTP code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from horizon_server import errors
from horizon_server.errors import HorizonError


@dataclass(frozen=True)
class WireStatus:
    """How an error is reported: the name of a gRPC status code, and an HTTP code."""

    grpc: str
    http: int


STATUS: Mapping[type[HorizonError], WireStatus] = {
    errors.InvalidSpec: WireStatus("INVALID_ARGUMENT", 400),
    errors.InvalidData: WireStatus("INVALID_ARGUMENT", 400),
    errors.InvalidModel: WireStatus("INVALID_ARGUMENT", 400),
    errors.InvalidUpload: WireStatus("INVALID_ARGUMENT", 400),
    errors.UploadInProgress: WireStatus("ABORTED", 409),
    errors.Stalled: WireStatus("DEADLINE_EXCEEDED", 408),
    errors.RequestIdReused: WireStatus("INVALID_ARGUMENT", 409),
    errors.NotFound: WireStatus("NOT_FOUND", 404),
    errors.AlreadyExists: WireStatus("ALREADY_EXISTS", 409),
    errors.Unauthenticated: WireStatus("UNAUTHENTICATED", 401),
    errors.NotAllowed: WireStatus("PERMISSION_DENIED", 403),
    errors.WrongJobState: WireStatus("FAILED_PRECONDITION", 409),
    errors.InUse: WireStatus("FAILED_PRECONDITION", 409),
    errors.DoesNotFit: WireStatus("RESOURCE_EXHAUSTED", 422),
    # Not 429, which clients repeat: only the user, or an admin, can make room.
    errors.QuotaExceeded: WireStatus("RESOURCE_EXHAUSTED", 403),
    errors.DiskFull: WireStatus("RESOURCE_EXHAUSTED", 507),
    errors.DatabaseUnavailable: WireStatus("UNAVAILABLE", 503),
    errors.TooManyCalls: WireStatus("RESOURCE_EXHAUSTED", 429),
    errors.TooLarge: WireStatus("INVALID_ARGUMENT", 413),
    errors.Draining: WireStatus("UNAVAILABLE", 503),
    errors.WorkerFailed: WireStatus("INTERNAL", 500),
    # A client repeats what is unavailable: a child that was killed may live the next time, one that crashed will not.
    errors.WorkerDied: WireStatus("UNAVAILABLE", 503),
    errors.WorkerCrashed: WireStatus("INTERNAL", 500),
    errors.TurnOverrun: WireStatus("INTERNAL", 500),
    errors.WorkerSilent: WireStatus("INTERNAL", 500),
    errors.OutOfMemory: WireStatus("INTERNAL", 500),
    errors.IoFailed: WireStatus("INTERNAL", 500),
    errors.Diverged: WireStatus("ABORTED", 409),
    errors.BadSetting: WireStatus("INTERNAL", 500),
}
_UNKNOWN = WireStatus("INTERNAL", 500)


def status_of(error: HorizonError) -> WireStatus:
    """Return how `error`, or the nearest class above it, is reported."""
    return next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), _UNKNOWN)

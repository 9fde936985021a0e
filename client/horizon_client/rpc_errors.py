"""gRPC status -> `HorizonClientError`: the one place that reads google.rpc details (ErrorInfo, BadRequest, RetryInfo)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode
from grpc.aio import AioRpcError

from horizon_client.errors import (
    AlreadyExists,
    DeadlineExceeded,
    HorizonClientError,
    InvalidRequest,
    NotAllowed,
    NotAuthenticated,
    NotAvailable,
    NotFound,
    ServerFailed,
    Unavailable,
    Violation,
    WouldNotFit,
    WrongState,
)

DetailT = TypeVar("DetailT", bound=Message)

_KINDS: dict[StatusCode, type[HorizonClientError]] = {
    StatusCode.INVALID_ARGUMENT: InvalidRequest,
    StatusCode.OUT_OF_RANGE: InvalidRequest,
    StatusCode.ALREADY_EXISTS: AlreadyExists,
    StatusCode.FAILED_PRECONDITION: WrongState,
    StatusCode.RESOURCE_EXHAUSTED: WouldNotFit,
    StatusCode.UNIMPLEMENTED: NotAvailable,
    StatusCode.UNAUTHENTICATED: NotAuthenticated,
    StatusCode.PERMISSION_DENIED: NotAllowed,
    StatusCode.NOT_FOUND: NotFound,
    StatusCode.UNAVAILABLE: Unavailable,
    StatusCode.ABORTED: Unavailable,
    StatusCode.CANCELLED: Unavailable,
    StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    StatusCode.INTERNAL: ServerFailed,
    StatusCode.UNKNOWN: ServerFailed,
    StatusCode.DATA_LOSS: ServerFailed,
}
_DETAILS_KEY = "grpc-status-details-bin"
_LOST_STATUS = "Internal error from Core"
"""What grpc.aio says when a write fails because the server has ended the call; the server's own status is lost then."""
_CUT_MARKS = ("RST_STREAM", "Stream removed", "Socket closed", _LOST_STATUS)


def from_rpc(error: AioRpcError, server: str) -> HorizonClientError:
    """Return the leaf for a failed call to `server`."""
    code = error.code()
    details = str(error.details() or "")
    status = _status_details(error)
    info = _first(status, error_details_pb2.ErrorInfo())
    if info is None and code in (StatusCode.INTERNAL, StatusCode.UNKNOWN) and any(m in details for m in _CUT_MARKS):
        code = StatusCode.UNAVAILABLE
    kind = _KINDS.get(code, ServerFailed)
    retry = _first(status, error_details_pb2.RetryInfo())
    bad_request = _first(status, error_details_pb2.BadRequest())
    violations = () if bad_request is None else bad_request.field_violations
    sentence = details if info is not None else _transport_sentence(code, details, server)
    return kind(
        sentence or f"{server} answered {code.name} without a word",
        reason=info.reason if info is not None else None,
        violations=[Violation(field=v.field, description=v.description) for v in violations],
        retry_after_s=None if retry is None else retry.retry_delay.ToNanoseconds() / 1e9,
    )


def lost_status(error: AioRpcError) -> bool:
    """Whether the server has ended the call with a status that grpc did not keep."""
    return error.code() == StatusCode.INTERNAL and _LOST_STATUS in str(error.details())


def _status_details(error: AioRpcError) -> status_pb2.Status:
    trailing: Iterable[tuple[str, str | bytes]] = error.trailing_metadata() or ()  # type: ignore[assignment]
    for key, value in trailing:
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                break
    return status_pb2.Status()


def _first(status: status_pb2.Status, into: DetailT) -> DetailT | None:
    return next((into for detail in status.details if detail.Unpack(into)), None)


def _transport_sentence(code: StatusCode, details: str, server: str) -> str:
    """Return a sentence for people where gRPC itself, not horizon, ended the call."""
    if code == StatusCode.UNAVAILABLE:
        return f"cannot reach horizond at {server}: {_hint(details)}"
    if code == StatusCode.DEADLINE_EXCEEDED:
        return f"horizond at {server} did not answer in time"
    if code == StatusCode.UNIMPLEMENTED:
        return f"horizond at {server} does not know this call; it is older than this client: upgrade it ({details})"
    return details


def _hint(details: str) -> str:
    if "CERTIFICATE_VERIFY_FAILED" in details or "certificate verify failed" in details:
        return "its certificate is not signed by the CA file in use; pass the daemon's own with --ca"
    if "andshake" in details or "WRONG_VERSION" in details:
        return "the TLS handshake failed; is the port right, and does the daemon use TLS there?"
    if "Connection refused" in details:
        return "nothing listens there; is the daemon running, and the port right?"
    if "resolution failed" in details or "Domain name not found" in details:
        return "the host name is not known"
    if "Connection reset" in details or "Socket closed" in details or "GOAWAY" in details:
        return "the connection was cut; if the daemon uses TLS, pass its CA file with --ca"
    if _LOST_STATUS in details:
        return "it ended the call while data was being sent"
    return details[:300] or "no connection"

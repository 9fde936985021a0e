"""gRPC status -> `HorizonClientError`: by the reason that the server gave, else by the status code."""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode
from grpc.aio import AioRpcError
from grpc_status import rpc_status

from horizon_client import errors
from horizon_client.errors import BadEndpoint, FieldViolation, HorizonClientError
from horizon_client.profiles import Endpoint

DetailT = TypeVar("DetailT", bound=Message)

_BY_CODE: dict[StatusCode, type[HorizonClientError]] = {
    StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    StatusCode.OUT_OF_RANGE: errors.InvalidRequest,
    StatusCode.ALREADY_EXISTS: errors.AlreadyExists,
    StatusCode.FAILED_PRECONDITION: errors.WrongJobState,
    StatusCode.RESOURCE_EXHAUSTED: errors.DoesNotFit,
    StatusCode.UNIMPLEMENTED: errors.NotAvailableYet,
    StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    StatusCode.PERMISSION_DENIED: errors.NotAllowed,
    StatusCode.NOT_FOUND: errors.NotFound,
    StatusCode.UNAVAILABLE: errors.Unavailable,
    StatusCode.ABORTED: errors.Unavailable,
    StatusCode.CANCELLED: errors.Unavailable,
    StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
}
BY_REASON = {
    kind.reason: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, HorizonClientError)
}
_LOST_STATUS = "Internal error from Core"
"""What grpc.aio reports when a write fails because the server has ended the call; the server's own status is lost
then."""
_OTHER_HOST = "OTHER_HOST"
"""Reason of the error that the certificate was signed by the right CA, but for other host names."""
_NO_CONNECTION = ("failed to connect to all addresses", "errors resolving", "DNS resolution failed")
"""How grpc begins the details where it could not connect: to no address of the host, or as the host has none."""
_OTHER_SECURITY = ("andshake", "WRONG_VERSION", "Connection reset", "Socket closed", "GOAWAY")
_PROBE_S = 5.0
_CUT_MARKS = ("RST_STREAM", "Stream removed", "Socket closed", _LOST_STATUS)


async def explained(error: AioRpcError, endpoint: Endpoint) -> HorizonClientError:
    """Return the error for a failed call, as `from_rpc`; what only the daemon's end of the connection can tell is asked
    there.

    Where the certificate is valid for other host names, those names; without TLS, whether the daemon uses it.
    """
    problem = from_rpc(error, endpoint.server)
    if endpoint.ca_file is None and _was_cut(error) and await asyncio.to_thread(_speaks_tls, endpoint):
        return BadEndpoint(
            f"horizond at {endpoint.server} uses TLS, and no CA file is known for it; pass it with --ca, or save it "
            f"once with: horizon login {endpoint.server} --token-file FILE --ca FILE"
        )
    if problem.reason != _OTHER_HOST:
        return problem
    names = await asyncio.to_thread(_certificate_names, endpoint)
    held = f"; it is valid for {', '.join(names)}: connect to one of these" if names else ""
    add = f"add {endpoint.host!r} to tls_names in the settings of horizond and restart it"
    return BadEndpoint(f"{problem.message}{held}, or {add}" if held else f"{problem.message}; {add}")


def from_rpc(error: AioRpcError, server: str) -> HorizonClientError:
    """Return the error for a failed call to `server` (HOST:PORT)."""
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]  # it has what is read of a Call
    except (ValueError, DecodeError):  # the details are damaged or belong to another status
        status = None
    info = _detail(status, error_details_pb2.ErrorInfo())
    if status is None or info is None:
        return _from_transport(error.code(), str(error.details() or ""), server)
    retry = _detail(status, error_details_pb2.RetryInfo())
    bad_request = _detail(status, error_details_pb2.BadRequest())
    kind = BY_REASON.get(info.reason) or _BY_CODE.get(error.code(), errors.ServerFailed)
    problem = kind(
        status.message or f"horizond at {server} answered {error.code().name} without a message",
        reason=info.reason,
        violations=[
            FieldViolation(field=v.field, description=v.description)
            for v in (bad_request.field_violations if bad_request is not None else ())
        ],
        retry_after_s=None if retry is None else retry.retry_delay.ToNanoseconds() / 1e9,
    )
    named = _detail(status, error_details_pb2.ResourceInfo())
    if named is not None and isinstance(problem, errors.NotFound):
        problem.kind, problem.name = named.resource_type, named.resource_name
    return problem


def is_lost_status(error: AioRpcError) -> bool:
    """Whether the server has ended the call with a status that grpc did not keep."""
    return error.code() == StatusCode.INTERNAL and _LOST_STATUS in str(error.details())


def never_sent(error: AioRpcError) -> bool:
    """Whether no connection could be made, so that the call has certainly not left this machine."""
    return error.code() == StatusCode.UNAVAILABLE and str(error.details()).startswith(_NO_CONNECTION)


def nothing_answers(error: AioRpcError) -> bool:
    """Whether nothing listens at the address, or nothing comes from there: as while the daemon restarts.

    Not where something cuts the connection or refuses the handshake: most likely the client uses another security than
    the daemon.
    """
    text = str(error.details())
    return (
        never_sent(error) and text.startswith(_NO_CONNECTION[0]) and not any(mark in text for mark in _OTHER_SECURITY)
    )


def _was_cut(error: AioRpcError) -> bool:
    """Whether something took the connection and cut it, before any call: such as a daemon that uses TLS, without
    TLS."""
    return never_sent(error) and not nothing_answers(error)


def _detail(status: status_pb2.Status | None, into: DetailT) -> DetailT | None:
    return next((into for detail in (status.details if status else ()) if detail.Unpack(into)), None)


def _from_transport(code: StatusCode, details: str, server: str) -> HorizonClientError:
    """Return the error where gRPC itself, or something that is not horizond, ended the call."""
    if (bad := _bad_endpoint(details, server)) is not None:
        return bad
    if code in (StatusCode.INTERNAL, StatusCode.UNKNOWN) and any(mark in details for mark in _CUT_MARKS):
        code = StatusCode.UNAVAILABLE
    if code == StatusCode.UNAVAILABLE:
        message = f"cannot reach horizond at {server}: {_hint(details)}"
    elif code == StatusCode.DEADLINE_EXCEEDED:
        message = f"horizond at {server} did not answer in time"
    elif code == StatusCode.UNIMPLEMENTED:
        message = f"horizond at {server} does not have this call ({details}); it is older than this client: upgrade it"
    elif code in (StatusCode.UNKNOWN, StatusCode.INTERNAL, StatusCode.DATA_LOSS) or not details:
        message = f"horizond at {server} failed unexpectedly ({code.name}); its log says why"
    else:
        message = details
    problem = _BY_CODE.get(code, errors.ServerFailed)(message, reason=None)
    if sys.version_info >= (3, 11) and details and details not in message:
        problem.add_note(f"gRPC {code.name}: {details}")  # for a traceback; too raw for a message
    return problem


def _bad_endpoint(details: str, server: str) -> errors.BadEndpoint | None:
    """Return the error for an endpoint that stays wrong however often it is asked."""
    host, _, port = server.rpartition(":")
    lower = details.lower()
    if "hostname verification" in lower:
        return errors.BadEndpoint(
            f"the certificate of horizond at {server} is not valid for {host}", reason=_OTHER_HOST
        )
    if "certificate_verify_failed" in lower or "certificate verify failed" in lower:
        text = "its certificate is not signed by the CA file in use; pass the daemon's own with --ca"
        return errors.BadEndpoint(f"cannot trust horizond at {server}: {text}")
    if any(mark in lower for mark in ("http1.x server", "expected settings frame", "missing selected alpn")):
        text = f"{port} is the web port, gRPC is 7171" if port == "7172" else f"{port} is a web (HTTP) port"
        return errors.BadEndpoint(
            f"{server} does not speak gRPC: {text}; horizond prints both addresses when it starts"
        )
    return None


def _hint(details: str) -> str:
    if "andshake" in details or "WRONG_VERSION" in details:
        return "the TLS handshake failed; is the port right, and does the daemon use TLS there?"
    if "Connection refused" in details:
        return "nothing listens there; is the daemon running, and the port right?"
    if "resolution failed" in details or "errors resolving" in details or "Domain name not found" in details:
        return "the host name is not known"
    if "Connection reset" in details or "Socket closed" in details or "GOAWAY" in details:
        return (
            "the connection was cut; if the daemon uses TLS, pass its CA file with --ca, and where it asks clients for "
            "a certificate, yours with: horizon login --client-cert FILE --client-key FILE"
        )
    if _LOST_STATUS in details:
        return "it ended the call while data was being sent"
    return details[:300] or "no connection"


def _speaks_tls(endpoint: Endpoint) -> bool:
    """Return whether the daemon answers a TLS handshake. Nothing is sent, so its certificate needs no check. Blocks for
    at most 5 s."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, _, port = endpoint.server.rpartition(":")
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S) as plain,
            context.wrap_socket(plain, server_hostname=endpoint.host),
        ):
            return True
    except (OSError, ValueError):
        return False


def _certificate_names(endpoint: Endpoint) -> list[str]:
    """Return the host names and addresses in the daemon's certificate; empty when they cannot be read. Blocks for at
    most 5 s."""
    context = ssl.create_default_context()
    context.check_hostname = False  # the name is known to be wrong; the CA is still checked
    context.set_alpn_protocols(["h2"])
    host, _, port = endpoint.server.rpartition(":")
    try:
        if (pem := endpoint.root_certificates()) is not None:
            context.load_verify_locations(cadata=pem.decode("ascii"))
        with (
            socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S) as plain,
            context.wrap_socket(plain, server_hostname=endpoint.host) as secure,
        ):
            held: Any = (secure.getpeercert() or {}).get("subjectAltName", ())
    except (OSError, ValueError):
        return []
    return [str(name) for _, name in held]

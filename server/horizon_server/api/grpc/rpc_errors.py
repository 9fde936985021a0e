"""Errors as gRPC statuses: a code from the one table, a message, and google.rpc details.

Trailing metadata is bounded by the receiver: gRPC clients refuse more than 8 KiB by default, and then the user would see neither code
nor message. So the details are cut to what fits; a client that takes more sends its limit in `horizon-max-metadata-bytes`.
"""

from __future__ import annotations

from collections.abc import Mapping

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from horizon_server.api.status import status_of
from horizon_server.errors import HorizonError

DOMAIN = "horizon"
MAX_VIOLATIONS = 100
METADATA_BYTES_KEY = "horizon-max-metadata-bytes"

_DEFAULT_METADATA_BYTES = 8192
_MOST_METADATA_BYTES = 128 * 1024
_OVERHEAD_BYTES = 1024
"""Other trailers, and the 32 bytes that HTTP/2 counts for each."""
_MAX_MESSAGE_BYTES = 1200

Metadata = tuple[tuple[str, str | bytes], ...]


def metadata_bytes(metadata: Mapping[str, str | bytes]) -> int:
    """Return how much trailing metadata the caller takes."""
    given = metadata.get(METADATA_BYTES_KEY, "")
    if isinstance(given, str) and given.isascii() and given.isdigit() and len(given) < 10:
        return min(max(int(given), _DEFAULT_METADATA_BYTES), _MOST_METADATA_BYTES)
    return _DEFAULT_METADATA_BYTES


def to_grpc_status(
    error: HorizonError, max_bytes: int = _DEFAULT_METADATA_BYTES
) -> tuple[grpc.StatusCode, str, Metadata]:
    """Return code, message and trailing metadata of an error, as `context.abort` takes them."""
    message = clip(error.message)
    status = status_pb2.Status(code=code_pb2.Code.Value(status_of(error).grpc), message=message)
    status.details.append(_packed(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)))
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        status.details.append(_packed(retry))
    room = max_bytes - _OVERHEAD_BYTES - _encoded_bytes(message) - status.ByteSize()
    # The first violations that together fit: a client shows those it gets, and refuses trailers that are too long.
    fitting = error_details_pb2.BadRequest()
    for violation in error.violations[:MAX_VIOLATIONS]:
        one = error_details_pb2.BadRequest.FieldViolation(
            field=clip(violation.field), description=clip(violation.description)
        )
        room -= one.ByteSize() + 8
        if room < 0:
            break
        fitting.field_violations.append(one)
    if fitting.field_violations:
        status.details.append(_packed(fitting))
    rendered = rpc_status.to_status(status)
    return rendered.code, rendered.details, rendered.trailing_metadata


def clip(message: str) -> str:
    """Return the message, cut where it would not fit into a header."""
    if _encoded_bytes(message) <= _MAX_MESSAGE_BYTES:
        return message
    kept = message[:_MAX_MESSAGE_BYTES]
    while _encoded_bytes(kept) > _MAX_MESSAGE_BYTES:
        kept = kept[: len(kept) * 9 // 10]
    return kept + " ..."


def _packed(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def _encoded_bytes(message: str) -> int:
    """Return the size after percent-encoding, which is how gRPC sends a status message."""
    return sum(1 if 0x20 <= byte <= 0x7E and byte != 0x25 else 3 for byte in message.encode("utf-8", "replace"))

"""Errors as gRPC tells them: a status code from the one table, one sentence, and google.rpc details.

Trailing metadata is bounded by the receiver: gRPC clients refuse more than 8 KiB unless told otherwise, and then the user would see
neither code nor sentence. So the details are cut to what fits; a client that takes more says so in `horizon-max-metadata-bytes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from horizon_server.api.status import grpc_status
from horizon_server.errors import FieldViolation, HorizonError

DOMAIN = "horizon"
MAX_VIOLATIONS = 100
METADATA_BYTES_KEY = "horizon-max-metadata-bytes"

_DETAILS_KEY = "grpc-status-details-bin"
_DEFAULT_METADATA_BYTES = 8192
_MOST_METADATA_BYTES = 128 * 1024
_OVERHEAD_BYTES = 1024
"""Other trailers, and the 32 bytes that HTTP/2 counts for each."""
_MAX_SENTENCE_BYTES = 1200

Metadata = tuple[tuple[str, bytes], ...]


def metadata_bytes(metadata: Mapping[str, str | bytes]) -> int:
    """Return how much trailing metadata the caller takes."""
    said = metadata.get(METADATA_BYTES_KEY, "")
    if isinstance(said, str) and said.isascii() and said.isdigit() and len(said) < 10:
        return min(max(int(said), _DEFAULT_METADATA_BYTES), _MOST_METADATA_BYTES)
    return _DEFAULT_METADATA_BYTES


def told(error: HorizonError, max_bytes: int = _DEFAULT_METADATA_BYTES) -> tuple[grpc.StatusCode, str, Metadata]:
    """Return code, sentence and trailing metadata of an error."""
    name, sentence = grpc_status(error), clip(error.message)
    status = status_pb2.Status(code=code_pb2.Code.Value(name), message=sentence)
    status.details.append(_packed(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)))
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        status.details.append(_packed(retry))
    room = max_bytes - _OVERHEAD_BYTES - _encoded_bytes(sentence) - status.ByteSize()
    fitting = _fitting(error.violations[:MAX_VIOLATIONS], room)
    if fitting.field_violations:
        status.details.append(_packed(fitting))
    return grpc.StatusCode[name], sentence, ((_DETAILS_KEY, status.SerializeToString()),)


def clip(sentence: str) -> str:
    """Return the sentence, cut where it would not fit into a header."""
    if _encoded_bytes(sentence) <= _MAX_SENTENCE_BYTES:
        return sentence
    kept = sentence[:_MAX_SENTENCE_BYTES]
    while _encoded_bytes(kept) > _MAX_SENTENCE_BYTES:
        kept = kept[: len(kept) * 9 // 10]
    return kept + " ..."


def _fitting(violations: Sequence[FieldViolation], room: int) -> error_details_pb2.BadRequest:
    """Return the first violations that together take at most `room` bytes."""
    chosen = error_details_pb2.BadRequest()
    used = 0
    for violation in violations:
        one = error_details_pb2.BadRequest.FieldViolation(
            field=clip(violation.field), description=clip(violation.description)
        )
        used += one.ByteSize() + 8
        if used > room:
            break
        chosen.field_violations.append(one)
    return chosen


def _packed(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def _encoded_bytes(sentence: str) -> int:
    """Return the size after percent-encoding, which is how gRPC sends a status message."""
    return sum(1 if 0x20 <= byte <= 0x7E and byte != 0x25 else 3 for byte in sentence.encode("utf-8", "replace"))

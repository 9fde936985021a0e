"""Contents of the small daemon, and how it refuses."""

from __future__ import annotations

import hashlib
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from horizon_proto.v1 import blob_pb2


class Refusal(Exception):
    """An error the fake daemon answers, with details as the real one sends them."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str = "",
        violations: tuple[tuple[str, str], ...] = (),
        retry_after_s: int = 0,
    ) -> None:
        super().__init__(message)
        self.code, self.message = code, message
        status = status_pb2.Status(code=code.value[0], message=message)
        if reason:
            status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain="horizon"))
        if violations:
            bad_request = error_details_pb2.BadRequest()
            for field, description in violations:
                bad_request.field_violations.add(field=field, description=description)
            status.details.add().Pack(bad_request)
        if retry_after_s:
            retry = error_details_pb2.RetryInfo()
            retry.retry_delay.FromSeconds(retry_after_s)
            status.details.add().Pack(retry)
        self.trailing = (("grpc-status-details-bin", status.SerializeToString()),)


class Blobs:
    """Contents, complete and half. `cuts` are byte counts of single streams after which the stream is cut."""

    def __init__(self) -> None:
        self.contents: dict[str, bytearray] = {}
        self.received_bytes = 0
        self.chunk_sizes: list[int] = []
        self.cuts: list[int] = []

    def status(self, ref: blob_pb2.BlobRef) -> blob_pb2.BlobStatus:
        arrived = self.contents.get(ref.sha256)
        committed = len(arrived) if arrived is not None else -1
        return blob_pb2.BlobStatus(blob=ref, committed_bytes=max(committed, 0), complete=committed == ref.size_bytes)

    def missing(self, refs: Any) -> list[blob_pb2.BlobStatus]:
        return [status for status in map(self.status, refs) if not status.complete]

    async def write(self, requests: Any) -> blob_pb2.BlobStatus:
        ref, arrived, in_stream = None, bytearray(), 0
        cut_at = self.cuts.pop(0) if self.cuts else None
        async for request in requests:
            if ref is None:
                ref = request.chunk.blob
                arrived = self.contents.setdefault(ref.sha256, bytearray())
                if request.chunk.offset != len(arrived):
                    raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "wrong offset", reason="INVALID_UPLOAD")
            data = request.chunk.data
            self.chunk_sizes.append(len(data))
            if cut_at is not None and in_stream + len(data) >= cut_at:
                kept = data[: cut_at - in_stream]
                arrived += kept
                self.received_bytes += len(kept)
                raise Refusal(grpc.StatusCode.UNAVAILABLE, "the line went dead")
            arrived += data
            in_stream += len(data)
            self.received_bytes += len(data)
        assert ref is not None
        if len(arrived) == ref.size_bytes and hashlib.sha256(arrived).hexdigest() != ref.sha256:
            del self.contents[ref.sha256]
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "other bytes arrived", reason="INVALID_UPLOAD")
        return self.status(ref)

"""BlobService on the wire: the contents of datasets and models, a thin layer over `services.uploads`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from horizon_proto.v1 import blob_pb2, blob_pb2_grpc
from horizon_server.api.grpc.convert import from_message, to_message
from horizon_server.api.grpc.interceptor import caller
from horizon_server.errors import InvalidUpload
from horizon_server.records.blob import BlobRef, BlobStatus
from horizon_server.services.access import require_create
from horizon_server.services.uploads import Uploads


class BlobServicer(blob_pb2_grpc.BlobServiceServicer):
    """Takes contents."""

    def __init__(self, uploads: Uploads) -> None:
        self._uploads = uploads

    async def FindMissingBlobs(
        self, request: blob_pb2.FindMissingBlobsRequest, context: Any
    ) -> blob_pb2.FindMissingBlobsResponse:
        missing = await self._uploads.missing(_uploader(), [from_message(blob, BlobRef) for blob in request.blobs])
        return blob_pb2.FindMissingBlobsResponse(missing=map(_status, missing))

    async def WriteBlob(self, request_iterator: Any, context: Any) -> blob_pb2.WriteBlobResponse:
        owner = _uploader()
        chunks = (request.chunk async for request in request_iterator)
        first = await anext(chunks, None)
        if first is None or not first.HasField("blob"):
            raise InvalidUpload("the first message of an upload must name the blob: sha256 and size_bytes")
        ref = from_message(first.blob, BlobRef)
        status = await self._uploads.write(owner, ref, first.offset, _data(ref, first, chunks))
        return blob_pb2.WriteBlobResponse(status=_status(status))

    async def QueryBlobStatus(
        self, request: blob_pb2.QueryBlobStatusRequest, context: Any
    ) -> blob_pb2.QueryBlobStatusResponse:
        status = await self._uploads.status(_uploader(), from_message(request.blob, BlobRef))
        return blob_pb2.QueryBlobStatusResponse(status=_status(status))


def _uploader() -> str:
    principal = caller()
    require_create(principal)
    return principal.name


def _status(status: BlobStatus) -> blob_pb2.BlobStatus:
    return to_message(status, blob_pb2.BlobStatus)


async def _data(
    ref: BlobRef, first: blob_pb2.BlobChunk, chunks: AsyncIterator[blob_pb2.BlobChunk]
) -> AsyncIterator[bytes]:
    yield first.data
    async for chunk in chunks:
        if chunk.HasField("blob") and from_message(chunk.blob, BlobRef) != ref:
            raise InvalidUpload("an upload stream names one blob only; open another stream for the next")
        yield chunk.data

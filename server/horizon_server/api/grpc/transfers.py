"""The calls that carry contents to the daemon."""

from __future__ import annotations

from collections.abc import AsyncIterator

from horizon_proto.v1 import blob_pb2
from horizon_server.api.grpc.convert import from_message
from horizon_server.api.services import Services
from horizon_server.errors import InvalidUpload
from horizon_server.records.account import Principal
from horizon_server.records.blob import BlobRef, BlobStatus
from horizon_server.services.access import require_create


def uploader(caller: Principal) -> str:
    """Return the name of a caller who may upload. Raises NotAllowed."""
    require_create(caller)
    return caller.name


async def write_blob(
    services: Services, caller: Principal, requests: AsyncIterator[blob_pb2.WriteBlobRequest]
) -> BlobStatus:
    """Take the content that a stream of requests carries; the first one names it."""
    # Before the first message, so that nobody sends a content that will be refused.
    owner = uploader(caller)
    chunks = (request.chunk async for request in requests)
    first = await anext(chunks, None)
    if first is None or not first.HasField("blob"):
        raise InvalidUpload("the first message of an upload must name the blob: sha256 and size_bytes")
    ref = from_message(first.blob, BlobRef)

    async def data() -> AsyncIterator[bytes]:
        yield first.data
        async for chunk in chunks:
            if chunk.HasField("blob") and from_message(chunk.blob, BlobRef) != ref:
                raise InvalidUpload("an upload stream names one blob only; open another stream for the next")
            yield chunk.data

    return await services.blobs.write(owner, ref, first.offset, data())

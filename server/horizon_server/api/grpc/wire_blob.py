"""Contents and files on the wire, and the upload streams that datasets and models have in common."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence

from horizon_proto.v1 import blob_pb2
from horizon_server.api.grpc.interceptor import caller
from horizon_server.blobs.uploads import Uploads
from horizon_server.errors import InvalidUpload
from horizon_server.records.blob import BlobFile, BlobRef, BlobStatus
from horizon_server.services.access import require_create


def from_files(entries: Iterable[blob_pb2.FileEntry]) -> list[BlobFile]:
    """Return announced files."""
    return [BlobFile(path=entry.path, sha256=entry.sha256, size_bytes=entry.size_bytes) for entry in entries]


def to_files(files: Iterable[BlobFile]) -> list[blob_pb2.FileEntry]:
    """Return files for an answer."""
    return [blob_pb2.FileEntry(path=file.path, sha256=file.sha256, size_bytes=file.size_bytes) for file in files]


def to_status(status: BlobStatus) -> blob_pb2.BlobStatus:
    """Return a content's status for an answer."""
    blob = blob_pb2.BlobRef(sha256=status.ref.sha256, size_bytes=status.ref.size_bytes)
    return blob_pb2.BlobStatus(blob=blob, committed_bytes=status.committed_bytes, complete=status.complete)


async def find_missing(uploads: Uploads, blobs: Sequence[blob_pb2.BlobRef]) -> list[blob_pb2.BlobStatus]:
    """Answer FindMissingBlobs and its like."""
    principal = caller()
    require_create(principal)
    return [to_status(status) for status in await uploads.missing(principal.name, [_ref(blob) for blob in blobs])]


async def query_status(uploads: Uploads, blob: blob_pb2.BlobRef) -> blob_pb2.BlobStatus:
    """Answer QueryBlobStatus and its like."""
    principal = caller()
    require_create(principal)
    return to_status(await uploads.status(principal.name, _ref(blob)))


async def write_blob(uploads: Uploads, chunks: AsyncIterator[blob_pb2.BlobChunk]) -> blob_pb2.BlobStatus:
    """Answer WriteBlob and its like."""
    principal = caller()
    require_create(principal)
    first = await anext(chunks, None)
    if first is None or not first.HasField("blob"):
        raise InvalidUpload("the first message of an upload must name the blob: sha256 and size_bytes")
    ref = _ref(first.blob)
    return to_status(await uploads.write(principal.name, ref, first.offset, _data(ref, first, chunks)))


def _ref(blob: blob_pb2.BlobRef) -> BlobRef:
    return BlobRef(sha256=blob.sha256, size_bytes=blob.size_bytes)


async def _data(
    ref: BlobRef, first: blob_pb2.BlobChunk, chunks: AsyncIterator[blob_pb2.BlobChunk]
) -> AsyncIterator[bytes]:
    yield first.data
    async for chunk in chunks:
        if chunk.HasField("blob") and _ref(chunk.blob) != ref:
            raise InvalidUpload("an upload stream names one blob only; open another stream for the next")
        yield chunk.data

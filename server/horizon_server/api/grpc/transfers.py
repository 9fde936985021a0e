"""The calls that carry contents: uploads to the daemon, and files of checkpoints from it, in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path

from horizon_proto.v1 import blob_pb2, checkpoint_pb2
from horizon_server.api.grpc.convert import from_message
from horizon_server.api.services import Services
from horizon_server.errors import FieldViolation, InvalidSpec, InvalidUpload, NotFound
from horizon_server.records.account import Principal
from horizon_server.records.blob import BlobRef, BlobStatus
from horizon_server.services.access import require_create

# Of a checkpoint's file in one message: far below the limit of a message, and large enough to fill a network.
PIECE_BYTES = 2**20


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


async def read_checkpoint_file(
    services: Services, caller: Principal, request: checkpoint_pb2.ReadCheckpointFileRequest
) -> AsyncGenerator[tuple[int, bytes], None]:
    """Yield the pieces of a file, each with its offset."""
    reading = services.jobs.checkpoint_file(caller, request.job_id, request.step, request.path)
    async with reading as path, aclosing(_pieces(request, path)) as pieces:
        async for piece in pieces:
            yield piece


async def _pieces(
    request: checkpoint_pb2.ReadCheckpointFileRequest, path: Path
) -> AsyncGenerator[tuple[int, bytes], None]:
    # The size that the checkpoint lists: one whose files have other sizes is not found.
    size = (await asyncio.to_thread(path.stat)).st_size
    offset, problems = request.offset, []
    if not 0 <= offset <= size:
        problem = f"offset is {offset}; it must be from 0 to the file's size, {size}"
        problems.append(FieldViolation(field="offset", description=problem))
    if request.length < 0:
        problem = f"length is {request.length}; it must be 0 (all) or more"
        problems.append(FieldViolation(field="length", description=problem))
    if problems:
        raise InvalidSpec(problems[0].description, violations=problems)
    end = min(size, offset + request.length) if request.length else size
    # In threads: a disk that is busy with a checkpoint must not hold up the calls of others.
    with await asyncio.to_thread(path.open, "rb") as file:
        await asyncio.to_thread(file.seek, offset)
        while offset < end:
            data = await asyncio.to_thread(file.read, min(PIECE_BYTES, end - offset))
            if not data:
                raise NotFound(
                    f"{request.path} of step {request.step} is shorter than listed; the checkpoint is damaged"
                )
            yield offset, data
            offset += len(data)

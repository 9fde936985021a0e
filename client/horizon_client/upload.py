"""Uploads the contents of files: only what the server does not have, from the committed offset, and again after every
cut.

Several contents are sent at once, each on its own stream; small ones go many in a message.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, suppress
from typing import Any

import grpc.aio

from horizon_client.connection import FINALIZE_DEADLINE_S, Backoff, Connection, pause_after
from horizon_client.errors import (
    BadFile,
    DeadlineExceeded,
    HorizonClientError,
    InvalidUpload,
    ServerFailed,
    Unavailable,
)
from horizon_client.local_files import HashedFile, reading
from horizon_client.reporter import Progress, Reporter
from horizon_client.rpc_errors import from_rpc, is_lost_status
from horizon_client.waiting import timeout
from horizon_proto.v1 import blob_pb2

CHUNK_BYTES = 2**20  # the most that is sent twice after a cut
STREAMS_AT_ONCE = 4  # each moves about one piece per round trip (ADR 0007)
SMALL_BYTES = 16 * 1024  # a call and a stream for each would cost more than its bytes
_BLOBS_PER_QUERY = 500
_BLOBS_PER_BATCH = 1000
_BATCH_BYTES = 2**20
_LONGEST_LISTEN_S = 1.0


class _StatusLost(Unavailable):
    """The server ended the upload with a reason that did not arrive; the next attempt waits for it before it sends
    data."""


class BlobUpload:
    """One push: the contents of its files, each at most once."""

    def __init__(self, connection: Connection, reporter: Reporter) -> None:
        self._connection = connection
        self._stub = connection.calls.blobs
        self._reporter = reporter
        self._positions: dict[str, int] = {}
        self._total_bytes = self._done_bytes = self._sent_bytes = 0

    async def send_missing(self, files: Sequence[HashedFile]) -> int:
        """Send what the server does not have and return the number of bytes sent."""
        # Two files of one content are sent once
        by_sha = {file.sha256: file for file in files}
        refs = [blob_pb2.BlobRef(sha256=sha, size_bytes=file.size_bytes) for sha, file in by_sha.items()]
        missing: list[blob_pb2.BlobStatus] = []
        for start in range(0, len(refs), _BLOBS_PER_QUERY):
            request = blob_pb2.FindMissingBlobsRequest(blobs=refs[start : start + _BLOBS_PER_QUERY])
            missing += (await self._connection.unary(self._stub.FindMissingBlobs, request)).missing
        for status in missing:
            if status.blob.sha256 not in by_sha:
                raise ServerFailed(f"the server asks for content that was not offered: {status.blob.sha256[:64]}")
        self._positions = {status.blob.sha256: status.committed_bytes for status in missing}
        self._total_bytes = sum(ref.size_bytes for ref in refs)
        self._done_bytes = self._total_bytes - sum(s.blob.size_bytes - s.committed_bytes for s in missing)
        small = [by_sha[s.blob.sha256] for s in missing if s.blob.size_bytes <= SMALL_BYTES and not s.committed_bytes]
        in_batches = {file.sha256 for file in small}
        # The longest first, so that all streams end at about the same time
        waiting = deque(
            sorted(
                (status for status in missing if status.blob.sha256 not in in_batches),
                key=lambda status: status.committed_bytes - status.blob.size_bytes,
            )
        )

        async def one_after_another() -> None:
            while waiting:
                status = waiting.popleft()
                await self._send(by_sha[status.blob.sha256], status)

        streams = [one_after_another() for _ in range(min(STREAMS_AT_ONCE, len(waiting)))]
        tasks = [asyncio.ensure_future(work) for work in (self._send_small(small), *streams)]
        try:
            await asyncio.gather(*tasks)
        finally:  # after the first error the others end too
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return self._sent_bytes

    async def _send_small(self, files: Sequence[HashedFile]) -> None:
        """Send small contents whole, one batch after the other. A batch that is sent again after a cut is stored
        once."""
        for batch in _batches(files):
            request = await asyncio.to_thread(_whole, batch)
            retry = self._connection.stream_retry
            await self._connection.unary(self._stub.WriteBlobs, request, deadline_s=retry.stall_s, retry=retry)
            for file in batch:
                self._sent_bytes += file.size_bytes
                self._set_position(file, file.size_bytes)
            progress = Progress(
                phase="upload", name=batch[-1].path, done_bytes=self._done_bytes, total_bytes=self._total_bytes
            )
            self._reporter.progress(progress)

    async def _send(self, file: HashedFile, status: blob_pb2.BlobStatus) -> None:
        """Send one content until the server has all of it; after a failure ask for the offset to continue from."""
        backoff = Backoff(self._connection.stream_retry)
        listen_s = 0.0
        while not status.complete:
            start = status.committed_bytes
            problem: HorizonClientError = Unavailable(f"the server has only part of {file.path}")
            try:
                status = await self._write(file, status, listen_s)
            except HorizonClientError as error:
                # InvalidUpload also means that an older stream of this upload was still writing, so ask for the offset
                # once more
                if not isinstance(error, Unavailable | DeadlineExceeded | InvalidUpload):
                    raise
                problem = error
                asked_at = time.monotonic()
                query = blob_pb2.QueryBlobStatusRequest(blob=status.blob)
                retry = self._connection.stream_retry
                status = (await self._connection.unary(self._stub.QueryBlobStatus, query, retry=retry)).status
                round_trip_s = time.monotonic() - asked_at
                if status.committed_bytes > start:
                    listen_s = 0.0  # data was accepted, so nothing was refused
                # Long enough for the refusal to arrive, measured by the round trip
                if listen_s or isinstance(error, _StatusLost):
                    listen_s = min(max(2 * listen_s, 4 * round_trip_s, 0.05), _LONGEST_LISTEN_S)
            self._set_position(file, status.committed_bytes)
            if status.committed_bytes > start:
                backoff.succeeded()
            elif status.committed_bytes == start and isinstance(problem, InvalidUpload):
                raise problem  # a retry would send the same bytes from the same offset
            if not status.complete:
                await pause_after(problem, backoff, self._reporter, f"the upload of {file.path}")

    async def _write(self, file: HashedFile, status: blob_pb2.BlobStatus, listen_s: float) -> blob_pb2.BlobStatus:
        """Send from the committed offset; wait `listen_s` for a refusal before the first data."""
        file.require_unchanged()
        writer: Any = self._stub.WriteBlob  # the stubs do not know that the requests may be written one by one
        call = writer(metadata=self._connection.metadata)
        try:
            await self._feed(call, file, status, listen_s)
            async with timeout(FINALIZE_DEADLINE_S):
                answer: blob_pb2.BlobStatus = (await call).status
        except grpc.aio.AioRpcError as error:
            problem = from_rpc(error, self._connection.endpoint.server)
            raise (_StatusLost(problem.message) if is_lost_status(error) else problem) from None
        except asyncio.TimeoutError:
            stall_s = self._connection.stream_retry.stall_s
            raise Unavailable(f"the upload of {file.path} made no progress for {stall_s:g} s") from None
        finally:
            call.cancel()
        return answer

    async def _feed(self, call: Any, file: HashedFile, status: blob_pb2.BlobStatus, listen_s: float) -> None:
        """Write all chunks, or stop early when the server has ended the call."""
        offset = status.committed_bytes
        request = blob_pb2.WriteBlobRequest()
        request.chunk.blob.CopyFrom(status.blob)
        request.chunk.offset = offset
        if listen_s:
            # Names the content without data, which flow control cannot delay
            with suppress(asyncio.TimeoutError, asyncio.InvalidStateError):
                async with timeout(listen_s):
                    await call.write(request)
                    await call.code()
            request = blob_pb2.WriteBlobRequest()
        sent_to = offset
        async with aclosing(_pieces(file, offset)) as pieces:
            async for data in pieces:
                request.chunk.data = data  # in place, because assigning a message copies it
                try:
                    async with timeout(self._connection.stream_retry.stall_s):
                        await call.write(request)
                except asyncio.InvalidStateError:  # the server has ended the call, and the answer says why
                    return
                request = blob_pb2.WriteBlobRequest()
                sent_to += len(data)
                self._sent_bytes += len(data)
                self._set_position(file, sent_to)
                progress = Progress(
                    phase="upload", name=file.path, done_bytes=self._done_bytes, total_bytes=self._total_bytes
                )
                self._reporter.progress(progress)
        file.require_unchanged()
        await call.done_writing()

    def _set_position(self, file: HashedFile, position: int) -> None:
        """Set how much of one content is done: what was sent, or after a cut what the server has."""
        self._done_bytes += position - self._positions[file.sha256]
        self._positions[file.sha256] = position


def _batches(files: Sequence[HashedFile]) -> Iterator[list[HashedFile]]:
    """Divide small files into what one message may hold."""
    batch: list[HashedFile] = []
    num_bytes = 0
    for file in files:
        if batch and (len(batch) == _BLOBS_PER_BATCH or num_bytes + file.size_bytes > _BATCH_BYTES):
            yield batch
            batch, num_bytes = [], 0
        batch.append(file)
        num_bytes += file.size_bytes
    if batch:
        yield batch


def _whole(batch: Sequence[HashedFile]) -> blob_pb2.WriteBlobsRequest:
    """Read small files into one message."""
    request = blob_pb2.WriteBlobsRequest()
    for file in batch:
        file.require_unchanged()
        with reading(file.source), file.source.open("rb") as source:
            data = source.read(SMALL_BYTES + 1)
        if hashlib.sha256(data).hexdigest() != file.sha256:
            raise BadFile(f"{file.source} was changed while it was being pushed; run the same command again")
        request.blobs.add(blob=blob_pb2.BlobRef(sha256=file.sha256, size_bytes=file.size_bytes), data=data)
    return request


async def _pieces(file: HashedFile, offset: int) -> AsyncGenerator[bytes, None]:
    """Yield the file from `offset`, read one piece ahead; an empty remainder gives one empty piece, so that the server
    completes it."""
    loop = asyncio.get_running_loop()
    with reading(file.source), file.source.open("rb", buffering=0) as source:
        source.seek(offset)
        is_first = True
        ahead = loop.run_in_executor(None, source.read, CHUNK_BYTES)
        try:
            while True:
                await asyncio.wait([ahead])  # unlike `await ahead`, does not cancel the read when it is cancelled
                data = ahead.result()
                if not data and not is_first:
                    return
                is_first = False
                ahead = loop.run_in_executor(None, source.read, CHUNK_BYTES)
                yield data
        finally:
            await asyncio.wait([ahead])  # the file must not be closed under its reader
            if not ahead.cancelled():
                ahead.exception()  # retrieved, or asyncio would log it as lost

"""Sends contents to the blob calls of a service: only what is missing, from the committed offset on, again after every cut.

Several contents travel at once, each on a stream of its own. Knows files and offsets, not what they mean; `datasets` and `models` lend it
their four calls.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import Any, Protocol

import grpc.aio

from horizon_client.connection import FINALIZE_DEADLINE_S, Backoff, Connection
from horizon_client.errors import BadFile, DeadlineExceeded, HorizonClientError, ServerFailed, Unavailable
from horizon_client.local_files import HashedFile
from horizon_client.progress import OnNotice, OnProgress, Progress
from horizon_client.rpc_errors import from_rpc, lost_status
from horizon_proto.v1 import blob_pb2

CHUNK_BYTES = 2**20
"""At most so much travels twice after a cut."""
STREAMS_AT_ONCE = 4
_BLOBS_PER_QUESTION = 500
_LONGEST_LISTEN_S = 1.0
_UPLOAD_REFUSED = "INVALID_UPLOAD"
"""Also said when an older stream of the same upload was still writing, so the offset is asked for again before giving up."""


class _StatusLost(Unavailable):
    """The server ended the upload and gave a reason that did not get through; the next try listens for it."""


class BlobCalls(Protocol):
    """The blob calls of one service."""

    async def find_missing(self, blobs: Sequence[blob_pb2.BlobRef]) -> list[blob_pb2.BlobStatus]:
        """Return the contents to send, with what has arrived of each."""

    async def query(self, blob: blob_pb2.BlobRef) -> blob_pb2.BlobStatus:
        """Return how far one content is."""

    def open_write(self) -> Any:
        """Open the upload stream: an aio stream-unary call."""

    def write_request(self) -> Any:
        """Return an empty request of that stream; its `chunk` is filled in place, since a message that is passed on is copied."""


class _Tally:
    """Bytes over all contents of one push: `done_bytes` are there or on their way, `sent_bytes` were sent by us."""

    def __init__(self, total_bytes: int, missing: Sequence[blob_pb2.BlobStatus]) -> None:
        self.total_bytes = total_bytes
        self.done_bytes = total_bytes - sum(map(_left_bytes, missing))
        self.sent_bytes = 0
        self._positions = {status.blob.sha256: status.committed_bytes for status in missing}

    def stands_at(self, sha256: str, position: int) -> None:
        """One content is at `position` now: what was sent while it travels, what the server says after a cut."""
        self.done_bytes += position - self._positions[sha256]
        self._positions[sha256] = position

    def progress(self, file: HashedFile) -> Progress:
        """Return how far all contents are, while `file` is sent."""
        return Progress(phase="upload", name=file.file.path, done_bytes=self.done_bytes, total_bytes=self.total_bytes)


class BlobUpload:
    """One push: the contents of its files, each at most once."""

    def __init__(
        self, connection: Connection, calls: BlobCalls, *, on_progress: OnProgress, on_notice: OnNotice
    ) -> None:
        self._connection = connection
        self._calls = calls
        self._on_progress = on_progress
        self._on_notice = on_notice

    async def send_missing(self, files: Sequence[HashedFile]) -> int:
        """Send what the server lacks and return how many bytes of data travelled.

        Raises:
            HorizonClientError: when the server refuses a content, or stays away for too long.
            BadFile: when a file changes meanwhile.
        """
        by_sha = {file.sha256: file for file in files}
        refs = [blob_pb2.BlobRef(sha256=sha, size_bytes=file.file.size_bytes) for sha, file in by_sha.items()]
        missing: list[blob_pb2.BlobStatus] = []
        for start in range(0, len(refs), _BLOBS_PER_QUESTION):
            missing += await self._calls.find_missing(refs[start : start + _BLOBS_PER_QUESTION])
        for status in missing:
            if status.blob.sha256 not in by_sha:
                raise ServerFailed(f"the server asks for a content that was not announced: {status.blob.sha256[:64]}")
        tally = _Tally(sum(ref.size_bytes for ref in refs), missing)
        waiting = deque(sorted(missing, key=_left_bytes, reverse=True))  # the longest first, so that all end together

        async def one_after_another() -> None:
            while waiting:
                status = waiting.popleft()
                await self._send(by_sha[status.blob.sha256], status, tally)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(STREAMS_AT_ONCE, len(waiting))):
                    group.create_task(one_after_another())
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return tally.sent_bytes

    async def _send(self, file: HashedFile, status: blob_pb2.BlobStatus, tally: _Tally) -> None:
        """Send one content until the server has all of it; after a failure ask where to go on."""
        backoff = Backoff(self._connection.stream_retry)
        listen_s = 0.0
        while not status.complete:
            start = status.committed_bytes
            problem: HorizonClientError = Unavailable(f"the server has only part of {file.file.path}")
            try:
                status = await self._write(file, status, tally, listen_s)
            except HorizonClientError as error:
                if not isinstance(error, Unavailable | DeadlineExceeded) and error.reason != _UPLOAD_REFUSED:
                    raise
                problem = error
                asked_at = time.monotonic()
                status = await self._calls.query(status.blob)
                round_trip_s = time.monotonic() - asked_at
                if status.committed_bytes > start:
                    listen_s = 0.0  # what moved was not refused
                if listen_s or isinstance(error, _StatusLost):
                    listen_s = min(max(2 * listen_s, 4 * round_trip_s, 0.05), _LONGEST_LISTEN_S)
            tally.stands_at(file.sha256, status.committed_bytes)
            if status.committed_bytes > start:
                backoff.succeeded()
            elif status.committed_bytes == start and problem.reason == _UPLOAD_REFUSED:
                raise problem  # asking again would send the same bytes from the same place
            if not status.complete:
                await self._pause(backoff, problem, file)

    async def _pause(self, backoff: Backoff, problem: HorizonClientError, file: HashedFile) -> None:
        wait_s = backoff.wait_s(problem)
        if wait_s is None:
            raise problem
        self._on_notice(f"the upload of {file.file.path} was cut ({problem.message}); going on in {wait_s:.1f} s")
        await asyncio.sleep(wait_s)

    async def _write(
        self, file: HashedFile, status: blob_pb2.BlobStatus, tally: _Tally, listen_s: float
    ) -> blob_pb2.BlobStatus:
        """Send from the committed offset on; with `listen_s`, wait so long for a refusal before the first data."""
        file.file.require_unchanged()
        call = self._calls.open_write()
        try:
            await self._feed(call, file, status, tally, listen_s)
            async with asyncio.timeout(FINALIZE_DEADLINE_S):
                answer: blob_pb2.BlobStatus = (await call).status
        except grpc.aio.AioRpcError as error:
            told = from_rpc(error, self._connection.endpoint.server)
            raise (_StatusLost(told.message) if lost_status(error) else told) from None
        except TimeoutError:
            stall_s = self._connection.stream_retry.stall_s
            raise Unavailable(f"the upload of {file.file.path} stood still for {stall_s:g} s") from None
        finally:
            call.cancel()
        return answer

    async def _feed(
        self, call: Any, file: HashedFile, status: blob_pb2.BlobStatus, tally: _Tally, listen_s: float
    ) -> None:
        """Write all chunks, or stop early when the server has ended the call: its answer then says why."""
        offset = status.committed_bytes
        request = self._calls.write_request()
        request.chunk.blob.CopyFrom(status.blob)
        request.chunk.offset = offset
        if listen_s:
            await self._knock(call, request, listen_s)
            request = self._calls.write_request()
        sent_to = offset
        async with aclosing(_pieces(file, offset)) as pieces:
            async for data in pieces:
                request.chunk.data = data
                try:
                    async with asyncio.timeout(self._connection.stream_retry.stall_s):
                        await call.write(request)
                except asyncio.InvalidStateError:
                    return
                request = self._calls.write_request()
                sent_to += len(data)
                tally.sent_bytes += len(data)
                tally.stands_at(file.sha256, sent_to)
                self._on_progress(tally.progress(file))
        file.file.require_unchanged()
        await call.done_writing()

    async def _knock(self, call: Any, request: Any, listen_s: float) -> None:
        """Name the content without data, which no window can hold up, and wait a little for a refusal."""
        with suppress(TimeoutError, asyncio.InvalidStateError):
            async with asyncio.timeout(listen_s):
                await call.write(request)
                await call.code()


def _left_bytes(status: blob_pb2.BlobStatus) -> int:
    return status.blob.size_bytes - status.committed_bytes


async def _pieces(file: HashedFile, offset: int) -> AsyncGenerator[bytes, None]:
    """Yield the file from `offset` on, read one piece ahead; an empty remainder gives one empty piece, so that the server hears of it."""
    loop = asyncio.get_running_loop()
    try:
        with file.file.source.open("rb", buffering=0) as source:
            source.seek(offset)
            is_first = True
            ahead = loop.run_in_executor(None, source.read, CHUNK_BYTES)
            try:
                while (data := await _done(ahead)) or is_first:
                    is_first = False
                    ahead = loop.run_in_executor(None, source.read, CHUNK_BYTES)
                    yield data
            finally:
                await asyncio.wait([ahead])  # the file must not be closed under its reader
                if not ahead.cancelled():
                    ahead.exception()  # seen, where nobody waits for this piece any more
    except OSError as error:
        raise BadFile(f"cannot read {file.file.source}: {error.strerror}") from error


async def _done(reading: asyncio.Future[bytes]) -> bytes:
    """Wait for a read, which goes on when the waiting is cancelled."""
    await asyncio.wait([reading])
    return reading.result()

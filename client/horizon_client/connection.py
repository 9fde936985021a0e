"""One channel to one daemon: TLS, token, keepalive, deadlines, retries, and streams that continue after a cut.

Thread: everything runs in the event loop of the first call; the channel is opened there.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import grpc
import grpc.aio

from horizon_client.errors import BadEndpoint, HorizonClientError, Unavailable
from horizon_client.profiles import Endpoint
from horizon_client.reporter import Reporter
from horizon_client.rpc_errors import explained
from horizon_proto.v1 import (
    blob_pb2_grpc,
    checkpoint_pb2_grpc,
    dataset_pb2_grpc,
    job_pb2_grpc,
    model_pb2_grpc,
    node_pb2_grpc,
)

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")

UNARY_DEADLINE_S = 30.0
FINALIZE_DEADLINE_S = 1800.0  # finalizing reads every row of a dataset, or every header of a model
PREVIEW_DEADLINE_S = 120.0  # rendering may load a large tokenizer first, and one preview is rendered at a time
STALL_DEADLINE_S = 120.0
MAX_RECEIVE_BYTES = 16 * 2**20
MAX_SEND_BYTES = 4 * 2**20
# Room for the violations of a refused dataset, which arrive as metadata; the first call announces the limit to the server
MAX_METADATA_BYTES = 128 * 1024

_METADATA_BYTES_KEY = "horizon-max-metadata-bytes"
_PAGE_SIZE = 200


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How long to retry after failures. Waits double from `first_wait_s` to `longest_wait_s`. Units: seconds.

    An upload that makes no progress for `stall_s` counts as cut.
    """

    max_attempts: int = 5
    max_elapsed_s: float = 30.0
    first_wait_s: float = 0.25
    longest_wait_s: float = 10.0
    stall_s: float = STALL_DEADLINE_S


UNARY_RETRY = RetryPolicy()
# A change may have happened although its answer was lost, and must not happen twice
ONCE = RetryPolicy(max_attempts=1)
# For watching and for transfers: long enough for a restart of the daemon or a change of networks
STREAM_RETRY = RetryPolicy(max_attempts=40, max_elapsed_s=300.0)


class Backoff:
    """Counts failures in a row against a policy."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self.succeeded()

    def succeeded(self) -> None:
        """Forget the failures: there was progress."""
        self._failures = 0
        self._first_failure_at = 0.0

    def wait_s(self, problem: HorizonClientError) -> float | None:
        """Return how long to wait before the next attempt, or None when it is time to give up."""
        if isinstance(problem, BadEndpoint):  # the same address would give the same answer
            return None
        now = time.monotonic()
        if self._failures == 0:
            self._first_failure_at = now
        self._failures += 1
        # The jitter keeps clients from returning all at once when a daemon has restarted
        wait_s = min(self._policy.first_wait_s * 2 ** (self._failures - 1), self._policy.longest_wait_s)
        # What the server asks for is the least
        wait_s = max(wait_s * random.uniform(0.75, 1.25), problem.retry_after_s or 0.0)
        out_of_time = now - self._first_failure_at + wait_s > self._policy.max_elapsed_s
        return None if self._failures >= self._policy.max_attempts or out_of_time else wait_s


class Calls:
    """The services of the daemon on one channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        # On a channel of grpc.aio the stubs are asynchronous; the classes of that type exist for type checkers only
        self.blobs = cast("blob_pb2_grpc.BlobServiceAsyncStub", blob_pb2_grpc.BlobServiceStub(channel))
        self.checkpoints = cast(
            "checkpoint_pb2_grpc.CheckpointServiceAsyncStub", checkpoint_pb2_grpc.CheckpointServiceStub(channel)
        )
        self.datasets = cast("dataset_pb2_grpc.DatasetServiceAsyncStub", dataset_pb2_grpc.DatasetServiceStub(channel))
        self.jobs = cast("job_pb2_grpc.JobServiceAsyncStub", job_pb2_grpc.JobServiceStub(channel))
        self.models = cast("model_pb2_grpc.ModelServiceAsyncStub", model_pb2_grpc.ModelServiceStub(channel))
        self.node = cast("node_pb2_grpc.NodeServiceAsyncStub", node_pb2_grpc.NodeServiceStub(channel))


class Connection:
    """The channel, opened at the first call and kept until `close`."""

    def __init__(self, endpoint: Endpoint, *, unary_retry: RetryPolicy, stream_retry: RetryPolicy) -> None:
        self.endpoint = endpoint
        self.unary_retry = unary_retry
        self.stream_retry = stream_retry
        token = (("authorization", f"Bearer {endpoint.token}"),) if endpoint.token else ()
        self.metadata = (*token, (_METADATA_BYTES_KEY, str(MAX_METADATA_BYTES)))
        # Read now, so that a bad file is an error of the constructor, not of the first call
        self._root_certificates = endpoint.root_certificates()
        self._channel: grpc.aio.Channel | None = None
        self._calls: Calls | None = None

    @property
    def calls(self) -> Calls:
        """The calls of the daemon; opens the channel when first used."""
        if self._calls is None:
            # Not in the constructor: a channel belongs to the event loop in which it is opened
            target, options = self.endpoint.server, _channel_options(self.endpoint)
            if self.endpoint.ca_file is None:
                self._channel = grpc.aio.insecure_channel(target, options=options)
            else:
                credentials = grpc.ssl_channel_credentials(root_certificates=self._root_certificates)
                self._channel = grpc.aio.secure_channel(target, credentials, options=options)
            self._calls = Calls(self._channel)
        return self._calls

    async def unary(
        self,
        call: grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT],
        request: RequestT,
        *,
        deadline_s: float = UNARY_DEADLINE_S,
        retry: RetryPolicy | None = None,
    ) -> ResponseT:
        """Make one call; retry it while the server is unavailable."""
        backoff = Backoff(retry or self.unary_retry)
        while True:
            try:
                return await call(request, timeout=deadline_s, metadata=self.metadata)
            except grpc.aio.AioRpcError as error:
                problem = await explained(error, self.endpoint)
            wait_s = backoff.wait_s(problem) if isinstance(problem, Unavailable) else None
            if wait_s is None:
                raise problem
            await asyncio.sleep(wait_s)

    async def all_pages(self, call: Any, request: Any, *, items: str, limit: int | None) -> list[Any]:
        """Return the messages of all pages, or the first `limit`; `items` is the field of an answer that holds them."""
        found: list[Any] = []
        while limit is None or len(found) < limit:
            request.page_size = _PAGE_SIZE if limit is None else min(_PAGE_SIZE, limit - len(found))
            answer: Any = await self.unary(call, request)
            found += getattr(answer, items)
            request.page_token = answer.next_page_token
            if not request.page_token:
                break
        return found[:limit]

    async def stream(
        self,
        call: grpc.aio.UnaryStreamMultiCallable[RequestT, ResponseT],
        request: RequestT,
        *,
        stall_s: float | None = STALL_DEADLINE_S,
    ) -> AsyncIterator[ResponseT]:
        """Yield the answers of one streaming call; `stall_s` limits the time between two of them, None does not."""
        running = call(request, metadata=self.metadata)
        answers = aiter(running)
        try:
            while True:
                async with asyncio.timeout(stall_s):
                    answer = await anext(answers, None)
                if answer is None:
                    return
                yield answer
        except grpc.aio.AioRpcError as error:
            raise await explained(error, self.endpoint) from None
        except TimeoutError:
            raise Unavailable(f"{self.endpoint.server} sent nothing for {stall_s:.0f} s") from None
        finally:
            running.cancel()  # the caller may have stopped early, and the server would continue to send

    async def followed(
        self,
        reopen: Callable[[], AsyncIterator[ResponseT]],
        is_over: Callable[[], Awaitable[bool]],
        *,
        reporter: Reporter,
        what: str,
    ) -> AsyncIterator[ResponseT]:
        """Yield the answers of the stream that `reopen` opens; after a cut open it again, with growing waits.

        `reopen` continues where the last answer ended. A stream that ends before `is_over` (the daemon is draining) counts as cut.
        """
        backoff = Backoff(self.stream_retry)
        while True:
            try:
                # Closed here, or the call would stay open until the garbage collection
                async with aclosing(reopen()) as answers:  # type: ignore[type-var]
                    async for answer in answers:
                        backoff.succeeded()
                        yield answer
                if await is_over():
                    return
                problem: HorizonClientError = Unavailable("the server ended the stream early")
            except Unavailable as error:
                problem = error
            await pause_after(problem, backoff, reporter, what)

    async def close(self) -> None:
        """Close the channel; calls under way end as cancelled."""
        if self._channel is not None:
            await self._channel.close(None)
        self._channel = self._calls = None


async def pause_after(problem: HorizonClientError, backoff: Backoff, reporter: Reporter, what: str) -> None:
    """Wait before the next attempt and say so; raise `problem` when it is time to give up."""
    wait_s = backoff.wait_s(problem)
    if wait_s is None:
        raise problem
    reporter.notice(f"{what} was cut ({problem.message}); retrying in {wait_s:.1f} s")
    await asyncio.sleep(wait_s)


def _channel_options(endpoint: Endpoint) -> list[tuple[str, Any]]:
    return [
        # A laptop that changes networks gets no reset; only pings notice that the connection is dead
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Shorter than the retries above, so that each of them is a new attempt to connect
        ("grpc.initial_reconnect_backoff_ms", 250),
        ("grpc.max_reconnect_backoff_ms", 5_000),
        ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
        ("grpc.max_send_message_length", MAX_SEND_BYTES),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", 2 * MAX_METADATA_BYTES),
        # A company proxy cannot reach this machine's loopback
        ("grpc.enable_http_proxy", 0 if endpoint.is_loopback else 1),
    ]

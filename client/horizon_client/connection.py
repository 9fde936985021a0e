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

from horizon_client.errors import BadEndpoint, Draining, HorizonClientError, Unavailable
from horizon_client.profiles import Endpoint
from horizon_client.reporter import SILENT, Reporter
from horizon_client.rpc_errors import explained, never_sent, nothing_answers
from horizon_client.waiting import timeout
from horizon_proto.v1 import (
    account_pb2_grpc,
    blob_pb2_grpc,
    checkpoint_pb2_grpc,
    dataset_pb2_grpc,
    housekeeping_pb2_grpc,
    job_pb2_grpc,
    model_pb2_grpc,
    node_pb2_grpc,
    session_pb2_grpc,
    sharing_pb2_grpc,
    webhook_pb2_grpc,
)

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")

UNARY_DEADLINE_S = 30.0
FINALIZE_DEADLINE_S = 1800.0  # finalizing reads every row of a dataset, or every header of a model
PREVIEW_DEADLINE_S = 120.0  # rendering may load a large tokenizer first, and one preview is rendered at a time
STALL_DEADLINE_S = 120.0
MAX_RECEIVE_BYTES = 16 * 2**20
MAX_SEND_BYTES = 4 * 2**20
# Room for the violations of a refused dataset, which arrive as metadata; the first call announces the limit to the
# server
MAX_METADATA_BYTES = 128 * 1024

_METADATA_BYTES_KEY = "horizon-max-metadata-bytes"
_PAGE_SIZE = 200
_NOTICE_AFTER_S = 2.0  # a person wonders by then why nothing happens; most cuts are over before


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How long to retry after failures. Waits double from `first_wait_s` to `longest_wait_s`. Units: seconds.

    `max_attempts` limits how often a call is sent: while a daemon is away or shuts down, only `max_elapsed_s` limits a
    unary call. An upload that makes no progress for `stall_s` counts as cut.
    """

    max_attempts: int = 5
    max_elapsed_s: float = 30.0
    first_wait_s: float = 0.25
    longest_wait_s: float = 10.0
    stall_s: float = STALL_DEADLINE_S


# Longer than a slow restart of the daemon (a migration, a large database). The waits are short, as a person waits for
# the answer
UNARY_RETRY = RetryPolicy(max_attempts=6, max_elapsed_s=60.0, longest_wait_s=1.0)
# For watching and for transfers: long enough for a restart of the daemon or a change of networks
STREAM_RETRY = RetryPolicy(max_attempts=40, max_elapsed_s=300.0)


class Backoff:
    """Counts failures in a row against a policy."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self.succeeded()

    def succeeded(self) -> None:
        """Forget the failures: there was progress."""
        self._failures = self._counted = 0
        self._first_failure_at = 0.0

    def wait_s(self, problem: HorizonClientError, *, counts: bool = True) -> float | None:
        """Return how long to wait before the next attempt, or None when it is time to give up.

        A failure that does not count is limited by time only.
        """
        if isinstance(problem, BadEndpoint):  # the same address would give the same answer
            return None
        now = time.monotonic()
        if self._failures == 0:
            self._first_failure_at = now
        self._failures += 1
        self._counted += counts
        # The jitter keeps clients from returning all at once when a daemon has restarted
        wait_s = min(self._policy.first_wait_s * 2 ** (self._failures - 1), self._policy.longest_wait_s)
        # What the server asks for is the least
        wait_s = max(wait_s * random.uniform(0.75, 1.25), problem.retry_after_s or 0.0)
        out_of_time = now - self._first_failure_at + wait_s > self._policy.max_elapsed_s
        return None if self._counted >= self._policy.max_attempts or out_of_time else wait_s

    @property
    def elapsed_s(self) -> float:
        """Time since the first failure in the row."""
        return time.monotonic() - self._first_failure_at if self._failures else 0.0


class Calls:
    """The services of the daemon on one channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        # On a channel of grpc.aio the stubs are asynchronous; the classes of that type exist for type checkers only
        self.account = cast("account_pb2_grpc.AccountServiceAsyncStub", account_pb2_grpc.AccountServiceStub(channel))
        self.blobs = cast("blob_pb2_grpc.BlobServiceAsyncStub", blob_pb2_grpc.BlobServiceStub(channel))
        self.checkpoints = cast(
            "checkpoint_pb2_grpc.CheckpointServiceAsyncStub", checkpoint_pb2_grpc.CheckpointServiceStub(channel)
        )
        self.datasets = cast("dataset_pb2_grpc.DatasetServiceAsyncStub", dataset_pb2_grpc.DatasetServiceStub(channel))
        self.housekeeping = cast(
            "housekeeping_pb2_grpc.HousekeepingServiceAsyncStub",
            housekeeping_pb2_grpc.HousekeepingServiceStub(channel),
        )
        self.jobs = cast("job_pb2_grpc.JobServiceAsyncStub", job_pb2_grpc.JobServiceStub(channel))
        self.models = cast("model_pb2_grpc.ModelServiceAsyncStub", model_pb2_grpc.ModelServiceStub(channel))
        self.node = cast("node_pb2_grpc.NodeServiceAsyncStub", node_pb2_grpc.NodeServiceStub(channel))
        self.sessions = cast("session_pb2_grpc.SessionServiceAsyncStub", session_pb2_grpc.SessionServiceStub(channel))
        self.sharing = cast("sharing_pb2_grpc.SharingServiceAsyncStub", sharing_pb2_grpc.SharingServiceStub(channel))
        self.webhooks = cast("webhook_pb2_grpc.WebhookServiceAsyncStub", webhook_pb2_grpc.WebhookServiceStub(channel))


class Connection:
    """The channel, opened at the first call and kept until `close`."""

    def __init__(
        self, endpoint: Endpoint, *, unary_retry: RetryPolicy, stream_retry: RetryPolicy, reporter: Reporter = SILENT
    ) -> None:
        self.endpoint = endpoint
        self._reporter = reporter
        self._said_away = False
        self.unary_retry = unary_retry
        self.stream_retry = stream_retry
        token = (("authorization", f"Bearer {endpoint.token}"),) if endpoint.token else ()
        self.metadata = (*token, (_METADATA_BYTES_KEY, str(MAX_METADATA_BYTES)))
        # Read now, so that a bad file is an error of the constructor, not of the first call
        self._root_certificates = endpoint.root_certificates()
        self._client_pair = endpoint.client_pair() or (None, None)
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
                credentials = grpc.ssl_channel_credentials(self._root_certificates, *self._client_pair)
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
        repeatable: bool = True,
    ) -> ResponseT:
        """Make one call; retry it while the server is unavailable.

        A change that is not `repeatable` may have happened although its answer was lost, and must not happen twice: it
        is tried again only where it has certainly not left this machine.
        """
        policy = retry or self.unary_retry
        backoff = Backoff(policy)
        while True:
            try:
                answer = await call(request, timeout=deadline_s, metadata=self.metadata)
            except grpc.aio.AioRpcError as error:
                problem = await explained(error, self.endpoint)
                is_in_doubt = not repeatable and isinstance(problem, Unavailable) and not never_sent(error)
                may_try = isinstance(problem, Unavailable) and not is_in_doubt
                is_away = isinstance(problem, Draining) or nothing_answers(error)
            else:
                self._said_away = False
                return answer
            wait_s = backoff.wait_s(problem, counts=not is_away) if may_try else None
            if wait_s is None:
                # A reason of its own means that the server has refused the call
                if is_in_doubt and problem.reason == Unavailable.reason:
                    problem = Unavailable(f"{problem.message}; it may have been carried out: look before you repeat it")
                raise problem
            # Once for all calls that wait: an upload makes several at the same time
            if backoff.elapsed_s + wait_s >= _NOTICE_AFTER_S and not self._said_away:
                self._said_away = True
                self._reporter.notice(f"{problem.message}; trying again for up to {policy.max_elapsed_s:.0f} s")
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
                async with timeout(stall_s):
                    answer = await anext(answers, None)
                if answer is None:
                    return
                yield answer
        except grpc.aio.AioRpcError as error:
            raise await explained(error, self.endpoint) from None
        except asyncio.TimeoutError:
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

        `reopen` continues where the last answer ended. A stream that ends before `is_over` (the daemon is draining)
        counts as cut.
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
        # As short as the waits above, so that each retry is a new attempt to connect and a daemon that is back is found
        # at once
        ("grpc.initial_reconnect_backoff_ms", 250),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # How long one attempt to connect may take; the default of 20 s is a long silence where a firewall drops
        # everything
        ("grpc.min_reconnect_backoff_ms", 5_000),
        ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
        ("grpc.max_send_message_length", MAX_SEND_BYTES),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", 2 * MAX_METADATA_BYTES),
        # A company proxy cannot reach this machine's loopback
        ("grpc.enable_http_proxy", 0 if endpoint.is_loopback else 1),
    ]

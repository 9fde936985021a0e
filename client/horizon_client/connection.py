"""One channel to one daemon: TLS, token, keepalive, deadlines and retries. Knows no service by name.

Thread: everything runs in the event loop of the first call; the channel is opened there.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio

from horizon_client.endpoint import Endpoint
from horizon_client.errors import HorizonClientError, Unavailable
from horizon_client.rpc_errors import from_rpc

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
StubT = TypeVar("StubT")

UNARY_DEADLINE_S = 30.0
FINALIZE_DEADLINE_S = 1800.0
"""Finalizing reads every row of a dataset, or every header of a model."""
PREVIEW_DEADLINE_S = 120.0
"""Rendering may load a large tokenizer first, and waits for its turn."""
STALL_DEADLINE_S = 120.0
MAX_RECEIVE_BYTES = 16 * 2**20
MAX_SEND_BYTES = 4 * 2**20
MAX_METADATA_BYTES = 128 * 1024
"""Room for the violations of a refused dataset, which travel as metadata; the server is told that so much is welcome."""

_METADATA_BYTES_KEY = "horizon-max-metadata-bytes"


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How long to go on after failures. Waits double from `first_wait_s` to `longest_wait_s`. Units: seconds.

    An upload in which nothing moves for `stall_s` is taken for cut.
    """

    max_attempts: int = 5
    max_elapsed_s: float = 30.0
    first_wait_s: float = 0.25
    longest_wait_s: float = 10.0
    stall_s: float = STALL_DEADLINE_S


UNARY_RETRY = RetryPolicy()
STREAM_RETRY = RetryPolicy(max_attempts=40, max_elapsed_s=300.0)
"""For watching and for transfers, which survive a restart of the daemon or a change of networks."""


class Backoff:
    """Counts failures in a row against a policy."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self.succeeded()

    def succeeded(self) -> None:
        """Forget the failures: something moved."""
        self._failures = 0
        self._first_failure_at = 0.0

    def wait_s(self, problem: HorizonClientError) -> float | None:
        """Return how long to wait before the next try, or None when it is time to give up."""
        now = time.monotonic()
        if self._failures == 0:
            self._first_failure_at = now
        self._failures += 1
        wait_s = min(self._policy.first_wait_s * 2 ** (self._failures - 1), self._policy.longest_wait_s)
        wait_s = max(wait_s * random.uniform(0.75, 1.25), problem.retry_after_s or 0.0)
        out_of_time = now - self._first_failure_at + wait_s > self._policy.max_elapsed_s
        return None if self._failures >= self._policy.max_attempts or out_of_time else wait_s


class Connection:
    """The channel, opened at the first call and kept until `close`."""

    def __init__(self, endpoint: Endpoint, *, unary_retry: RetryPolicy, stream_retry: RetryPolicy) -> None:
        self.endpoint = endpoint
        self.unary_retry = unary_retry
        self.stream_retry = stream_retry
        token = (("authorization", f"Bearer {endpoint.token}"),) if endpoint.token else ()
        self.metadata = (*token, (_METADATA_BYTES_KEY, str(MAX_METADATA_BYTES)))
        self._root_certificates = endpoint.root_certificates()
        self._channel: grpc.aio.Channel | None = None
        self._stubs: dict[object, object] = {}

    def stub(self, kind: Callable[[grpc.aio.Channel], StubT]) -> StubT:
        """Return the stub of one service on this channel."""
        if kind not in self._stubs:
            self._stubs[kind] = kind(self._open())
        return self._stubs[kind]  # type: ignore[return-value]

    async def unary(
        self,
        call: grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT],
        request: RequestT,
        *,
        deadline_s: float = UNARY_DEADLINE_S,
        idempotent: bool = True,
        retry: RetryPolicy | None = None,
    ) -> ResponseT:
        """Make one call; where it is idempotent, make it again while the server is unavailable.

        Raises:
            HorizonClientError: what the server answered, or that it cannot be reached.
        """
        backoff = Backoff(retry or self.unary_retry)
        while True:
            try:
                return await call(request, timeout=deadline_s, metadata=self.metadata)
            except grpc.aio.AioRpcError as error:
                problem = from_rpc(error, self.endpoint.server)
            wait_s = backoff.wait_s(problem) if idempotent and isinstance(problem, Unavailable) else None
            if wait_s is None:
                raise problem
            await asyncio.sleep(wait_s)

    async def stream(
        self,
        call: grpc.aio.UnaryStreamMultiCallable[RequestT, ResponseT],
        request: RequestT,
        *,
        stall_s: float | None = STALL_DEADLINE_S,
    ) -> AsyncIterator[ResponseT]:
        """Yield the answers of one streaming call; `stall_s` bounds the silence between two of them, None allows any.

        Raises:
            Unavailable: when the stream was cut or stood still; going on from where it stopped is the caller's business.
            HorizonClientError: what else the server answered.
        """
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
            raise from_rpc(error, self.endpoint.server) from None
        except TimeoutError:
            raise Unavailable(f"{self.endpoint.server} sent nothing for {stall_s:.0f} s") from None
        finally:
            running.cancel()

    async def close(self) -> None:
        """Close the channel; calls under way end as cancelled."""
        if self._channel is not None:
            await self._channel.close(None)
        self._channel = None
        self._stubs.clear()

    def _open(self) -> grpc.aio.Channel:
        if self._channel is None:
            target, options = self.endpoint.server, _channel_options(self.endpoint)
            if self.endpoint.ca_file is None:
                self._channel = grpc.aio.insecure_channel(target, options=options)
            else:
                credentials = grpc.ssl_channel_credentials(root_certificates=self._root_certificates)
                self._channel = grpc.aio.secure_channel(target, credentials, options=options)
        return self._channel


def _channel_options(endpoint: Endpoint) -> list[tuple[str, Any]]:
    return [
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 250),
        ("grpc.max_reconnect_backoff_ms", 5_000),
        ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
        ("grpc.max_send_message_length", MAX_SEND_BYTES),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", 2 * MAX_METADATA_BYTES),
        # a company proxy cannot reach this machine's loopback
        ("grpc.enable_http_proxy", 0 if endpoint.is_loopback else 1),
    ]

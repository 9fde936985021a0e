"""How streams end: in order when nobody wants the rest, and at once when the daemon shuts down, so that clients reconnect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Generic, TypeVar

from horizon_server.errors import Draining

ItemT = TypeVar("ItemT")

_READ_OUT_S = 2.0
_SILENCE_S = 0.25
_REFUSED_SILENCE_S = 0.015


@asynccontextmanager
async def closing(items: AsyncIterator[ItemT]) -> AsyncIterator[AsyncIterator[ItemT]]:
    """Close `items` at the end of the block where it is a generator, rather than when it is collected."""
    try:
        yield items
    finally:
        if isinstance(items, AsyncGenerator):
            await items.aclose()


class RequestStream(Generic[ItemT]):
    """What a client sends, with a way to end it in order.

    A `grpc.aio` client whose write is under way when the answer arrives reports an internal error instead of the answer. Two things
    help: initial metadata sent before (a bare status is lost nearly always, one that follows metadata nearly never), and reading out
    what is on its way first.
    """

    def __init__(self, requests: AsyncIterator[ItemT]) -> None:
        self._requests = requests
        self._num_read = 0

    def __aiter__(self) -> RequestStream[ItemT]:
        return self

    async def __anext__(self) -> ItemT:
        request = await anext(self._requests)
        self._num_read += 1
        return request

    async def read_out(self, *, refused: bool) -> None:
        """Drop what still comes, until it ends or pauses. One that was refused at its first message may be waiting for just that."""
        silence_s = _REFUSED_SILENCE_S if refused and self._num_read <= 1 else _SILENCE_S
        with suppress(TimeoutError, StopAsyncIteration):
            async with asyncio.timeout(_READ_OUT_S):
                while True:
                    await asyncio.wait_for(anext(self), silence_s)


class OpenStreams:
    """Thread: one event loop."""

    def __init__(self) -> None:
        self._scopes: set[asyncio.Timeout] = set()
        self._ended = False

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Count the block as an open stream.

        Raises:
            Draining: when the daemon shuts down meanwhile.
        """
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._scopes.add(scope)
                if self._ended:
                    scope.reschedule(asyncio.get_running_loop().time())
                try:
                    yield
                finally:
                    self._scopes.discard(scope)
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise Draining("the daemon is shutting down; connect again in a moment", retry_after_s=2.0) from error

    def end(self) -> None:
        """End all streams, and those that still come."""
        self._ended = True
        for scope in self._scopes:
            scope.reschedule(asyncio.get_running_loop().time())

"""Streams of both faces end in order when the caller leaves, and at once when the daemon shuts down, so that clients reconnect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from horizon_server.errors import Draining

ItemT = TypeVar("ItemT")


@asynccontextmanager
async def closing(items: AsyncIterator[ItemT]) -> AsyncIterator[AsyncIterator[ItemT]]:
    """Close `items` at the end of the block where it is a generator, rather than when it is collected."""
    try:
        yield items
    finally:
        if isinstance(items, AsyncGenerator):
            await items.aclose()


class OpenStreams:
    """The streams that are open now. Thread: one event loop."""

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

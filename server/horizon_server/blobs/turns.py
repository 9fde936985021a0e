"""One writer at a time for each upload, without letting a dead connection block the laptop that came back.

A second writer waits for the first. It gets the turn when the first ends, or when the first has waited too long for its client: then
that client is considered gone, and the first is cut.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from horizon_server.errors import UploadInProgress
from horizon_server.records.blob import BlobRef

UploadKey = tuple[str, BlobRef]
"""Who sends which content."""
MAX_TURNS_EACH = 16
"""A user's uploads at once; one user cannot take all of the daemon's calls and threads."""


class Turn:
    """The right to write one upload."""

    def __init__(self, scope: asyncio.Timeout, clock: Callable[[], float]) -> None:
        self._scope = scope
        self._clock = clock
        self._waiting_since: float | None = None
        self.ended = asyncio.Event()

    def waits_for_client(self) -> None:
        """The writer waits for its client from now on."""
        self._waiting_since = self._clock()

    def has_data(self) -> None:
        """The writer works: a slow disk is not a silent client."""
        self._waiting_since = None

    @property
    def silent_s(self) -> float:
        """For how long the client has sent nothing."""
        return 0.0 if self._waiting_since is None else self._clock() - self._waiting_since

    def cut(self) -> None:
        """End the writer: its turn is over as soon as it has put its file down."""
        if not self.ended.is_set() and self._scope.when() is None:
            self._scope.reschedule(asyncio.get_running_loop().time())


class Turns:
    """Hands out turns by key. Units: seconds."""

    def __init__(
        self, *, silence_s: float = 10.0, wait_s: float = 15.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._silence_s = silence_s
        self._wait_s = wait_s
        self._clock = clock
        self._holders: dict[UploadKey, Turn] = {}

    async def is_free(self, key: UploadKey, wait_s: float) -> bool:
        """Whether the turn is free, or its holder gives it back within `wait_s`."""
        if (holder := self._holders.get(key)) is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await holder.ended.wait()
        return key not in self._holders

    def held(self) -> tuple[UploadKey, ...]:
        """Return all uploads that have a writer now."""
        return tuple(self._holders)

    @asynccontextmanager
    async def take(self, key: UploadKey) -> AsyncIterator[Turn]:
        """Hold the turn for the block.

        Raises:
            UploadInProgress: when another writer keeps receiving data, when this one was cut, or when the user sends too many at once.
        """
        await self._wait_for(key)
        if sum(owner == key[0] for owner, _ in self._holders) >= MAX_TURNS_EACH:
            raise UploadInProgress(
                f"{MAX_TURNS_EACH} uploads of yours are under way; wait until one has ended", retry_after_s=1.0
            )
        scope = asyncio.timeout(None)
        turn = Turn(scope, self._clock)
        self._holders[key] = turn
        try:
            async with scope:
                yield turn
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise UploadInProgress(
                "another connection has taken this upload over; ask for its status and continue from there",
                retry_after_s=self._wait_s,
            ) from error
        finally:
            del self._holders[key]
            turn.ended.set()

    async def _wait_for(self, key: UploadKey) -> None:
        deadline = self._clock() + self._wait_s
        while (holder := self._holders.get(key)) is not None:
            left_s = deadline - self._clock()
            if left_s <= 0:
                raise UploadInProgress(
                    "another connection is sending this content right now; wait until it is done, or stop it",
                    retry_after_s=self._wait_s,
                )
            patience_s = self._silence_s - holder.silent_s
            if patience_s <= 0:
                holder.cut()
                patience_s = left_s
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, patience_s)):
                    await holder.ended.wait()

"""Who may work on one thing at a time, and work that continues when its caller is cancelled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

from horizon_server.errors import UploadInProgress
from horizon_server.records.blob import BlobRef

UploadKey = tuple[str, BlobRef]  # who sends which content
ResultT = TypeVar("ResultT")

# A user's uploads at once; one user cannot take all of the daemon's calls and threads.
MAX_TURNS_EACH = 16
# Checks at once, of all users: each is a process that reads as fast as the disk and one processor allow.
MAX_SHARED_CALLS = 2


async def in_thread(call: Callable[[], ResultT]) -> ResultT:
    """Run `call` in a thread of the loop's default executor; a caller who is cancelled continues only when the thread
    has ended."""
    # Otherwise the caller would close, or another writer open, a file that the thread still writes to.
    return await to_the_end(asyncio.to_thread(call))


async def to_the_end(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run `work`. When the caller is cancelled, however often, let it end first."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # asyncio logs an exception that nobody has looked at
        raise


class SharedCalls(Generic[ResultT]):
    """Runs one call per key at a time, one for each user, and at most two in all. A call continues when its caller
    hangs up.

    Thread: one event loop.
    """

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(MAX_SHARED_CALLS)
        # A user's calls wait here for each other: were both slots theirs, all other users would wait for as long as
        # their files take.
        self._of_user = WeakValueDictionary[str, asyncio.Semaphore]()
        self._running: dict[str, asyncio.Task[ResultT]] = {}

    async def join(self, key: str, work: Callable[[], Awaitable[ResultT]], *, user: str) -> ResultT:
        """Return the result of the call under `key`, starting it for `user` when there is none."""
        turn = self._of_user.setdefault(user, asyncio.Semaphore(1))

        async def run() -> ResultT:
            async with turn, self._slots:
                return await work()

        def forget(task: asyncio.Task[ResultT]) -> None:
            del self._running[key]
            if not task.cancelled():
                task.exception()  # seen, even where every caller has hung up

        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.create_task(run())
            # A callback, because a task that is cancelled before it starts would reach no `finally` of its own.
            task.add_done_callback(forget)
        return await asyncio.shield(task)

    def runs(self, key: str) -> bool:
        """Whether a call under `key` is under way."""
        return key in self._running

    async def close(self) -> None:
        """Stop everything that still runs."""
        tasks: list[asyncio.Task[Any]] = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Turn:
    """The right to write one upload."""

    def __init__(self, scope: asyncio.Timeout, clock: Callable[[], float]) -> None:
        self.scope = scope
        self._clock = clock
        self.waiting_since: float | None = None
        self.ended = asyncio.Event()

    @contextmanager
    def waiting_for_client(self) -> Iterator[None]:
        """Count the block as the client's silence; all else is the writer's own work, such as a slow disk."""
        self.waiting_since = self._clock()
        try:
            yield
        finally:
            self.waiting_since = None


class Turns:
    """One writer at a time for each upload, without letting a dead connection block the laptop that came back.

    A second writer waits for the first. It gets the turn when the first ends, or when the first has waited too long for
    its client: then that client is considered gone, and the first is cut. `holders` are the uploads that have a writer
    now.
    """

    def __init__(
        self, *, silence_s: float = 10.0, wait_s: float = 15.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._silence_s = silence_s
        self._wait_s = wait_s
        self._clock = clock
        self.holders: dict[UploadKey, Turn] = {}

    async def is_free(self, key: UploadKey, wait_s: float) -> bool:
        """Whether the turn is free, or its holder gives it back within `wait_s`."""
        if (holder := self.holders.get(key)) is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await holder.ended.wait()
        return key not in self.holders

    @asynccontextmanager
    async def take(self, key: UploadKey) -> AsyncIterator[Turn]:
        """Hold the turn for the block.

        Raises:
            UploadInProgress: when another writer keeps receiving data, when this one was cut, or when the user sends
                too many at once.
        """
        await self._wait_for(key)
        if sum(owner == key[0] for owner, _ in self.holders) >= MAX_TURNS_EACH:
            raise UploadInProgress(
                f"{MAX_TURNS_EACH} uploads of yours are under way; wait until one has ended", retry_after_s=1.0
            )
        scope = asyncio.timeout(None)
        turn = self.holders[key] = Turn(scope, self._clock)
        try:
            async with scope:
                yield turn
        except TimeoutError as error:
            # A timeout of the writer's own is not a cut.
            if not scope.expired():
                raise
            raise UploadInProgress(
                "another connection has taken this upload over; ask for its status and continue from there",
                retry_after_s=self._wait_s,
            ) from error
        finally:
            del self.holders[key]
            turn.ended.set()

    async def _wait_for(self, key: UploadKey) -> None:
        deadline = self._clock() + self._wait_s
        # In a loop: of several that wait, another may have taken the turn before this one continues.
        while (holder := self.holders.get(key)) is not None:
            left_s = deadline - self._clock()
            if left_s <= 0:
                raise UploadInProgress(
                    "another connection is sending this content right now; wait until it is done, or stop it",
                    retry_after_s=self._wait_s,
                )
            silent_s = 0.0 if holder.waiting_since is None else self._clock() - holder.waiting_since
            patience_s = self._silence_s - silent_s
            if patience_s <= 0:
                # A timeout that expires now ends the writer wherever it waits, and distinguishes a cut from a caller
                # who cancels. Its turn is over when it has put its file down.
                if holder.scope.when() is None:
                    holder.scope.reschedule(asyncio.get_running_loop().time())
                patience_s = left_s
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, patience_s)):
                    await holder.ended.wait()

"""An event loop on a thread of its own, in which the blocking `Client` runs the calls of the async classes.

It makes the client usable in scripts and notebooks alike, and an interrupt cancels the call in progress.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future, wait
from typing import Any, TypeVar, cast

ValueT = TypeVar("ValueT")

_UNWIND_S = 5.0  # how long cancelled work may take to clean up before it is abandoned


class LoopThread:
    """An event loop on a daemon thread; stopped by `close`, or when the last reference to it is gone."""

    def __init__(self) -> None:
        loop = asyncio.new_event_loop()

        def ignore_shared_poller(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            # grpc logs it when two event loops of one process share its wake-up socket; it is harmless
            if not isinstance(context.get("exception"), BlockingIOError):
                loop.default_exception_handler(context)

        loop.set_exception_handler(ignore_shared_poller)

        def run_loop() -> None:  # without `self`, or the thread would keep this object alive
            asyncio.set_event_loop(loop)
            loop.run_forever()

        # A daemon thread, so that a program which forgets `close` can still exit
        thread = threading.Thread(target=run_loop, name="horizon-client", daemon=True)
        thread.start()
        self._loop = loop
        self._finalizer = weakref.finalize(self, _stop_loop, loop, thread)

    @property
    def is_open(self) -> bool:
        """Whether work can still be run."""
        return self._finalizer.alive

    def run(self, work: Callable[[], Coroutine[Any, Any, ValueT]]) -> ValueT:
        """Run what `work` makes and return its result; an interrupt cancels it and is raised to the caller."""
        if not self.is_open:
            raise RuntimeError("this client is closed")
        result: Future[ValueT] = Future()
        task: asyncio.Task[None] | None = None

        async def fill() -> None:
            try:
                result.set_result(await work())
            except Exception as error:  # noqa: BLE001 - all of them belong to the caller
                result.set_exception(error)

        # In the loop's thread, because an interrupt could come between making a coroutine and scheduling it: it would
        # never be awaited
        def start() -> None:
            nonlocal task
            task = self._loop.create_task(fill())
            # A task may be cancelled before its first line
            task.add_done_callback(lambda _: result.cancel())

        def cancel() -> None:
            if task is None:  # the interrupt was faster than `start`
                result.cancel()
            else:
                task.cancel()

        try:
            self._loop.call_soon_threadsafe(start)
            return result.result()
        except KeyboardInterrupt:
            self._loop.call_soon_threadsafe(cancel)
            wait([result], _UNWIND_S)  # streams are closed then, so the next call finds a clean connection
            raise

    def iterate(self, items: AsyncIterator[ValueT]) -> Iterator[ValueT]:
        """Yield what an async generator yields, and close it when the caller stops."""
        end = object()
        step: asyncio.Task[Any] | None = None

        async def advance() -> object:
            nonlocal step
            step = asyncio.current_task()
            return await anext(items, end)

        async def close() -> None:
            # An interrupt just before `run` began to wait has left the step running, and a running generator cannot be
            # closed
            if step is not None and not step.done():
                step.cancel()
                await asyncio.wait([step])
            if isinstance(items, AsyncGenerator):
                await items.aclose()

        try:
            while (item := self.run(advance)) is not end:
                yield cast("ValueT", item)
        finally:
            if self.is_open:
                self.run(close)

    def close(self) -> None:
        """Cancel the work in progress and stop the thread. May be called twice."""
        self._finalizer()


def _stop_loop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    if threading.current_thread() is thread:  # the garbage collector may run anywhere; a thread cannot join itself
        loop.stop()
        return

    async def cancel_all() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run_coroutine_threadsafe(cancel_all(), loop).result(timeout=_UNWIND_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(timeout=_UNWIND_S)
    loop.close()

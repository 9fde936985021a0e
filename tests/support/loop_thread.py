"""An event loop in a thread of its own, for tests that block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class LoopThread:
    """Runs coroutines for a test that is not itself one."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # Several loops of one process share gRPC's poller, which then reports reads that found nothing.
        self._loop.set_exception_handler(lambda loop, context: None)
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-loop", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, Result], timeout_s: float = 240.0) -> Result:
        """Run a coroutine there and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def close(self) -> None:
        """End the thread; what still runs there is abandoned."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(180)
        self._loop.close()

"""An event loop whose time jumps to the next thing that is due: hours pass in a moment, the same way each time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """Waits for nothing but its own timers: sockets and threads are not for it."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._now_s

    def _run_once(self) -> None:
        if not self._ready:  # type: ignore[attr-defined]
            # A timer that was cancelled stays in the list, and a jump to it would leave the rest as a real wait.
            due_s = [timer.when() for timer in self._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]
            self._now_s = max(self._now_s, min(due_s, default=0.0))
        super()._run_once()  # type: ignore[misc]


def run_in_virtual_time(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(work)

"""Where the daemon is between its start and its end: the one flag that every part asks before it takes new work."""

from __future__ import annotations

import asyncio
import contextlib


class Lifecycle:
    """Serving, then draining, then closed; never back.

    Thread: belongs to one event loop.
    """

    def __init__(self) -> None:
        self._draining = asyncio.Event()
        self._closed = False

    @property
    def draining(self) -> bool:
        """Whether new work is refused: the daemon is about to end."""
        return self._draining.is_set()

    @property
    def closed(self) -> bool:
        """Whether the last attempt has ended too, so that watches have nothing more to wait for."""
        return self._closed

    def drain(self) -> None:
        """Take no new work from now on."""
        self._draining.set()

    def close(self) -> None:
        """Nothing will happen to any job any more."""
        self._draining.set()
        self._closed = True

    async def pause(self, seconds: float) -> None:
        """Wait, but no longer than until draining begins."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._draining.wait(), seconds)

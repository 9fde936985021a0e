"""Who waits for what the calls of sessions answer."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class CallNews:
    """Wakes those who wait when a session has done a call. Thread: belongs to one event loop."""

    def __init__(self) -> None:
        self._waiting: defaultdict[str, set[asyncio.Event]] = defaultdict(set)

    def tell(self, job_id: str) -> None:
        """A call of this session has a result."""
        for news in self._waiting.get(job_id, ()):
            news.set()

    @contextmanager
    def waiting(self, job_id: str, news: asyncio.Event) -> Iterator[None]:
        """Set `news` whenever a call of the session has been done, until the end of the block."""
        self._waiting[job_id].add(news)
        try:
            yield
        finally:
            self._waiting[job_id].discard(news)
            if not self._waiting[job_id]:
                del self._waiting[job_id]

"""The journal of jobs: every event is stored first, then told to watchers and to the metrics. The only writer of events."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

from horizon_server.errors import Draining
from horizon_server.events import JobEvent, Payload, StateChanged
from horizon_server.jobs.ports import JobObserver, JobStore
from horizon_server.records.job import ENDED, JobRecord, JobState

_BATCH = 500
"""Events read at a time: a watcher far behind costs no more memory than this."""


class Journal:
    """Stores events and wakes whoever watches.

    Thread: belongs to one event loop.
    """

    def __init__(self, store: JobStore, observer: JobObserver) -> None:
        self.store = store
        self._observer = observer
        self._watchers: dict[str, set[asyncio.Event]] = defaultdict(set)
        self._closed = False

    async def create(self, job: JobRecord, *, request_id: str) -> JobRecord:
        """Store a new job, or return the one that the same earlier request made."""
        record, event = await self.store.create(job, request_id=request_id)
        if event is not None:
            await self._told_state(record, None)
        return record

    async def move(
        self, job: JobRecord, state: JobState, *, reason: str = "", message: str = "", **fields: Any
    ) -> JobRecord:
        """Change the job's state.

        Raises:
            WrongJobState: when the state machine does not allow it.
        """
        attempt = int(fields.get("attempt", job.attempt))
        change = StateChanged(job_state=state.value, reason=reason, message=message, attempt=attempt)
        record, _ = await self.store.move(job.job_id, change, **fields)
        await self._told_state(record, job.job_state.value)
        return record

    async def append(self, job_id: str, payload: Payload, **fields: Any) -> JobRecord:
        """Store an event that leaves the state as it is."""
        record, _ = await self.store.append(job_id, payload, **fields)
        self._observer.on_payload(record, payload)
        self._wake(job_id)
        return record

    async def follow(self, job_id: str, after: int) -> AsyncIterator[JobEvent]:
        """Yield events with a greater number as they come, and end after the last one of an ended job.

        Raises:
            Draining: when the daemon shuts down meanwhile; the caller reconnects and goes on from the last number.
        """
        news = asyncio.Event()
        self._watchers[job_id].add(news)
        try:
            while True:
                news.clear()
                job = await self.store.get(job_id)
                events = await self.store.events_after(job_id, after, _BATCH)
                for event in events:
                    yield event
                    after = event.sequence
                if job is None or (job.job_state in ENDED and after >= job.last_sequence):
                    return
                if self._closed:
                    raise Draining("the daemon is shutting down; the job continues when it is back", retry_after_s=2.0)
                if not events:
                    await news.wait()
        finally:
            self._watchers[job_id].discard(news)
            if not self._watchers[job_id]:
                del self._watchers[job_id]

    def close(self) -> None:
        """End every watch with Draining, once each has what is stored."""
        self._closed = True
        for job_id in list(self._watchers):
            self._wake(job_id)

    async def _told_state(self, job: JobRecord, old: str | None) -> None:
        self._observer.on_job_state(job, old)
        self._observer.set_jobs(await self.store.counts())
        self._wake(job.job_id)

    def _wake(self, job_id: str) -> None:
        for news in self._watchers.get(job_id, ()):
            news.set()

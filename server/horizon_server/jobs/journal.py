"""The journal of jobs: every event is stored first, then passed on to watchers and to the metrics. The only writer of
events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import structlog

from horizon_server.db.jobs import AdmitJob, JobStore
from horizon_server.errors import DatabaseUnavailable, DiskFull, Draining
from horizon_server.events import JobEvent, Payload, StateChanged
from horizon_server.jobs.recovery import RESTARTED
from horizon_server.records.job import ENDED, JobRecord, JobState
from horizon_server.telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

Result = TypeVar("Result")

# Events read at a time: a watcher that starts late costs no more memory than this.
_BATCH = 500
# The last events of a watched job that are at hand, up to twice as many. A watcher that is further back reads from the
# database.
_AT_HAND = 100
# How long a write of an attempt waits before it is tried again.
RETRY_S = 5.0


class Lifecycle:
    """Serving, then draining, then closed; never back. Thread: belongs to one event loop."""

    def __init__(self) -> None:
        self._draining = asyncio.Event()
        # Whether the last attempt has ended too, so that watches have nothing more to wait for.
        self.closed = False

    @property
    def draining(self) -> bool:
        """Whether new work is refused: the daemon is about to end."""
        return self._draining.is_set()

    def drain(self) -> None:
        """Take no new work from now on."""
        self._draining.set()

    def close(self) -> None:
        """Nothing will happen to any job any more."""
        self._draining.set()
        self.closed = True

    async def pause(self, seconds: float) -> None:
        """Wait, but no longer than until draining begins."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._draining.wait(), seconds)


class _Watched:
    """A job that is watched: who waits for its events, and the last of them, without gaps, so that they are not read
    for each watcher."""

    def __init__(self) -> None:
        self.news: set[asyncio.Event] = set()
        self._last: list[JobEvent] = []

    def add(self, event: JobEvent) -> None:
        """Take in an event that was stored, and wake the watchers."""
        if self._last and event.sequence != self._last[-1].sequence + 1:
            # Others were stored without the journal: they are in the database.
            self._last.clear()
        else:
            self._last.append(event)
            if len(self._last) > 2 * _AT_HAND:
                del self._last[:_AT_HAND]
        self.wake()

    def after(self, sequence: int) -> list[JobEvent] | None:
        """Return the events with a greater number, or None where those are not all at hand."""
        if not self._last or sequence + 1 < self._last[0].sequence:
            return None
        return self._last[sequence + 1 - self._last[0].sequence :]

    def wake(self) -> None:
        """Let the watchers look."""
        for news in self.news:
            news.set()


class Journal:
    """Stores events and wakes the watchers of their jobs. Thread: belongs to one event loop."""

    def __init__(self, store: JobStore, metrics: Metrics, lifecycle: Lifecycle, *, retry_s: float = RETRY_S) -> None:
        self.store = store
        self._metrics = metrics
        self._lifecycle = lifecycle
        self._retry_s = retry_s
        self._watched: dict[str, _Watched] = {}
        self._told: set[asyncio.Event] = set()

    async def create(self, job: JobRecord, *, request_id: str, admit: AdmitJob | None = None) -> JobRecord:
        """Store a new job, or return the one that the same earlier request made. `admit` may refuse a new one."""
        record, is_new = await self.store.create(job, request_id=request_id, admit=admit)
        if is_new:
            self._count(record, None)
            self._tell()
        return record

    async def move(
        self, job: JobRecord, state: JobState, *, reason: str = "", message: str = "", **fields: Any
    ) -> JobRecord:
        """Change the job's state; `fields` as for `JobStore.move`. Raises WrongJobState when the state machine does not
        allow it."""
        attempt = int(fields.get("attempt", job.attempt))
        change = StateChanged(job_state=state.value, reason=reason, message=message, attempt=attempt)
        record, before, event = await self.store.move(job.job_id, change, **fields)
        self._count(record, before)
        if reason == RESTARTED:
            self._metrics.on_worker_restart(record.last_failure.partition("@")[0])
        self._pass_on(event)
        return record

    async def append(self, job_id: str, payload: Payload, **fields: Any) -> None:
        """Store an event of a running attempt, however long that has to wait."""
        await self.retry_until_stored(lambda: self.append_now(job_id, payload, **fields))

    async def append_now(self, job_id: str, payload: Payload, **fields: Any) -> None:
        """Store an event. Raises DiskFull or DatabaseUnavailable."""
        record, event = await self.store.append(job_id, payload, **fields)
        if not record.box:
            self._metrics.on_payload(record, payload)
        self._pass_on(event)

    async def mirror(
        self, job_id: str, events: Sequence[tuple[int, float, Payload]], **fields: Any
    ) -> tuple[JobRecord, JobRecord | None]:
        """Store what has become of a job in another box: events by their numbers there, and fields of the job. Return
        the job as it is now, and as it was. Raises as `append_now`."""
        before = await self.store.get(job_id)
        record, stored = await self.store.mirror(job_id, events, fields)
        for event in stored:
            self._pass_on(event)
        if not stored:
            self._tell()
        return record, before

    async def retry_until_stored(self, call: Callable[[], Awaitable[Result]]) -> Result:
        """Repeat `call` while the database cannot be used. Raises DiskFull or DatabaseUnavailable when draining
        begins."""
        # A worker that the daemon does not read from blocks at its pipe and loses nothing. So a full disk or a long
        # write of another process costs a training run time, never its steps.
        while True:
            try:
                return await call()
            except (DiskFull, DatabaseUnavailable) as error:
                if self._lifecycle.draining:  # the next daemon settles the job
                    raise
                log.error("the journal waits for the database", why=error.message, retry_s=self._retry_s)
                await self._lifecycle.pause(self._retry_s)

    async def follow(self, job_id: str, after: int) -> AsyncIterator[JobEvent]:
        """Yield events with a greater number as they come, to the last one of an ended job. Raises Draining on
        shutdown."""
        news = asyncio.Event()
        may_have_ended = True
        with self.watching(job_id, news):
            while True:
                # Both before the read, so that what is stored during it is read in the next turn.
                news.clear()
                is_closed = self._lifecycle.closed
                events = await self.after(job_id, after)
                for event in events:
                    yield event
                    after = event.sequence
                    # Not only the last one: an ended job gets messages too, such as of the deletion of its checkpoints.
                    may_have_ended |= isinstance(event.payload, StateChanged) and event.payload.job_state in ENDED
                if may_have_ended:  # the job itself is read only then: hundreds may watch every step
                    job = await self.store.get(job_id)
                    if job is None or (job.job_state in ENDED and after >= job.last_sequence):
                        return
                    may_have_ended = False
                if events:
                    continue
                if is_closed:
                    raise Draining("the daemon is shutting down; the job continues when it is back", retry_after_s=2.0)
                await news.wait()

    @contextmanager
    def watching(self, job_id: str, news: asyncio.Event) -> Iterator[None]:
        """Set `news` at each event of a job, until the end of the block."""
        watched = self._watched.setdefault(job_id, _Watched())
        watched.news.add(news)
        try:
            yield
        finally:
            watched.news.discard(news)
            if not watched.news:
                del self._watched[job_id]

    async def after(self, job_id: str, sequence: int) -> Sequence[JobEvent]:
        """Return the next events with a greater number: not read for each of those who are `watching` the job."""
        watched = self._watched.get(job_id)
        at_hand = watched.after(sequence) if watched is not None else None
        return await self.store.events_after(job_id, sequence, _BATCH) if at_hand is None else at_hand

    @contextmanager
    def told(self, news: asyncio.Event) -> Iterator[None]:
        """Set `news` whenever something of any job was stored, until the end of the block."""
        self._told.add(news)
        try:
            yield
        finally:
            self._told.discard(news)

    def forget(self, job_id: str, counts: Mapping[str, int]) -> None:
        """Show nothing more of a job that was deleted, and the number of jobs by state without it."""
        self._metrics.forget(job_id)
        self._metrics.set_jobs(counts)
        self._tell()

    def end_watches(self) -> None:
        """End every watch with Draining, once each has what is stored. Call it after `Lifecycle.close`."""
        for watched in self._watched.values():
            watched.wake()

    def _count(self, job: JobRecord, before: JobState | None) -> None:
        # One that is in another box is counted there.
        if not job.box:
            self._metrics.on_job_state(job, None if before is None else before.value)

    def _tell(self) -> None:
        for news in self._told:
            news.set()

    def _pass_on(self, event: JobEvent) -> None:
        self._tell()
        if (watched := self._watched.get(event.job_id)) is not None:
            watched.add(event)

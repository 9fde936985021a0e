"""The queue: one job at a time on the device, first come, first served, from the daemon's start to its drain. Also settles what the last
daemon left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import structlog

from horizon_server.errors import DatabaseUnavailable, DiskFull, HorizonError, WrongJobState
from horizon_server.events import StateChanged, StepDone
from horizon_server.jobs.attempt import Attempt, orphan_pid
from horizon_server.jobs.folders import JobFolders
from horizon_server.jobs.journal import Journal, Lifecycle
from horizon_server.records.job import ON_DEVICE, ORDERED, JobRecord, JobState, Wanted
from horizon_server.telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

DAEMON_DIED = "DAEMON_DIED"
RESUMED = "RESUMED"


@dataclass(kw_only=True, eq=False)
class Scheduler:
    """Runs queued jobs one after the other. Thread: belongs to one event loop."""

    journal: Journal
    metrics: Metrics
    lifecycle: Lifecycle
    folders: JobFolders
    make_attempt: Callable[[JobRecord], Attempt]
    max_attempts: int
    orphan_grace_s: float
    when_idle: Callable[[], Coroutine[Any, Any, None]]
    current: Attempt | None = field(init=False, default=None)
    _news: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _idle: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    def wake(self) -> None:
        """Look at the queue again."""
        self._news.set()

    async def run(self) -> None:
        """Serve the queue until `drain`. An attempt that breaks fails its job, never the queue."""
        while True:
            self._news.clear()
            try:
                first = await self.journal.patiently(lambda: self.journal.store.queued(1))
            except (DiskFull, DatabaseUnavailable):
                return  # draining has begun while the database could not be used
            if self.lifecycle.draining:
                return
            if not first:
                # What is only done when no job waits for the device; a new job ends it at once.
                chore = asyncio.create_task(self.when_idle(), name="idle")
                try:
                    await self._news.wait()
                finally:
                    chore.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await chore
                continue
            self.current = self.make_attempt(first[0])
            self._idle.clear()
            try:
                await self.current.run()
            except WrongJobState:
                log.info("the job left the queue before its turn", job_id=first[0].job_id)
            except HorizonError as error:
                log.error("attempt failed", job_id=first[0].job_id, why=error.message)
                await self._fail(first[0].job_id, error)
            except Exception as error:  # a defect in one attempt must not block the queue of all users
                log.exception("attempt failed", job_id=first[0].job_id)
                await self._fail(first[0].job_id, error)
            finally:
                self.current = None
                self._idle.set()

    async def drain(self, timeout_s: float) -> None:
        """Take no more jobs, ask the running one to checkpoint, and kill it when it takes too long."""
        self.lifecycle.drain()
        attempt = self.current
        self.wake()
        if attempt is None:
            return
        await attempt.stop(Wanted.DRAIN)
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            log.warning("the worker did not stop in time and is killed", timeout_s=timeout_s)
            attempt.kill()
            await self._idle.wait()

    async def recover(self) -> None:
        """Settle jobs that were on the device when the daemon died: wait for their workers, then queue, pause or cancel them."""
        try:
            for job in await self.journal.patiently(lambda: self.journal.store.in_states(sorted(ON_DEVICE))):
                folder = self.folders.log(job.job_id, job.attempt).parent
                # A worker whose daemon died sees the end of its order pipe, checkpoints and stops; only when it takes too long is it
                # killed. So a job is never run twice at the same time, and continues from its newest checkpoint.
                deadline = time.monotonic() + self.orphan_grace_s
                while (pid := orphan_pid(folder)) is not None:
                    if time.monotonic() >= deadline:
                        log.warning(
                            "a worker of the last daemon did not stop and is killed", job_id=job.job_id, pid=pid
                        )
                        os.kill(pid, signal.SIGKILL)
                    await asyncio.sleep(0.1)
                await self.journal.patiently(lambda job_id=job.job_id: self._settle(job_id))  # type: ignore[misc]
        except (DiskFull, DatabaseUnavailable):
            log.error("jobs of the last daemon are not settled; the next daemon does it")

    async def _settle(self, job_id: str) -> None:
        job = await self.journal.store.get(job_id)  # again: a user may have asked for a stop since
        assert job is not None, job_id
        log.info("found a job whose daemon died", job_id=job_id, job_state=job.job_state.value)
        if job.job_state is JobState.STOPPING and job.wanted in ORDERED:
            target, reason, message = ORDERED[job.wanted]
        elif await self._deaths(job_id) + 1 >= self.max_attempts:  # a job that kills its daemon must not do so forever
            target, reason = JobState.FAILED, DAEMON_DIED
            times = f"{self.max_attempts} times in a row" if self.max_attempts > 1 else "once"
            message = f"the daemon died {times} under this job without progress; look at its log, then run: horizon job resume"
        else:
            target, reason = JobState.QUEUED, DAEMON_DIED
            message = "the daemon died and is back; the job continues from its newest checkpoint"
        await self.journal.move(job, target, reason=reason, message=message)
        if target is JobState.QUEUED:
            self.metrics.on_worker_restart(DAEMON_DIED)

    async def _deaths(self, job_id: str) -> int:
        """Return how many times in a row the daemon died under this job: since a user last queued it, and since it last made progress."""
        # A step that is only done again is no progress: a job that kills its daemon at the same step each time must not do so forever.
        deaths, after, furthest, furthest_at_death = 0, 0, 0, 0
        while events := await self.journal.store.events_after(job_id, after, 1000):
            after = events[-1].sequence
            for payload in (event.payload for event in events):
                if isinstance(payload, StepDone):
                    furthest = max(furthest, payload.step)
                    if furthest > furthest_at_death:
                        deaths = 0
                elif isinstance(payload, StateChanged) and payload.reason == DAEMON_DIED:
                    deaths, furthest_at_death = deaths + 1, furthest
                elif isinstance(payload, StateChanged) and payload.reason == RESUMED:
                    deaths = 0
        return deaths

    async def _fail(self, job_id: str, error: Exception) -> None:
        """Fail a job whose attempt broke. While draining, a database that cannot be written leaves that to the next daemon."""
        if isinstance(error, HorizonError):
            reason, message = error.reason, error.message
        else:
            reason, message = "INTERNAL", f"the daemon could not carry out the attempt: {type(error).__name__}: {error}"

        async def move() -> None:
            job = await self.journal.store.get(job_id)
            if job is not None and job.job_state in ON_DEVICE:
                await self.journal.move(job, JobState.FAILED, reason=reason, message=message)

        try:
            await self.journal.patiently(move)
        except (DiskFull, DatabaseUnavailable):
            log.error("the failure cannot be stored; the next daemon settles the job", job_id=job_id)

"""The queue: first come, first served, one job on the device at a time. Also what happens to jobs whose daemon died."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from horizon_server.errors import DiskFull, HorizonError, WrongJobState
from horizon_server.events import StateChanged
from horizon_server.jobs.attempt import Attempt, orphan_pid
from horizon_server.jobs.folders import JobFolders
from horizon_server.jobs.journal import Journal
from horizon_server.jobs.ports import JobObserver
from horizon_server.records.job import JobRecord, JobState

log = structlog.get_logger(__name__)

DAEMON_DIED = "DAEMON_DIED"
DISK_FULL_WAIT_S = 5.0
"""How often a queue that stands still for want of disk space looks again."""


class Scheduler:
    """Runs queued jobs one after the other.

    Thread: belongs to one event loop.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        observer: JobObserver,
        folders: JobFolders,
        make_attempt: Callable[[JobRecord], Attempt],
        max_attempts: int,
        orphan_grace_s: float,
        when_idle: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self._journal = journal
        self._observer = observer
        self._folders = folders
        self._make_attempt = make_attempt
        self._max_attempts = max_attempts
        self._orphan_grace_s = orphan_grace_s
        self._when_idle = when_idle
        self._news = asyncio.Event()
        self._draining = False
        self._idle = asyncio.Event()
        self.current: Attempt | None = None

    def wake(self) -> None:
        """Look at the queue again."""
        self._news.set()

    async def run(self) -> None:
        """Serve the queue until `drain`. An attempt that breaks fails its job, never the queue."""
        while True:
            self._news.clear()
            queued = await self._journal.store.in_states([JobState.QUEUED])
            if self._draining:
                return
            if not queued:
                await self._idle_until_news()
                continue
            self.current = self._make_attempt(queued[0])
            self._idle.clear()
            try:
                await self.current.run()
            except WrongJobState:
                log.info("the job left the queue before its turn", job_id=queued[0].job_id)
            except Exception as error:  # a defect in one attempt must not stop everybody's queue
                log.exception("attempt broke", job_id=queued[0].job_id)
                await self._fail_when_noted(queued[0].job_id, error)
            finally:
                self.current = None
                self._idle.set()

    async def _idle_until_news(self) -> None:
        """Do what is only done when nobody waits for the device; a job ends it at once."""
        chore = asyncio.create_task(self._when_idle(), name="idle")
        try:
            await self._news.wait()
        finally:
            chore.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await chore

    async def drain(self, timeout_s: float) -> None:
        """Take no more jobs, ask the running one to checkpoint, and kill it when it takes too long."""
        self._draining = True
        attempt = self.current
        self.wake()
        if attempt is None:
            return
        await attempt.stop("drain")
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            log.warning("the worker did not stop in time and is killed", timeout_s=timeout_s)
            attempt.kill()
            await self._idle.wait()

    async def recover(self) -> None:
        """Settle jobs that were on the device when the daemon died: wait for their workers, then queue, pause or cancel them.

        A worker whose daemon died sees the end of its control pipe, checkpoints and stops; only when it takes too long is it killed.
        So a job is never run twice at the same time, and goes on from its newest checkpoint.
        """
        on_device = (JobState.PREPARING, JobState.STARTING, JobState.RUNNING, JobState.STOPPING)
        for job in await self._journal.store.in_states(on_device):
            await self._end_orphan(job)
            now = await self._journal.store.get(job.job_id)
            assert now is not None
            await self._settle(now)

    async def _end_orphan(self, job: JobRecord) -> None:
        folder = self._folders.attempt(job.job_id, job.attempt)
        deadline = time.monotonic() + self._orphan_grace_s
        while (pid := orphan_pid(folder)) is not None:
            if time.monotonic() >= deadline:
                log.warning("a worker of the last daemon did not stop and is killed", job_id=job.job_id, pid=pid)
                os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.1)

    async def _settle(self, job: JobRecord) -> None:
        log.info("found a job whose daemon died", job_id=job.job_id, job_state=job.job_state.value)
        if job.job_state is JobState.STOPPING and job.wanted == "cancel":
            await self._journal.move(
                job, JobState.CANCELLED, reason="CANCELLED", message="cancelled by a user", wanted=""
            )
            return
        if job.job_state is JobState.STOPPING and job.wanted == "pause":
            await self._journal.move(job, JobState.PAUSED, reason="PAUSED", message="paused by a user", wanted="")
            return
        if await self._deaths(job) + 1 >= self._max_attempts:
            message = (
                f"the daemon died {self._max_attempts} times under this job; look at its log, then resume it by hand"
            )
            await self._journal.move(job, JobState.FAILED, reason=DAEMON_DIED, message=message, ended_s=time.time())
            return
        message = "the daemon died and is back; the job goes on from its newest checkpoint"
        await self._journal.move(job, JobState.QUEUED, reason=DAEMON_DIED, message=message, wanted="")
        self._observer.on_worker_restart(DAEMON_DIED)

    async def _deaths(self, job: JobRecord) -> int:
        """How often this job was found like this since a user last queued it."""
        deaths, after = 0, 0
        while events := await self._journal.store.events_after(job.job_id, after, 1000):
            after = events[-1].sequence
            changes = [event.payload for event in events if isinstance(event.payload, StateChanged)]
            for change in changes:
                if change.reason == DAEMON_DIED:
                    deaths += 1
                elif change.job_state == JobState.QUEUED and change.reason == "RESUMED":
                    deaths = 0
        return deaths

    async def _fail_when_noted(self, job_id: str, error: Exception) -> None:
        """Fail a job. With a full disk that cannot be noted: the queue then waits until it can, or until the daemon drains."""
        while not await self._is_failed(job_id, error):
            await self._pause()
            if self._draining:
                return
        if isinstance(error, DiskFull):
            await self._pause()

    async def _is_failed(self, job_id: str, error: Exception) -> bool:
        try:
            await self._fail(job_id, error)
        except DiskFull as still_full:
            log.error("the queue stands still", job_id=job_id, why=still_full.message)
            return False
        return True

    async def _pause(self) -> None:
        if self._draining:
            return
        self._news.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), DISK_FULL_WAIT_S)

    async def _fail(self, job_id: str, error: Exception) -> None:
        job = await self._journal.store.get(job_id)
        if job is None or job.job_state not in (
            JobState.PREPARING,
            JobState.STARTING,
            JobState.RUNNING,
            JobState.STOPPING,
        ):
            return
        reason, message = "INTERNAL", f"the daemon could not carry out the attempt: {type(error).__name__}: {error}"
        if isinstance(error, HorizonError):
            reason, message = error.reason, error.message
        await self._journal.move(job, JobState.FAILED, reason=reason, message=message, ended_s=time.time(), wanted="")

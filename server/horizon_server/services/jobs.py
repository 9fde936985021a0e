"""What callers can do with jobs: submit, look, stop, resume, watch, read logs and checkpoints. Authorises every call."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Collection
from pathlib import Path

from horizon_server.errors import (
    DoesNotFit,
    Draining,
    InvalidSpec,
    NotAllowed,
    NotAvailableYet,
    NotFound,
    WrongJobState,
)
from horizon_server.events import JobEvent
from horizon_server.jobs.folders import JobFolders
from horizon_server.jobs.journal import Journal
from horizon_server.jobs.log_reader import read_log
from horizon_server.jobs.ports import Resources
from horizon_server.jobs.scheduler import Scheduler
from horizon_server.planning.planner import Planner
from horizon_server.records.account import Principal
from horizon_server.records.job import ENDED, ON_DEVICE, CheckpointRecord, JobRecord, JobState
from horizon_server.records.plan import JobPlan
from horizon_server.services.access import require_change, require_create, require_visible
from horizon_server.spec import JobSpec

MAX_PAGE_SIZE = 1000
Jobs = list[JobRecord]
Checkpoints = list[CheckpointRecord]


class JobService:
    """The use cases around jobs.

    Thread: belongs to one event loop; blocking file work goes to threads.
    """

    def __init__(
        self, journal: Journal, *, scheduler: Scheduler, resources: Resources, planner: Planner, folders: JobFolders
    ) -> None:
        self._journal = journal
        self._scheduler = scheduler
        self._resources = resources
        self._planner = planner
        self._folders = folders
        self._draining = False

    def start_draining(self) -> None:
        """Take no more jobs."""
        self._draining = True

    async def submit(self, principal: Principal, *, request_id: str, spec: JobSpec) -> JobRecord:
        """Queue a job, or return the one that the same earlier request made.

        Raises:
            NotFound: when model or dataset do not exist for the caller.
            DoesNotFit: when the memory plan exceeds the node, with the numbers.
            RequestIdReused: when the id came with another spec.
        """
        require_create(principal)
        if self._draining:
            raise Draining(
                "the daemon is shutting down and takes no new jobs; submit again in a moment", retry_after_s=5
            )
        spec = self._owned(principal, spec)
        model_id, folder = await self._resources.model(principal, spec.model)
        dataset = await self._resources.dataset(principal, spec.dataset)
        evaluation = await self._resources.dataset(principal, spec.eval_dataset) if spec.eval_dataset else None
        plan = await asyncio.to_thread(self._planner.plan, spec, folder)
        if not plan.fits:
            raise DoesNotFit(plan.message)
        job = JobRecord(
            job_id="job_" + secrets.token_hex(6),
            owner=principal.name,
            spec=spec,
            model_id=model_id,
            dataset_id=dataset.dataset_id,
            eval_dataset_id=evaluation.dataset_id if evaluation else "",
            job_state=JobState.QUEUED,
            created_s=time.time(),
            plan=plan,
        )
        stored = await self._journal.create(job, request_id=request_id)
        self._scheduler.wake()
        return await self._placed(stored)

    async def plan(self, principal: Principal, spec: JobSpec) -> tuple[JobSpec, JobPlan]:
        """Return the spec with defaults and its memory plan; fitting or not, nothing is changed.

        Raises:
            NotFound: when model or dataset do not exist for the caller.
        """
        spec = self._owned(principal, spec)
        _, folder = await self._resources.model(principal, spec.model)
        return spec, await asyncio.to_thread(self._planner.plan, spec, folder)

    async def get(self, principal: Principal, key: str) -> JobRecord:
        """Return one job by id, or by name where that names one.

        Raises:
            NotFound: when there is none, or it is not the caller's.
        """
        return await self._placed(await self._find(principal, key))

    async def list(
        self, principal: Principal, *, page_size: int = 100, page_token: str = "", states: Collection[JobState] = ()
    ) -> tuple[Jobs, str]:
        """Return a page of the caller's jobs, newest first, and the token of the next page (empty on the last)."""
        size = min(page_size or 100, MAX_PAGE_SIZE)
        owner = None if principal.sees_all else principal.name
        rows = await self._journal.store.page(
            owner=owner, states=sorted(states), before=_page_number(page_token), limit=size + 1
        )
        token = _page_token(rows[size - 1][0]) if len(rows) > size else ""
        queue = await self._queue_positions()
        return [dataclasses.replace(job, queue_position=queue.get(job.job_id, 0)) for _, job in rows[:size]], token

    async def queue(self) -> Jobs:
        """Return all jobs on the device and then all queued ones in their order; the caller shows strangers' jobs without detail."""
        store = self._journal.store
        running = await store.in_states(sorted(ON_DEVICE))
        queued = await store.in_states([JobState.QUEUED])
        return running + [dataclasses.replace(job, queue_position=i) for i, job in enumerate(queued, 1)]

    async def cancel(self, principal: Principal, key: str) -> JobRecord:
        """End a job; one that has ended already stays as it is.

        Raises:
            NotFound: when there is none, or it is not the caller's.
            NotAllowed: when the caller may not change it.
        """
        job = await self._change(principal, key)
        if job.job_state in ENDED:
            return job
        if job.job_state in ON_DEVICE and await self._stop_running(job, "cancel"):
            return await self.get(principal, job.job_id)
        if job.job_state in ON_DEVICE:
            return await self._mark(job, "cancel")
        return await self._journal.move(
            job, JobState.CANCELLED, reason="CANCELLED", message="cancelled by a user", ended_s=time.time()
        )

    async def pause(self, principal: Principal, key: str) -> JobRecord:
        """Checkpoint a job and take it off the device, or out of the queue.

        Raises:
            WrongJobState: when it has ended.
        """
        job = await self._change(principal, key)
        if job.job_state is JobState.PAUSED:
            return job
        if job.job_state in ON_DEVICE and await self._stop_running(job, "pause"):
            return await self.get(principal, job.job_id)
        if job.job_state in ON_DEVICE:
            return await self._mark(job, "pause")
        message = "paused by a user; resume it with: horizon job resume"
        return await self._journal.move(job, JobState.PAUSED, reason="PAUSED", message=message)

    async def resume(self, principal: Principal, key: str) -> JobRecord:
        """Queue a paused or failed job again; it goes on from its newest checkpoint.

        Raises:
            WrongJobState: when it is neither paused nor failed.
        """
        job = await self._change(principal, key)
        if job.job_state not in (JobState.PAUSED, JobState.FAILED):
            raise WrongJobState(f"job {job.job_id} is {job.job_state}; only a PAUSED or FAILED job can be resumed")
        job = await self._journal.move(
            job, JobState.QUEUED, reason="RESUMED", message="resumed by a user", wanted="", ended_s=0.0
        )
        self._scheduler.wake()
        return await self._placed(job)

    async def update(self, principal: Principal, key: str, *, priority: int | None) -> JobRecord:
        """Change a job's priority.

        Raises:
            NotAvailableYet: always, in this version.
        """
        await self._change(principal, key)
        raise NotAvailableYet("the priority of a job cannot be changed yet: the queue is first come, first served")

    async def watch(self, principal: Principal, key: str, after_sequence: int = 0) -> AsyncIterator[JobEvent]:
        """Yield a job's events from a number on, and end after the last one of an ended job.

        Raises:
            Draining: when the daemon shuts down meanwhile.
        """
        job = await self._find(principal, key)
        async for event in self._journal.follow(job.job_id, after_sequence):
            yield event

    async def logs(
        self, principal: Principal, key: str, *, attempt: int = 0, offset: int = 0, follow: bool = False
    ) -> AsyncIterator[tuple[int, bytes]]:
        """Yield (offset, bytes) pieces of an attempt's log; `follow` waits for more until the attempt has ended."""
        job = await self._find(principal, key)

        async def going_on() -> bool:
            now = await self._journal.store.get(job.job_id)
            same = now is not None and attempt in (0, now.attempt)
            return same and now is not None and now.job_state in ON_DEVICE and not self._draining

        path = self._folders.log(job.job_id, attempt or job.attempt)
        async for piece in read_log(path, offset=offset, going_on=going_on if follow else None):
            yield piece

    async def checkpoints(self, principal: Principal, key: str) -> Checkpoints:
        """Return a job's complete checkpoints, oldest first."""
        job = await self._find(principal, key)
        return await asyncio.to_thread(self._folders.checkpoints(job.job_id).all)

    async def checkpoint_file(self, principal: Principal, key: str, step: int, path: str) -> Path:
        """Return where one file of a checkpoint lies.

        Raises:
            NotFound: when the checkpoint or the file does not exist.
        """
        job = await self._find(principal, key)
        return await asyncio.to_thread(self._folders.checkpoints(job.job_id).file, step, path)

    async def delete_checkpoint(self, principal: Principal, key: str, step: int) -> None:
        """Remove one checkpoint.

        Raises:
            WrongJobState: when a job that has not ended would resume from it.
        """
        job = await self._change(principal, key)
        checkpoints = self._folders.checkpoints(job.job_id)
        newest = await asyncio.to_thread(checkpoints.newest)
        if job.job_state not in ENDED and newest is not None and newest == checkpoints.of_step(step):
            raise WrongJobState(f"job {job.job_id} has not ended and would go on from step {step}; cancel it first")
        await asyncio.to_thread(checkpoints.delete, step)

    async def in_use(self, resource_id: str) -> str | None:
        """Return the id of a job that has not ended and needs this dataset or model."""
        alive = [state for state in JobState if state not in ENDED]
        for job in await self._journal.store.in_states(alive):
            if resource_id in (job.model_id, job.dataset_id, job.eval_dataset_id):
                return job.job_id
        return None

    def _owned(self, principal: Principal, spec: JobSpec) -> JobSpec:
        """Fill in the project and refuse what this version cannot carry out, rather than ignore it."""
        if spec.priority != 0:
            text = "priority must be 0: the queue is first come, first served in this version"
            raise InvalidSpec.of("priority", text)
        if spec.project not in ("", principal.project) and principal.role != "admin":
            raise NotAllowed(f"project {spec.project} is not yours; leave project out or set it to {principal.project}")
        return spec.model_copy(update={"project": spec.project or principal.project})

    async def _find(self, principal: Principal, key: str) -> JobRecord:
        job = await self._journal.store.get(key)
        if job is not None:
            require_visible(principal, job.owner, f"job {key}")
            return job
        named = await self._journal.store.find_by_name(key, principal.name)
        if not named and principal.sees_all:
            named = await self._journal.store.find_by_name(key, None)
        if not named:
            raise NotFound(f"job {key} does not exist, or is not yours; see: horizon job list")
        if len(named) > 1:
            ids = ", ".join(job.job_id for job in named[:5])
            text = f"{len(named)} jobs are named {key}; use an id: {ids}"
            raise InvalidSpec.of("job_id", text)
        return named[0]

    async def _change(self, principal: Principal, key: str) -> JobRecord:
        job = await self._find(principal, key)
        require_change(principal, job.owner, f"job {job.job_id}")
        return job

    async def _stop_running(self, job: JobRecord, wanted: str) -> bool:
        attempt = self._scheduler.current
        if attempt is None or attempt.job.job_id != job.job_id:
            return False
        await attempt.stop(wanted)
        return True

    async def _mark(self, job: JobRecord, wanted: str) -> JobRecord:
        """Note what is wanted of a job whose daemon died and that is not settled yet; the recovery carries it out."""
        if job.job_state is JobState.STOPPING:
            return await self._journal.store.set(job.job_id, wanted=wanted)
        return await self._journal.move(job, JobState.STOPPING, reason=wanted.upper(), wanted=wanted)

    async def _placed(self, job: JobRecord) -> JobRecord:
        if job.job_state is not JobState.QUEUED:
            return job
        return dataclasses.replace(job, queue_position=(await self._queue_positions()).get(job.job_id, 0))

    async def _queue_positions(self) -> dict[str, int]:
        queued = await self._journal.store.in_states([JobState.QUEUED])
        return {job.job_id: i for i, job in enumerate(queued, 1)}


def _page_token(number: int) -> str:
    return base64.urlsafe_b64encode(str(number).encode()).decode()


def _page_number(token: str) -> int:
    if not token:
        return 0
    try:
        return int(base64.urlsafe_b64decode(token.encode()))
    except ValueError as error:
        text = "page_token must be one that an earlier answer gave as next_page_token"
        raise InvalidSpec.of("page_token", text) from error

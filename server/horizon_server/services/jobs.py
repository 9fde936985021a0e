"""What callers can do with jobs: submit, list, stop, resume, watch, read logs and checkpoints. Authorises every call."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Collection, Sequence
from pathlib import Path

from horizon_server.db.jobs import Figures
from horizon_server.errors import DoesNotFit, Draining, InvalidSpec, NotAllowed, NotFound, WrongJobState
from horizon_server.events import JobEvent
from horizon_server.jobs.folders import JobFolders, read_log
from horizon_server.jobs.journal import Journal
from horizon_server.jobs.lifecycle import Lifecycle
from horizon_server.jobs.scheduler import RESUMED, Scheduler
from horizon_server.planning.planner import Planner
from horizon_server.records.account import Principal
from horizon_server.records.job import (
    CANCELLED,
    CANCELLED_MESSAGE,
    ENDED,
    ON_DEVICE,
    PAUSED,
    PAUSED_MESSAGE,
    CheckpointRecord,
    JobRecord,
    JobState,
    Wanted,
)
from horizon_server.records.plan import JobPlan
from horizon_server.services.access import require_change, require_create, require_visible
from horizon_server.services.inputs import NodeResources
from horizon_server.services.pushed import MAX_PAGE_SIZE, page_limit
from horizon_server.services.turns import UserTurns
from horizon_server.spec import JobSpec

_ID_PREFIX = "job_"
_MAX_NUMBER = 2**63 - 1
"""Largest number that the database can compare with."""
_MAX_OFFSET = 2**62
"""No file is as long."""
Jobs = list[JobRecord]
"""Spelled here, as `list` is a method of the service."""
Checkpoints = list[CheckpointRecord]


class JobService:
    """The use cases around jobs.

    Thread: belongs to one event loop; blocking file work goes to threads.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        scheduler: Scheduler,
        lifecycle: Lifecycle,
        resources: NodeResources,
        planner: Planner,
        folders: JobFolders,
        turns: UserTurns,
    ) -> None:
        self._journal = journal
        self._scheduler = scheduler
        self._lifecycle = lifecycle
        self._resources = resources
        self._planner = planner
        self._folders = folders
        self._turns = turns

    async def submit(self, principal: Principal, *, request_id: str, spec: JobSpec) -> JobRecord:
        """Queue a job, or return the one that the same earlier request made.

        Raises:
            NotFound: when model or dataset do not exist for the caller.
            DoesNotFit: when the memory plan exceeds the node, with the numbers.
            RequestIdReused: when the id came with another spec.
            Draining: when the daemon is shutting down.
        """
        require_create(principal)
        if self._lifecycle.draining:
            raise Draining(
                "the daemon is shutting down and takes no new jobs; submit again in a moment", retry_after_s=5
            )
        spec = self._owned(principal, spec)
        async with self._turns.of(principal.name):
            model_id, folder = await self._resources.model(principal, spec.model)
            dataset = await self._resources.dataset(principal, spec.dataset)
            evaluation = await self._resources.dataset(principal, spec.eval_dataset) if spec.eval_dataset else None
            plan = await asyncio.to_thread(self._planner.plan, spec, folder)
            if not plan.fits:
                raise DoesNotFit(plan.message)
            job = JobRecord(
                job_id=_ID_PREFIX + secrets.token_hex(6),
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
        return stored

    async def plan(self, principal: Principal, spec: JobSpec) -> tuple[JobSpec, JobPlan]:
        """Return the spec with defaults and its memory plan; fitting or not, nothing is changed.

        Raises:
            NotFound: when model or dataset do not exist for the caller.
        """
        spec = self._owned(principal, spec)
        async with self._turns.of(principal.name):
            _, folder = await self._resources.model(principal, spec.model)
            return spec, await asyncio.to_thread(self._planner.plan, spec, folder)

    async def get(self, principal: Principal, key: str) -> JobRecord:
        """Return one job by its id, by the start of it where only one id starts so, or by name: the newest of that name.

        Raises:
            NotFound: when there is none, or it is not the caller's.
        """
        async with self._turns.of(principal.name):
            return await self._find(principal, key)

    async def list(
        self, principal: Principal, *, page_size: int = 100, page_token: str = "", states: Collection[JobState] = ()
    ) -> tuple[Jobs, str]:
        """Return a page of the caller's jobs, newest first, and the token of the next page (empty on the last)."""
        size = page_limit(page_size)
        owner = None if principal.sees_all else principal.name
        before = 0
        if page_token:
            with contextlib.suppress(ValueError):
                before = int(base64.urlsafe_b64decode(page_token.encode()))
            if not 0 < before <= _MAX_NUMBER:
                raise InvalidSpec.of(
                    "page_token", "page_token must be one that an earlier answer gave as next_page_token"
                )
        async with self._turns.of(principal.name):
            rows = await self._journal.store.page(owner=owner, states=sorted(states), before=before, limit=size + 1)
        more = len(rows) > size
        token = base64.urlsafe_b64encode(str(rows[size - 1][0]).encode()).decode() if more else ""
        return [job for _, job in rows[:size]], token

    async def queue(self) -> Jobs:
        """Return the jobs on the device and then the first of the queue in their order, of all users: the caller hides what
        other users' jobs are about."""
        store = self._journal.store
        return await store.in_states(sorted(ON_DEVICE)) + await store.queued(MAX_PAGE_SIZE)

    async def cancel(self, principal: Principal, key: str) -> JobRecord:
        """End a job; one that has ended already stays as it is.

        Raises:
            NotFound: when there is none, or it is not the caller's.
            NotAllowed: when the caller may not change it.
        """
        job = await self._change(principal, key)
        if job.job_state in ENDED:
            return job
        if job.job_state in ON_DEVICE:
            return await self._stop(job, Wanted.CANCEL)
        return await self._journal.move(
            job, JobState.CANCELLED, reason=CANCELLED, message=CANCELLED_MESSAGE, ended_s=time.time()
        )

    async def pause(self, principal: Principal, key: str) -> JobRecord:
        """Checkpoint a job and take it off the device, or out of the queue.

        Raises:
            WrongJobState: when it has ended.
        """
        job = await self._change(principal, key)
        if job.job_state is JobState.PAUSED:
            return job
        if job.job_state in ON_DEVICE:
            return await self._stop(job, Wanted.PAUSE)
        return await self._journal.move(job, JobState.PAUSED, reason=PAUSED, message=PAUSED_MESSAGE)

    async def resume(self, principal: Principal, key: str) -> JobRecord:
        """Put a paused or failed job at the end of the queue; it continues from its newest checkpoint.

        Raises:
            WrongJobState: when it is neither paused nor failed.
        """
        job = await self._change(principal, key)
        if job.job_state not in (JobState.PAUSED, JobState.FAILED):
            raise WrongJobState(f"job {job.job_id} is {job.job_state}; only a PAUSED or FAILED job can be resumed")
        # At its old place it would overtake all who have waited meanwhile; parking cheap jobs would reserve the head of the queue.
        job = await self._journal.move(
            job,
            JobState.QUEUED,
            reason=RESUMED,
            message="resumed by a user",
            requeue=True,
            wanted=Wanted.NOTHING,
            ended_s=0.0,
        )
        self._scheduler.wake()
        return job

    async def watch(self, principal: Principal, key: str, after_sequence: int = 0) -> AsyncGenerator[JobEvent, None]:
        """Yield a job's events from a number on, and end after the last one of an ended job.

        Raises:
            Draining: when the daemon shuts down meanwhile.
        """
        job = await self.get(principal, key)
        async for event in self._journal.follow(job.job_id, after_sequence):
            yield event

    async def figures(self, job: JobRecord, *, names: Sequence[str], after: int, limit: int) -> Sequence[Figures]:
        """Return named figures of the steps and evaluations of a job that the caller was allowed to get."""
        return await self._journal.store.figures_after(job.job_id, after, names, limit)

    async def logs(
        self, principal: Principal, key: str, *, attempt: int = 0, offset: int = 0, follow: bool = False
    ) -> AsyncGenerator[tuple[int, bytes], None]:
        """Yield (offset, bytes) pieces of an attempt's log; `follow` waits for more until the attempt has ended.

        Raises:
            InvalidSpec: when `offset` is beyond every file.
        """
        if not 0 <= offset <= _MAX_OFFSET:
            raise InvalidSpec.of("offset", f"offset is {offset}; it must be from 0 to {_MAX_OFFSET}")
        job = await self.get(principal, key)

        async def grows() -> bool:
            now = await self._journal.store.get(job.job_id)
            same = now is not None and attempt in (0, now.attempt)
            return same and now is not None and now.job_state in ON_DEVICE and not self._lifecycle.draining

        path = self._folders.log(job.job_id, attempt or job.attempt)
        async for piece in read_log(path, offset=offset, grows=grows if follow else None):
            yield piece

    async def checkpoints(self, principal: Principal, key: str) -> Checkpoints:
        """Return a job's complete checkpoints, oldest first."""
        job = await self.get(principal, key)
        return await asyncio.to_thread(self._folders.checkpoints(job.job_id).all)

    async def checkpoint_file(self, principal: Principal, key: str, step: int, path: str) -> Path:
        """Return the path of one file of a checkpoint.

        Raises:
            NotFound: when the checkpoint or the file does not exist.
        """
        job = await self.get(principal, key)
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
            raise WrongJobState(f"job {job.job_id} has not ended and would continue from step {step}; cancel it first")
        await asyncio.to_thread(checkpoints.delete, step)

    async def in_use(self, resource_id: str) -> str | None:
        """Return the id of a job that has not ended and needs this dataset or model."""
        return await self._journal.store.user_of(resource_id)

    def _owned(self, principal: Principal, spec: JobSpec) -> JobSpec:
        """Fill in the project and refuse what this version cannot carry out, rather than ignore it."""
        if spec.priority != 0:
            raise InvalidSpec.of(
                "priority", "priority must be 0: the queue is first come, first served in this version"
            )
        if spec.project not in ("", principal.project) and principal.role != "admin":
            raise NotAllowed(f"project {spec.project} is not yours; leave project out or set it to {principal.project}")
        return spec.model_copy(update={"project": spec.project or principal.project})

    async def _find(self, principal: Principal, key: str) -> JobRecord:
        absent = NotFound(f"job {key!r:.80} does not exist, or is not yours; see: horizon job list")
        if not key.isascii():  # ids and names are, and half a surrogate pair cannot even be looked for
            raise absent
        store = self._journal.store
        job = await store.get(key)
        if job is not None:
            require_visible(principal, job.owner, f"job {key}")
            return job
        named = await store.find_by_name(key, principal.name)
        if not named and principal.sees_all:
            named = await store.find_by_name(key, None)
        if named:
            return named[0]  # of several runs of one spec the newest is meant; the answer carries its id
        if not key.startswith(_ID_PREFIX) or key == _ID_PREFIX:
            raise absent
        found = await store.find_by_prefix(key, None if principal.sees_all else principal.name)
        if not found:
            raise absent
        if len(found) > 1:
            ids = ", ".join(job.job_id for job in found[:5])
            raise InvalidSpec.of("job_id", f"several jobs have an id that starts with {key}; give more of it: {ids}")
        return found[0]

    async def _change(self, principal: Principal, key: str) -> JobRecord:
        job = await self.get(principal, key)
        require_change(principal, job.owner, f"job {job.job_id}")
        return job

    async def _stop(self, job: JobRecord, wanted: Wanted) -> JobRecord:
        """Ask the attempt of a job on the device to stop. Without one the daemon that ran it has died and the job is not settled yet:
        the recovery then carries out what is stored here."""
        attempt = self._scheduler.current
        with contextlib.suppress(WrongJobState):  # it may end while this call is on its way
            if attempt is not None and attempt.job.job_id == job.job_id:
                await attempt.stop(wanted)
            elif job.job_state is JobState.STOPPING:
                await self._journal.store.set(job.job_id, wanted=wanted)
            else:
                await self._journal.move(job, JobState.STOPPING, reason=wanted.name, wanted=wanted)
        now = await self._journal.store.get(job.job_id)
        assert now is not None, job.job_id
        return now

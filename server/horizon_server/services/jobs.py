"""What callers can do with jobs: submit, list, stop, resume, watch, read logs and checkpoints. Authorises every
call."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path

from horizon_server.blobs.concurrency import in_thread
from horizon_server.db.jobs import VisitEvent
from horizon_server.errors import Draining, InUse, InvalidSpec, NotAllowed, NotFound, WrongJobState
from horizon_server.events import EvalDone, JobEvent, Message
from horizon_server.jobs.folders import LOG_PIECE_BYTES, JobFolders, read_log, read_log_part
from horizon_server.jobs.journal import Journal, Lifecycle
from horizon_server.jobs.leases import ReadLeases
from horizon_server.jobs.recovery import FORGOTTEN
from horizon_server.jobs.scheduler import RESUMED, Scheduler
from horizon_server.jobs.tracking import Tracking
from horizon_server.planning.planner import Planner
from horizon_server.records.account import Principal
from horizon_server.records.boxes import Place
from horizon_server.records.job import (
    ANY_JOB,
    BEING_DELETED,
    ENDED,
    RESIDENT,
    CheckpointRecord,
    JobFilter,
    JobRecord,
    JobState,
    LogPart,
    StopRequest,
)
from horizon_server.records.plan import Plan, PlannedMachine
from horizon_server.records.sharing import Outlook
from horizon_server.scheduling.texts import to_owner, with_names
from horizon_server.services.access import may_see, require_change, require_submit
from horizon_server.services.accounts import UserLocks
from horizon_server.services.fleet.boxes import NOTHING, Boxes
from horizon_server.services.fleet.records import SentJob
from horizon_server.services.inputs import Inputs
from horizon_server.services.proposals import Proposal, Proposals
from horizon_server.services.pushed import MAX_PAGE_SIZE, page_limit
from horizon_server.services.quotas import Quotas
from horizon_server.services.starts import Start
from horizon_server.spec import JobSpec

_ID_PREFIX = "job_"
_MAX_NUMBER = 2**63 - 1  # the largest that the database can compare with
MAX_PRIORITY = 100  # the largest that a spec may have
MAX_URGENT_PRIORITY = 1000
MAX_SEARCH = 200
_MAX_OFFSET = 2**62  # no file is as long
MAX_EVALUATIONS = 50
"""Of those whose answers are shown."""
# What a terminal or page could take for more than text.
_NO_CONTROL = dict.fromkeys([*(code for code in range(32) if chr(code) not in "\t\n\r"), 127])
# Where a job's record keeps itself with its outlook, by what callers read.
_SHOWN = "shown with its outlook"
# Spelled here, as `list` is a method of the service.
Jobs = list[JobRecord]
Checkpoints = list[CheckpointRecord]


@dataclass(kw_only=True, eq=False)
class JobService:
    """The use cases around jobs. Thread: belongs to one event loop; blocking file work goes to threads."""

    journal: Journal
    scheduler: Scheduler
    lifecycle: Lifecycle
    resources: Inputs
    planner: Planner
    boxes: Boxes
    folders: JobFolders
    turns: UserLocks
    quotas: Quotas
    tracking: Tracking
    leases: ReadLeases = field(default_factory=ReadLeases)
    proposals: Proposals = field(init=False)

    def __post_init__(self) -> None:
        self.proposals = Proposals(
            resources=self.resources,
            planner=self.planner,
            boxes=self.boxes,
            folders=self.folders,
            quotas=self.quotas,
            trackers=self.tracking.trackers,
            turns=self.turns,
            compiler=self.scheduler.runtime.compiler,
            find_job=self.get,
        )

    async def submit(
        self, principal: Principal, *, request_id: str, spec: JobSpec, notes: Sequence[str] = ()
    ) -> JobRecord:
        """Queue a job, or return the one that the same earlier request made. `notes` are the first messages of a new
        one.

        Raises what `Proposals.of` does, and:
            DoesNotFit: when the memory plan exceeds the node, with the numbers.
            QuotaExceeded: when the user or the project has as many queued jobs as an admin allows.
            RequestIdReused: when the id came with another spec.
            Draining: when the daemon is shutting down.
        """
        require_submit(principal, spec.project or principal.project)
        self.require_open()
        async with self.proposals.of(principal, spec) as proposal:
            proposal.require_fit()
            job = replace(proposal.job, job_id=_ID_PREFIX + secrets.token_hex(6))
            stored = await self._queued(proposal, job, request_id)
        for note in notes if stored.job_id == job.job_id else ():
            await self.journal.append(job.job_id, Message(level="info", text=note))
        self.tracking.follow(stored)
        return stored

    async def take(self, principal: Principal, sent: SentJob) -> JobRecord:
        """Queue a job that the daemon of another machine sends, under the id that it has there; or return it, where it
        was sent before. Raises as `submit` does."""
        self.require_open()
        if (known := await self.journal.store.get(sent.job_id)) is not None:
            return known
        async with self.proposals.of(principal, sent.named_by_ids, stays=True) as proposal:
            proposal.require_fit()
            job = replace(proposal.job, job_id=sent.job_id, spec=sent.spec, priority=sent.priority)
            return await self._queued(proposal, job, str(uuid.uuid4()))

    async def _queued(self, proposal: Proposal, job: JobRecord, request_id: str) -> JobRecord:
        create = partial(self.journal.create, job, request_id=request_id, admit=proposal.admit)
        # One that starts in another box is given its files there.
        start = None if job.box else proposal.start
        stored = await (create() if start is None else self._created_from(start, job, create))
        self.scheduler.wake()
        return stored

    def require_open(self) -> None:
        """Let a new job pass. Raises Draining when the daemon is shutting down."""
        if self.lifecycle.draining:
            raise Draining("the daemon is shutting down and takes no new jobs; try again in a moment", retry_after_s=5)

    async def plan(
        self, principal: Principal, spec: JobSpec, machine: PlannedMachine | None = None, *, config: bytes = b""
    ) -> tuple[JobSpec, Plan, tuple[Place, ...]]:
        """Return the spec with defaults and its memory plan, fitting or not; for this node, or for a machine that is
        asked about. With the `config` of the model, its config.json, neither model nor data need to be here. Where the
        node has a fleet, also what the job would be on each of its machines: the plan is that of the chosen one.

        Raises what `Proposals.of` and `Proposals.plan_config` do.
        """
        if config:
            return *await self.proposals.plan_config(principal, spec, config, machine), ()
        if machine is not None:
            return *await self.proposals.plan_elsewhere(principal, spec, machine), ()
        async with self.proposals.of(principal, spec) as proposal:
            return proposal.job.spec, await proposal.warned(self.quotas), proposal.placed.places

    async def get(self, principal: Principal, key: str) -> JobRecord:
        """Return one job by id, by the start of only one id, or by name: the newest. Raises NotFound, also for jobs of
        others."""
        absent = NotFound.named("job", key)
        if not key.isascii():  # ids and names are, and half a surrogate pair cannot even be looked for
            raise absent
        store = self.journal.store
        async with self.turns.of(principal.name):
            job = await store.get(key)
            # One of another user's is looked for on as if there were none: the same words, and as many queries.
            if job is not None and may_see(principal, job.owner, project=job.project):
                return self._with_outlook(principal, job)
            named = await store.find(principal.name, name=key)
            everyone = None if principal.sees_all else principal.name
            if not named and (principal.sees_all or principal.memberships):
                named = await store.find(everyone, projects=principal.memberships, name=key)
            if named:
                # Of several runs of one spec the newest is meant; the answer carries its id.
                return self._with_outlook(principal, named[0])
            if not key.startswith(_ID_PREFIX) or key == _ID_PREFIX:
                raise absent
            found = await store.find(everyone, projects=principal.memberships, prefix=key)
            if not found:
                raise absent
            if len(found) > 1:
                ids = ", ".join(job.job_id for job in found[:5])
                raise InvalidSpec.of(
                    "job_id", f"several jobs have an id that starts with {key}; give more of it: {ids}"
                )
            return self._with_outlook(principal, found[0])

    async def list(
        self,
        principal: Principal,
        *,
        page_size: int = 100,
        page_token: str = "",
        states: Collection[JobState] = (),
        only: JobFilter = ANY_JOB,
    ) -> tuple[Jobs, str]:
        """Return a page of the jobs that the caller may see, newest first, and the token of the next page (empty on the
        last)."""
        size = page_limit(page_size)
        if len(only.search) > MAX_SEARCH:
            raise InvalidSpec.of("search", f"search has {len(only.search)} characters; the maximum is {MAX_SEARCH}")
        owner = None if principal.sees_all else principal.name
        before = 0
        if page_token:
            with contextlib.suppress(ValueError):
                before = int(base64.urlsafe_b64decode(page_token.encode()))
            if not 0 < before <= _MAX_NUMBER:
                raise InvalidSpec.of(
                    "page_token", "page_token must be one that an earlier answer gave as next_page_token"
                )
        async with self.turns.of(principal.name):
            rows = await self.journal.store.page(
                owner=owner,
                projects=principal.memberships,
                states=sorted(states),
                only=only,
                before=before,
                limit=size + 1,
            )
        more = len(rows) > size
        token = _page_token(rows[size - 1][0]) if more else ""
        return [self._with_outlook(principal, job) for _, job in rows[:size]], token

    async def token_after(self, job: JobRecord) -> str:
        """Return the token of the page that follows this job of the list."""
        return _page_token(await self.journal.store.number_of(job.job_id))

    async def queue(self, principal: Principal) -> Jobs:
        """Return the jobs on the device, then the first of the queue in the order in which they are considered, then
        those that were sent to other boxes; of all users."""
        # Others' places show how long one's own job has to wait; what their jobs are about, the caller hides.
        store = self.journal.store
        residents, queued = await store.in_states(sorted(RESIDENT)), await store.queued(MAX_PAGE_SIZE)
        waiting = [self._with_outlook(principal, job) for job in queued]
        # Those that the scheduler has not looked at come last: it looks at the first of every user.
        placed = [job for job in waiting if job.outlook is not None and job.outlook.place]
        others = [job for job in waiting if job.outlook is None or not job.outlook.place]
        placed.sort(key=attrgetter("queue_position"))
        # Their places are in another order, by when they came.
        last = max((job.queue_position for job in placed), default=0)
        others = [replace(job, queue_position=place) for place, job in enumerate(others, last + 1)]
        there = [self._with_outlook(principal, job) for job in await store.elsewhere()]
        return [*(self._with_outlook(principal, job) for job in residents), *placed, *others, *there]

    async def cancel(self, principal: Principal, key: str) -> JobRecord:
        """End a job; one that has ended already stays as it is. Raises NotFound, or NotAllowed for the job of another
        user."""
        job = await self._change(principal, key)
        if job.job_state in ENDED:
            return job
        if self.boxes.has_arrived(job):
            return await self.boxes.order(principal, job, "cancel")
        return await self._stop(job, StopRequest.CANCEL)

    async def pause(self, principal: Principal, key: str) -> JobRecord:
        """Checkpoint a job and take it off the device, or out of the queue. Raises WrongJobState when it has ended."""
        job = await self._change(principal, key)
        if job.job_state is JobState.PAUSED:
            return job
        if job.job_state in ENDED:
            raise WrongJobState(f"job {job.job_id} is {job.job_state}; only a job that has not ended can be paused")
        if self.boxes.has_arrived(job):
            return await self.boxes.order(principal, job, "pause")
        return await self._stop(job, StopRequest.PAUSE)

    async def resume(self, principal: Principal, key: str) -> JobRecord:
        """Put a paused or failed job at the end of the queue; it continues from its newest checkpoint.

        Raises WrongJobState for others, and QuotaExceeded when the user or the project has as many queued jobs as an
        admin allows.
        """
        job = await self._change(principal, key)
        if job.job_state not in (JobState.PAUSED, JobState.FAILED):
            raise WrongJobState(f"job {job.job_id} is {job.job_state}; only a PAUSED or FAILED job can be resumed")
        await self.quotas.require_room(job.owner, job.project)
        if self.boxes.has_arrived(job):
            return await self.boxes.order(principal, job, "resume")
        # At its old place it would overtake all who have waited meanwhile; parking cheap jobs would reserve the head of
        # the queue.
        job = await self.journal.move(
            job, JobState.QUEUED, reason=RESUMED, message="resumed by a user", requeue=True, **FORGOTTEN
        )
        self.tracking.follow(job)
        self.scheduler.wake()
        return job

    async def update(self, principal: Principal, key: str, *, priority: int) -> JobRecord:
        """Set the priority of a job that has not ended: it orders the jobs of one user.

        An admin may set it above 100, for a job of anybody: such a job is served before all shares.

        Raises InvalidSpec when it is out of range, NotAllowed when only an admin may set it, WrongJobState when the job
        has ended.
        """
        job = await self._change(principal, key)
        if not -MAX_PRIORITY <= priority <= MAX_URGENT_PRIORITY:
            raise InvalidSpec.of(
                "priority",
                f"priority is {priority}; it must be from {-MAX_PRIORITY} to {MAX_PRIORITY}, or up to "
                f"{MAX_URGENT_PRIORITY} for admins",
            )
        if priority > MAX_PRIORITY and principal.role != "admin":
            raise NotAllowed(
                f"only an admin may set a priority above {MAX_PRIORITY}, which passes the jobs of all users"
            )
        if job.job_state in ENDED:
            raise WrongJobState(f"job {job.job_id} is {job.job_state}; only a job that has not ended has a priority")
        if priority == job.priority:
            return job
        if self.boxes.has_arrived(job):
            return await self.boxes.order(principal, job, "update", priority=priority)
        text = f"priority is now {priority}, set by {principal.name}"
        await self.journal.append(job.job_id, Message(level="info", text=text), priority=priority)
        self.scheduler.wake()
        return await self.get(principal, job.job_id)

    async def watch(self, principal: Principal, key: str, after_sequence: int = 0) -> AsyncGenerator[JobEvent, None]:
        """Yield a job's events from a number on, to the last one of an ended job. Raises Draining when the daemon shuts
        down."""
        job = await self.get(principal, key)
        async for event in self.journal.follow(job.job_id, after_sequence):
            yield event

    async def visit_events(
        self, job: JobRecord, *, kinds: Sequence[str], after: int, limit: int, visit: VisitEvent, every: int = 1
    ) -> int:
        """Give events of a job that the caller was allowed to get to `visit`, as `JobStore.visit_events` does."""
        return await self.journal.store.visit_events(job.job_id, after, limit, kinds, visit, every)

    async def logs(
        self, principal: Principal, key: str, *, attempt: int = 0, offset: int = 0, follow: bool = False
    ) -> AsyncGenerator[tuple[int, bytes], None]:
        """Yield (offset, bytes) pieces of an attempt's log; `follow` waits for more until the attempt ends. Raises
        InvalidSpec."""
        if not 0 <= offset <= _MAX_OFFSET:
            raise InvalidSpec.of("offset", f"offset is {offset}; it must be from 0 to {_MAX_OFFSET}")
        job = await self.get(principal, key)
        if self.boxes.has_arrived(job):
            more = {"attempt": attempt, "offset": offset, "follow": follow}
            async with contextlib.aclosing(self.boxes.stream(principal, job, "logs", **more)) as items:
                async for item in items:
                    yield item.value, item.data
            return

        async def grows() -> bool:
            now = await self.journal.store.get(job.job_id)
            same = now is not None and attempt in (0, now.attempt)
            return same and now is not None and now.job_state in RESIDENT and not self.lifecycle.draining

        path = self.folders.log(job.job_id, attempt or job.attempt)
        async for piece in read_log(path, offset=offset, grows=grows if follow else None):
            yield piece

    async def log_part(
        self, principal: Principal, key: str, *, attempt: int = 0, offset: int | None = 0, limit: int = LOG_PIECE_BYTES
    ) -> LogPart:
        """Return a part of an attempt's log in whole lines, from an offset on or, for None, to its end; of the last
        attempt, unless one is named."""
        job = await self.get(principal, key)
        if self.boxes.has_arrived(job):
            more = {"attempt": attempt, "offset": offset, "limit": limit}
            return await self.boxes.call(principal, job, "log_part", LogPart, **more)
        number = attempt or job.attempt
        size, start, content = await asyncio.to_thread(
            read_log_part, self.folders.log(job.job_id, number), offset=offset, limit=limit
        )
        grows = number == job.attempt and job.job_state in RESIDENT
        return LogPart(
            attempt=number,
            attempts=tuple(await asyncio.to_thread(self.folders.attempts, job.job_id)),
            offset=start,
            next_offset=start + len(content),
            text=content.decode("utf-8", "replace").translate(_NO_CONTROL),
            complete=not grows and start + len(content) >= size,
        )

    async def evaluations(self, principal: Principal, key: str) -> Sequence[EvalDone]:
        """Return a job's last evaluations with their answers, oldest first; of those of one step the last one."""
        job = await self.get(principal, key)
        found = await self.journal.store.evaluations(job.job_id, limit=MAX_EVALUATIONS)
        return sorted({one.step: one for one in found}.values(), key=attrgetter("step"))

    async def checkpoints(self, principal: Principal, key: str) -> Checkpoints:
        """Return a job's complete checkpoints, oldest first."""
        job = await self.get(principal, key)
        if self.boxes.has_arrived(job):
            return await self.boxes.call(principal, job, "checkpoints", Checkpoints)
        return await asyncio.to_thread(self.folders.checkpoints(job.job_id).all)

    @asynccontextmanager
    async def checkpoint_file(self, principal: Principal, key: str, step: int, path: str) -> AsyncIterator[Path]:
        """Give the path of one file of a checkpoint, which is not removed until the end of the block, nor soon after
        it.

        Raises NotFound when the checkpoint or the file does not exist.
        """
        job = await self.get(principal, key)
        checkpoints = self.folders.checkpoints(job.job_id)
        with await self.leases.take(checkpoints, step):
            yield await asyncio.to_thread(checkpoints.file, step, path)

    async def base_of(self, job: JobRecord) -> Path:
        """Return the folder of the model that a job's adapters are for. Raises NotFound when it is not on the node any
        more."""
        folder = await self.resources.model_of(job)
        if not await asyncio.to_thread(folder.is_dir):
            raise NotFound(
                f"the model {job.spec.model} that the adapter of job {job.job_id} is for is not on the node any more; "
                "pull the adapter, "
                "and merge it with PEFT (merge_and_unload)"
            )
        return folder

    async def delete_checkpoint(self, principal: Principal, key: str, step: int) -> None:
        """Remove one checkpoint. Raises as `require_checkpoint_deletable` does, and NotFound when there is none of that
        step."""
        job = await self.get(principal, key)
        if self.boxes.has_arrived(job):
            await self.boxes.call(principal, job, "delete_checkpoint", NOTHING, step=step)
            return
        checkpoints = self.folders.checkpoints(job.job_id)
        await self.require_checkpoint_deletable(principal, job, step)
        self.leases.drop_idle(checkpoints, step)
        await asyncio.to_thread(checkpoints.delete, step)

    async def require_checkpoint_deletable(self, principal: Principal, job: JobRecord, step: int) -> None:
        """Let pass a checkpoint that the caller may delete now.

        Raises:
            NotAllowed: when the job is another user's.
            WrongJobState: when a job that has not ended would resume from it.
            InUse: while it is being downloaded.
        """
        await self._change(principal, job.job_id)
        if self.boxes.has_arrived(job):
            await self.boxes.call(principal, job, "require_checkpoint_deletable", NOTHING, step=step)
            return
        checkpoints = self.folders.checkpoints(job.job_id)
        newest = await asyncio.to_thread(checkpoints.newest)
        if job.job_state not in ENDED and newest is not None and newest == checkpoints.of_step(step):
            raise WrongJobState(f"job {job.job_id} has not ended and would continue from step {step}; cancel it first")
        self.leases.require_unread(checkpoints, [step])

    async def require_deletable(self, principal: Principal, job: JobRecord) -> None:
        """Let pass a job that the caller may delete now.

        Raises:
            NotAllowed: when it is another user's.
            InUse: when it has not ended, or one of its checkpoints is being downloaded.
        """
        await self._change(principal, job.job_id)
        if job.job_state not in ENDED:
            raise InUse(
                f"job {job.job_id} is {job.job_state}; only a job that has ended can be deleted: horizon job cancel "
                f"{job.job_id}"
            )
        checkpoints = self.folders.checkpoints(job.job_id)
        self.leases.require_unread(checkpoints, await asyncio.to_thread(checkpoints.steps))

    async def delete(self, principal: Principal, key: str) -> None:
        """Remove an ended job with its checkpoints, logs and events. Raises as `require_deletable` does."""
        job = await self.get(principal, key)
        await self.require_deletable(principal, job)
        if self.boxes.has_arrived(job):
            with contextlib.suppress(NotFound):  # an earlier call has come as far as here
                await self.boxes.call(principal, job, "delete", NOTHING)
        try:
            await self.journal.store.begin_deletion(job.job_id, BEING_DELETED)
        except WrongJobState as error:  # resumed meanwhile
            raise InUse(f"{error.message}; cancel it first") from error
        await self.finish_deletion(job.job_id)

    async def finish_deletion(self, job_id: str) -> None:
        """Remove what is left of a job that is marked as being deleted. Raises InUse, and takes the mark off, when it
        is read again."""
        checkpoints = self.folders.checkpoints(job_id)
        for step in await asyncio.to_thread(checkpoints.steps):
            self.leases.drop_idle(checkpoints, step)
        try:
            await in_thread(lambda: self.folders.remove_job(job_id))
        except InUse:
            await self.journal.store.end_deletion(job_id)
            raise
        await self.journal.store.delete(job_id)
        self.journal.forget(job_id, await self.journal.store.counts())

    async def _created_from(
        self, start: Start, job: JobRecord, create: Callable[[], Awaitable[JobRecord]]
    ) -> JobRecord:
        """Store a job with the weights that it starts with, or return the one that the same earlier request made."""
        try:
            # Before the job: it may begin at once.
            target = self.folders.start(job.job_id)
            await in_thread(lambda: start.link(target))
            stored = await create()
        finally:
            # Asked of the database: a caller that hangs up may do so when the job is stored already.
            if await self.journal.store.get(job.job_id) is None:
                await in_thread(lambda: self.folders.remove_job(job.job_id))
        if stored.job_id == job.job_id:
            await self.journal.append(job.job_id, Message(level="info", text=start.text))
        return stored

    def _with_outlook(self, principal: Principal, job: JobRecord) -> JobRecord:
        """Return the job with why it is where it is, as the caller reads it, and its place among those that wait.

        A job that has ended since the scheduler last looked has no outlook.
        """
        is_queued = job.job_state is JobState.QUEUED
        is_alive = is_queued or job.job_state in RESIDENT
        outlook = (self.boxes.outlook(job) if job.box else self.scheduler.outlook(job.job_id)) if is_alive else None
        if outlook is None:
            return job
        read = self.as_read(principal, outlook, is_owner=principal.name == job.owner)
        # One record for all who read the same until the queue is looked at again: what is sent of a record is made
        # once, and kept with it.
        of, records = vars(job).get(_SHOWN, (None, {}))
        if of != outlook:
            of, records = vars(job)[_SHOWN] = outlook, {}
        if read.why not in records:
            place = outlook.place if is_queued and outlook.place else job.queue_position
            records[read.why] = replace(job, outlook=read, queue_position=place)
        shown: JobRecord = records[read.why]
        return shown

    def as_read(self, principal: Principal, outlook: Outlook, *, is_owner: bool) -> Outlook:
        """Return an outlook as the caller reads it: other jobs are called by their names where the caller may see
        them."""

        def name_of(job_id: str) -> str | None:
            job = self.scheduler.named(job_id)
            if job is None or not may_see(principal, job.owner, project=job.project):
                return None
            return job.spec.name if job.owner == principal.name else f"{job.spec.name} of {job.owner}"

        why = with_names(outlook.why, name_of)
        return replace(outlook, why=to_owner(why) if is_owner else why)

    async def _change(self, principal: Principal, key: str) -> JobRecord:
        job = await self.get(principal, key)
        require_change(principal, job.owner, f"job {job.job_id}", project=job.project)
        return job

    async def _stop(self, job: JobRecord, wanted: StopRequest) -> JobRecord:
        """Carry out a user's order at once, or ask the attempt of a job on the device for it."""
        if job.job_state not in RESIDENT:
            state, reason, message = wanted.end(job.spec.name)
            try:
                return await self.journal.move(job, state, reason=reason, message=message)
            except WrongJobState:
                now = await self.journal.store.get(job.job_id)
                if now is None or now.job_state not in RESIDENT:
                    raise
                job = now  # it was loaded while this call was on its way
        # Without an attempt the daemon that ran it has died and the job is not settled yet: the recovery then carries
        # out what is stored here.
        attempt = self.scheduler.attempt(job.job_id)
        with contextlib.suppress(WrongJobState):  # it may end while this call is on its way
            if attempt is not None:
                await attempt.stop(wanted)
            elif job.job_state is JobState.STOPPING:
                await self.journal.store.set(job.job_id, wanted=wanted)
            else:
                await self.journal.move(job, JobState.STOPPING, reason=wanted.name, wanted=wanted)
        now = await self.journal.store.get(job.job_id)
        assert now is not None, job.job_id
        return now


def _page_token(number: int) -> str:
    return base64.urlsafe_b64encode(str(number).encode()).decode()

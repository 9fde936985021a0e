"""The other machines of the fleet, which this daemon sends jobs to: where a job would end first, its way there, and
what becomes of it.

A job that was sent to a box is in the queue there and has its files there. Here are its record and its events, which
are asked for every second, so that everything that reads a job reads it here; what needs its files, and every order, is
passed on (`call`, `stream`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args

import structlog

from horizon_server.codec import from_plain, to_plain
from horizon_server.errors import (
    BoxLost,
    DatabaseUnavailable,
    DiskFull,
    Draining,
    HorizonError,
    InUse,
    InvalidSpec,
    QuotaExceeded,
    Stalled,
    TooManyCalls,
    UploadInProgress,
    WorkerFailed,
)
from horizon_server.events import Message, StateChanged, decode
from horizon_server.jobs.journal import Journal
from horizon_server.jobs.usage import UsageMeter
from horizon_server.nodes.boxes import BoxCall, BoxClient, Item
from horizon_server.planning.planner import Planner
from horizon_server.records.account import NODE, Principal
from horizon_server.records.blob import BlobStatus
from horizon_server.records.boxes import Box, BoxState, JobUpdate, Place
from horizon_server.records.job import ENDED, JobRecord, JobState
from horizon_server.records.plan import Plan
from horizon_server.records.sharing import Outlook
from horizon_server.scheduling.placement import best
from horizon_server.scheduling.shares import Shares
from horizon_server.services.fleet.records import Announced, Asked, BoxReport, Needed, SentJob
from horizon_server.texts import size_text

log = structlog.get_logger(__name__)

_ASK_EVERY_S = 1.0
# How busy a box is, for those who look; before a job is sent it is asked anyway.
_REPORT_EVERY_S = 5.0
_TRY_AGAIN_S = 5.0
# Where nothing is known of the network: 1 Gbit/s.
_NETWORK_BYTES_PER_S = 1e9 / 8
_REFS_AT_ONCE = 1000
_PIECE_BYTES = 2**20
# Jobs on their way to a box that are counted there, the first ones.
_MOST_COMING = 100
# What may pass: a box that is away, busy or full. Any other refusal of a box is final.
_PASSING = (
    BoxLost,
    DatabaseUnavailable,
    DiskFull,
    Draining,
    InUse,
    QuotaExceeded,
    Stalled,
    TooManyCalls,
    UploadInProgress,
    WorkerFailed,
)
# Of a job in a box, what is stored here as it is there. The rest is as it was submitted, or follows from its events.
_MIRRORED = (
    "wanted",
    "priority",
    "step",
    "num_steps",
    "queued_s",
    "started_s",
    "ended_s",
    "device_s",
    "num_tokens",
    "last_step",
    "task_results",
    "plan",
    "data_report",
    "num_restarts",
    "failed_step",
    "last_failure",
    "not_before_s",
    "deletion_s",
    "keep_files",
)

ResultT = TypeVar("ResultT")
NOTHING: Any = None
"""The kind of an answer that says only that it was done."""
PlanWith = Callable[[Planner], Plan]
"""Plans the job with the planner of a machine. Blocking."""
NeededFiles = Mapping[str, Needed]
"""What a job needs, by what its spec names."""


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Where a job is to run, and its plan there."""

    plan: Plan
    box: str = ""
    """Empty for this machine."""
    outlook: Outlook | None = None
    """Where it would stand; None where no other machine could have it, so that nobody was asked."""
    places: tuple[Place, ...] = ()
    """All machines that could have it, this one first; none where there is only this one."""


@dataclass(frozen=True, kw_only=True)
class _Offer:
    place: Place
    plan: Plan | None = None
    outlook: Outlook | None = None
    error: HorizonError | None = None


@dataclass(kw_only=True, eq=False)
class Boxes:
    """Thread: belongs to one event loop.

    Args:
        name: of this machine.
        simulate: when a job would start and end here.
        needed_by: what a stored job needs in a box.
        path_of: the file of a content, by its sha256.
    """

    name: str
    clients: Mapping[str, BoxClient]
    journal: Journal
    planner: Planner
    meter: UsageMeter
    shares: Shares
    simulate: Callable[[JobRecord], Awaitable[Outlook]]
    needed_by: Callable[[JobRecord], Awaitable[NeededFiles]]
    path_of: Callable[[str], Path]
    known: dict[str, BoxReport | HorizonError] = field(init=False, default_factory=dict)
    """What each box has said of itself when it was asked last, or why it did not."""
    _outlooks: dict[str, Outlook] = field(init=False, default_factory=dict)
    _sending: dict[str, asyncio.Task[None]] = field(init=False, default_factory=dict)
    _told: set[str] = field(init=False, default_factory=set)
    """Jobs whose owners were told that their files are copied."""

    # Where a job is to run

    async def placed(
        self,
        principal: Principal,
        job: JobRecord,
        plan_with: PlanWith,
        *,
        node: str,
        only_here: str = "",
    ) -> Placed:
        """Return where a job ends first, or on the machine `node` where one is named.

        Args:
            job: as it would be queued, without a plan.
            only_here: why no other machine can have it; empty where one may.

        Raises:
            InvalidSpec: when no machine has that name; and what `plan_with` does, where no machine can have the job.
        """
        names = [self.name, *self.clients]
        if node and node not in names:
            raise InvalidSpec.of("node", f"node is {node:.80}; the machines of this fleet are: {', '.join(names)}")
        if not self.clients or node == self.name:
            return Placed(plan=await asyncio.to_thread(plan_with, self.planner))
        needed = {} if only_here else await self.needed_by(job)
        here = [self._offer_here(job, plan_with)] if not node else []
        others = [
            self._offer(principal, client, job, plan_with, needed, only_here)
            for client in self.clients.values()
            if node in ("", client.name)
        ]
        offers = await asyncio.gather(*here, *others)
        chosen = best([offer.place for offer in offers])
        if chosen is None:
            first = offers[0]
            if first.error is not None:
                raise first.error
            assert first.plan is not None, "a machine without a plan says why"
            return Placed(plan=first.plan, places=tuple(offer.place for offer in offers))
        offer = next(offer for offer in offers if offer.place is chosen)
        assert offer.plan is not None, "a machine that can have the job has planned it"
        return Placed(
            plan=offer.plan,
            box="" if chosen.box == self.name else chosen.box,
            outlook=offer.outlook,
            places=tuple(replace(one.place, chosen=one is offer) for one in offers),
        )

    async def _offer_here(self, job: JobRecord, plan_with: PlanWith) -> _Offer:
        try:
            plan = await asyncio.to_thread(plan_with, self.planner)
        except HorizonError as error:
            return _Offer(place=Place(box=self.name, why_not=error.message), error=error)
        if not plan.fits:
            return _Offer(place=Place(box=self.name, why_not=plan.message), plan=plan)
        outlook = await self.simulate(replace(job, plan=plan))
        return _Offer(place=_place(self.name, plan, outlook), plan=plan, outlook=outlook)

    async def _offer(
        self,
        principal: Principal,
        client: BoxClient,
        job: JobRecord,
        plan_with: PlanWith,
        needed: NeededFiles,
        only_here: str,
    ) -> _Offer:
        try:
            if only_here:
                raise InvalidSpec.of("node", only_here)
            if isinstance(lost := self.known.get(client.name), HorizonError):
                raise lost  # it is asked every second: nobody who submits has to wait for it
            report = await self._report(client)
            plan = await asyncio.to_thread(lambda: plan_with(self.planner.of_facts(report.planner)))
            if not plan.fits:
                return _Offer(place=Place(box=client.name, why_not=plan.message), plan=plan)
            statuses = await self._missing(client, principal, needed.values())
            num_bytes = sum(status.blob.size_bytes - status.committed_bytes for status in statuses)
            # Counted from now on: otherwise all jobs of a sweep would see the same free place.
            there = await self.journal.store.elsewhere()
            coming = [one for one in there if one.box == client.name and one.journal_line == 0]
            body = {
                "job": to_plain(replace(job, plan=plan)),
                "coming": [to_plain(one) for one in coming[:_MOST_COMING]],
            }
            outlook = from_plain(Outlook, await client.ask(BoxCall(name="simulate", caller=principal, body=body)))
        except HorizonError as error:
            return _Offer(place=Place(box=client.name, why_not=error.message), error=error)
        copy_s = num_bytes / (self.planner.network_bytes_per_s or _NETWORK_BYTES_PER_S)
        place = _place(client.name, plan, outlook, copied_bytes=num_bytes, copy_s=copy_s)
        return _Offer(place=place, plan=plan, outlook=outlook)

    async def _report(self, client: BoxClient) -> BoxReport:
        try:
            report = from_plain(BoxReport, await client.ask(BoxCall(name="report", caller=NODE)))
        except HorizonError as error:
            self.known[client.name] = error
            raise
        except ValueError as error:
            raise BoxLost(f"box {client.name} answered with a report that this version does not know") from error
        self.known[client.name] = report
        return report

    async def _missing(self, client: BoxClient, owner: Principal, needed: Sequence[Needed] | Any) -> list[BlobStatus]:
        refs = list(dict.fromkeys(file.ref for one in needed for file in one.files))
        found: list[BlobStatus] = []
        for start in range(0, len(refs), _REFS_AT_ONCE):
            body = {"refs": [to_plain(ref) for ref in refs[start : start + _REFS_AT_ONCE]]}
            answer = await client.ask(BoxCall(name="missing", caller=owner, body=body))
            found += from_plain(list[BlobStatus], answer)
        return found

    # What the boxes are

    def all(self) -> tuple[Box, ...]:
        """The other machines, as they were when they were asked last."""
        return tuple(self._box(client) for client in self.clients.values())

    def _box(self, client: BoxClient) -> Box:
        report = self.known.get(client.name)
        if isinstance(report, BoxReport):
            return replace(report.box, name=client.name, address=client.address)
        message = "it has not been asked yet" if report is None else report.message
        return Box(name=client.name, address=client.address, state="lost", message=message)

    def outlook(self, job: JobRecord) -> Outlook | None:
        """Where a job in a box stands, as of the last answer of the box."""
        known = self.known.get(job.box)
        found = self._outlooks.get(job.job_id)
        if isinstance(known, HorizonError):
            return replace(found or Outlook(why=""), why=f"in {job.box}, which does not answer: {known.message}")
        return found

    # The way there and back

    async def run(self, on_asked: Callable[[Mapping[str, int]], None] = lambda counts: None) -> None:
        """Send jobs to their boxes, and follow them there, for as long as the daemon serves; `on_asked` is called with
        how many boxes are in each state."""
        if not self.clients:
            return
        try:
            await asyncio.gather(*(self._follow(client, on_asked) for client in self.clients.values()))
        finally:
            for task in self._sending.values():
                task.cancel()
            await asyncio.gather(*self._sending.values(), return_exceptions=True)

    async def _follow(self, client: BoxClient, on_asked: Callable[[Mapping[str, int]], None]) -> None:
        reported_s = float("-inf")
        while True:
            try:
                if time.monotonic() - reported_s >= _REPORT_EVERY_S:
                    await self._report(client)
                    reported_s = time.monotonic()
                await self._look(client)
            except HorizonError as error:
                if not isinstance(self.known.get(client.name), HorizonError):
                    log.warning("a box is lost", box=client.name, why=error.message)
                self.known[client.name] = error
                reported_s = float("-inf")
            except Exception:  # a defect in what one job says must not end the others' way back
                log.exception("a box could not be followed", box=client.name)
            states = [box.state for box in self.all()]
            on_asked({state: states.count(state) for state in get_args(BoxState)})
            await asyncio.sleep(_ASK_EVERY_S)

    async def _look(self, client: BoxClient) -> None:
        jobs = [job for job in await self.journal.store.elsewhere() if job.box == client.name]
        for job in jobs:
            if job.journal_line == 0 and job.job_state is JobState.QUEUED and job.job_id not in self._sending:
                task = asyncio.create_task(self._bring(client, job), name=f"{job.job_id} to {client.name}")
                self._sending[job.job_id] = task
                task.add_done_callback(partial(self._forget, job.job_id))
        if arrived := [job for job in jobs if job.journal_line]:
            await self._mirror(client, arrived)

    def _forget(self, job_id: str, task: asyncio.Task[None]) -> None:
        self._sending.pop(job_id, None)
        self._told.discard(job_id)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a job could not be sent", job_id=job_id, exc_info=error)

    async def _mirror(self, client: BoxClient, jobs: Sequence[JobRecord]) -> None:
        """Store what has become of jobs. Raises BoxLost, DiskFull, DatabaseUnavailable."""
        asked = Asked(after={job.job_id: job.journal_line for job in jobs}, uses=tuple(self.shares.uses(time.time())))
        answer = await client.ask(BoxCall(name="updates", caller=NODE, body=to_plain(asked)))
        for job, update in zip(jobs, from_plain(list[JobUpdate], answer), strict=True):
            if update.job is None:
                why = f"box {client.name} does not know the job any more: its state folder may be another one now"
                await self.journal.move(job, JobState.FAILED, reason="BOX_LOST", message=why)
                continue
            if update.outlook is not None:
                self._outlooks[job.job_id] = replace(update.outlook, why=f"in {client.name}: {update.outlook.why}")
            await self._store(job, update)

    async def _store(self, job: JobRecord, update: JobUpdate) -> JobRecord:
        there = update.job
        assert there is not None, "the caller has looked"
        events = [(one.sequence, one.time_s, decode(one.body)) for one in update.events]
        fields = {name: getattr(there, name) for name in _MIRRORED}
        if not events and all(getattr(job, name) == value for name, value in fields.items()):
            return job
        now, before = await self.journal.mirror(job.job_id, events, **fields)
        if before is not None and now.device_s > before.device_s:
            # For shares and quotas, which count what is used on all machines. The job's own figures are there already.
            of_others = replace(now, job_id="", plan=None)
            self.meter.add(of_others, now.device_s - before.device_s, num_tokens=now.num_tokens - before.num_tokens)
        if now.job_state in ENDED:
            self._outlooks.pop(job.job_id, None)
        return now

    async def _bring(self, client: BoxClient, job: JobRecord) -> None:
        """Copy what a job needs to its box, and submit it there."""
        while (now := await self.journal.store.get(job.job_id)) is not None and now.job_state is JobState.QUEUED:
            try:
                await self._bring_once(client, now)
                return
            except _PASSING as error:
                self._outlooks[job.job_id] = Outlook(why=f"waits for {client.name}: {error.message}")
                await asyncio.sleep(_TRY_AGAIN_S)
            except HorizonError as error:
                message = f"{client.name} refuses it: {error.message}"
                with contextlib.suppress(HorizonError):  # cancelled meanwhile
                    await self.journal.move(now, JobState.FAILED, reason=error.reason, message=message)
                return

    async def _bring_once(self, client: BoxClient, job: JobRecord) -> None:
        # Its owner may have fewer rights by now; that it was queued is what counts.
        owner = Principal(name=job.owner, role="user", project=job.project)
        needed = await self.needed_by(job)
        statuses = await self._missing(client, owner, needed.values())
        num_bytes = sum(status.blob.size_bytes - status.committed_bytes for status in statuses)
        if num_bytes and job.job_id not in self._told:
            self._told.add(job.job_id)
            text = f"{size_text(num_bytes)} of its model and data are copied to {client.name}"
            await self.journal.append_now(job.job_id, Message(level="info", text=text))
        sent_bytes = 0

        def on_sent(piece_bytes: int) -> None:
            nonlocal sent_bytes
            sent_bytes += piece_bytes
            share = 100 * sent_bytes / max(1, num_bytes)
            self._outlooks[job.job_id] = Outlook(why=f"is copied to {client.name}, {share:.0f} %")

        ids: dict[str, str] = {}
        for name, one in needed.items():
            body = {"needed": to_plain(one)}
            announced = from_plain(Announced, await client.ask(BoxCall(name="announce", caller=owner, body=body)))
            if not announced.ready:
                await self._copy(client, owner, one, on_sent)
                self._outlooks[job.job_id] = Outlook(why=f"{one.kind} {one.name} is checked in {client.name}")
                body = {"kind": one.kind, "id": announced.id}
                await client.ask(BoxCall(name="finalize", caller=owner, body=body))
            ids[name] = announced.id
        now = await self.journal.store.get(job.job_id)
        if now is None or now.job_state is not JobState.QUEUED:
            return
        sent = SentJob(job_id=job.job_id, project=job.project, priority=now.priority, spec=job.spec, ids=ids)
        await client.ask(BoxCall(name="submit", caller=owner, body=to_plain(sent)))
        arrived = StateChanged(job_state=JobState.QUEUED.value)
        now, _ = await self.journal.mirror(job.job_id, [(1, time.time(), arrived)])
        if now.job_state is not JobState.QUEUED:  # cancelled or paused while it was on its way
            order = "pause" if now.job_state is JobState.PAUSED else "cancel"
            await client.ask(BoxCall(name=order, caller=owner, body={"key": job.job_id}))
        log.info("job sent", job_id=job.job_id, box=client.name, num_bytes=num_bytes)

    async def _copy(self, client: BoxClient, owner: Principal, needed: Needed, on_sent: Callable[[int], None]) -> None:
        for status in await self._missing(client, owner, [needed]):
            ref = status.blob
            body = {"ref": to_plain(ref), "offset": status.committed_bytes}
            data = _pieces(self.path_of(ref.sha256), status.committed_bytes, on_sent)
            await client.ask(BoxCall(name="write", caller=owner, body=body), data)

    # What is passed on

    async def call(self, principal: Principal, job: JobRecord, name: str, kind: type[ResultT], **more: Any) -> ResultT:
        """Return what the box of a job answers, a record of `kind`. Raises what the box answers, and BoxLost."""
        body = {"key": job.job_id, **more}
        answer = await self._client(job).ask(BoxCall(name=name, caller=principal, body=body))
        return from_plain(kind, answer)

    async def order(self, principal: Principal, job: JobRecord, name: str, **more: Any) -> JobRecord:
        """Have the box of a job change it, and return the job as it is then. Raises as `call`."""
        await self.call(principal, job, name, JobRecord, **more)
        await self.refresh(job)
        now = await self.journal.store.get(job.job_id)
        assert now is not None, job.job_id
        return now

    async def refresh(self, job: JobRecord) -> None:
        """Store now what has become of a job, instead of within a second. Raises as `call`."""
        await self._mirror(self._client(job), [job])

    async def stream(self, principal: Principal, job: JobRecord, name: str, **more: Any) -> AsyncGenerator[Item, None]:
        """Yield what the box of a job answers, part by part. Raises as `call`."""
        call = BoxCall(name=name, caller=principal, body={"key": job.job_id, **more})
        last: Item | None = None
        async with contextlib.aclosing(self._client(job).stream(call)) as items:
            async for item in items:
                if last is not None:
                    yield last
                last = item

    async def records(
        self, principal: Principal, job: JobRecord, name: str, kinds: Sequence[type[Any]], **more: Any
    ) -> AsyncGenerator[Any, None]:
        """Yield the records that the box of a job answers, each of one of these kinds. Raises as `call`."""
        by_name = {kind.__name__: kind for kind in kinds}
        async with contextlib.aclosing(self.stream(principal, job, name, **more)) as items:
            async for item in items:
                yield from_plain(by_name[item.value["kind"]], item.value["record"])

    def has_arrived(self, job: JobRecord) -> bool:
        """Whether a job is in another box, so that orders go there."""
        return bool(job.box) and job.journal_line > 0

    def _client(self, job: JobRecord) -> BoxClient:
        client = self.clients.get(job.box)
        if client is None:
            raise BoxLost(f"job {job.job_id} is in {job.box}, which the setting boxes of this daemon does not name")
        return client


def _place(box: str, plan: Plan, outlook: Outlook, *, copied_bytes: int = 0, copy_s: float = 0.0) -> Place:
    prediction = plan.prediction
    num, kind = plan.num_devices * plan.num_nodes, "GPU" if plan.device == "cuda" else "device"
    start_s, end_s = outlook.estimated_start_s, outlook.estimated_end_s
    return Place(
        box=box,
        devices=f"{num} {kind}{'' if num == 1 else 's'}",
        step_s=None if prediction is None else prediction.step_s,
        tokens_per_second=None if prediction is None else prediction.tokens_per_second,
        copied_bytes=copied_bytes,
        estimated_start_s=None if start_s is None else start_s + copy_s,
        estimated_end_s=None if end_s is None else end_s + copy_s,
    )


async def _pieces(path: Path, offset: int, on_sent: Callable[[int], None]) -> AsyncIterator[bytes]:
    with await asyncio.to_thread(path.open, "rb") as stream:
        await asyncio.to_thread(stream.seek, offset)
        while piece := await asyncio.to_thread(stream.read, _PIECE_BYTES):
            yield piece
            on_sent(len(piece))

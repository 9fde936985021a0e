"""What the scheduler decides from: the queue, the resident jobs, the node, quotas and shares, read from the database;
and where each job stands, worked out from the same."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from horizon_server.db.jobs import JobStore
from horizon_server.db.sharing import SharingStore
from horizon_server.events import CheckpointWritten
from horizon_server.jobs.health import DeviceHealth
from horizon_server.planning.gpus import PROCESS_BYTES
from horizon_server.records.job import JobRecord
from horizon_server.records.sharing import Allowance, Holder, NodeCondition, Outlook
from horizon_server.scheduling.loading import LoadTimes
from horizon_server.scheduling.quotas import WEEK_S, why_not_resident, with_defaults
from horizon_server.scheduling.ranges import on_number
from horizon_server.scheduling.shares import Shares
from horizon_server.scheduling.simulation import outlooks
from horizon_server.scheduling.state import Job, Node, Resident, Rules, Window, kind_of
from horizon_server.scheduling.texts import time_text

# Jobs of the queue that decisions are made from: the first ones of every user, so that nobody's many jobs hide those of
# others.
MOST_WAITING = 500

UNKNOWN_CHANGE_S = 30.0
"""What it is expected to cost to continue on other devices, while no job was loaded or has changed them."""


@dataclass(frozen=True, kw_only=True)
class Residence:
    """Of a resident job: its devices, since when it is in memory, and whether it is still being loaded."""

    devices: tuple[str, ...]
    since_s: float
    is_loading: bool = False
    waits_to_prepare: bool = False
    on_since_s: float = 0.0
    """Since when it is on these devices."""
    can_change: bool = False
    """Whether it can continue on other devices now."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """All that one decision is made from."""

    now_s: float
    waiting: Sequence[Job]
    residents: Sequence[Resident]
    node: Node
    condition: NodeCondition
    allowances: Mapping[tuple[Holder, str], Allowance]
    device_s_of_week: Mapping[tuple[Holder, str], float]
    ends: Mapping[str, float | None]
    """When resident jobs were last expected to end."""
    max_resident_jobs: int | None = None
    """Of a user for whom no admin has set another number."""

    def held(self, job: Job, residents: Sequence[Resident]) -> str:
        """Return why a quota keeps a job from being loaded now; nothing where none does."""
        holders: tuple[tuple[Holder, str], ...] = (("user", job.user), ("project", job.project))
        for holder, name in holders:
            allowance = with_defaults(
                self.allowances.get((holder, name)) or Allowance(holder=holder, name=name),
                max_resident_jobs=self.max_resident_jobs,
            )
            theirs = [one for one in residents if getattr(one, holder) == name]
            used_s = self.device_s_of_week.get((holder, name), 0.0)
            why = why_not_resident(allowance, job, theirs, device_s=used_s, now_s=self.now_s, ends=self.ends)
            if why:
                return why
        return ""


def _told_by_name(jobs: Sequence[JobRecord]) -> dict[str, JobRecord]:
    # Whoever may see one job of an owner in a project may see all of these: no hidden job changes what is said.
    times = Counter((job.owner, job.project, job.spec.name) for job in jobs)
    return {job.job_id: job for job in jobs if times[job.owner, job.project, job.spec.name] == 1}


@dataclass(kw_only=True, eq=False)
class QueueView:
    """Thread: belongs to one event loop; outlooks are worked out in a thread.

    Args:
        host_bytes: what all resident jobs may have together.
        devices: usable memory of each device, by name.
        health: which of them are out of service.
        further: why each other node cannot be used by the jobs with these ids, or "".
    """

    jobs: JobStore
    sharing: SharingStore
    shares: Shares
    rules: Rules
    host_bytes: Callable[[], int]
    devices: Mapping[str, int]
    health: DeviceHealth
    further: Callable[[Collection[str]], Mapping[str, str]] = lambda _: {}
    clock: Callable[[], float] = time.time
    outlooks: Mapping[str, Outlook] = field(init=False, default_factory=dict)
    named: Mapping[str, JobRecord] = field(init=False, default_factory=dict)
    """By id, the jobs of the last look at the queue whose names are enough to tell them from the other ones there."""
    _disk_bytes_per_s: float | None = field(init=False, default=None)
    _load_times: LoadTimes = field(init=False, default_factory=LoadTimes)
    _change_times: LoadTimes = field(init=False, default_factory=LoadTimes)

    def on_checkpoint(self, written: CheckpointWritten) -> None:
        """Learn from a checkpoint how fast jobs can be taken out of memory."""
        if written.duration_s > 0:
            self._disk_bytes_per_s = written.size_bytes / written.duration_s

    def on_loaded(self, job: JobRecord, duration_s: float) -> None:
        """Learn from an attempt how long it took from its begin to its first turn."""
        self._load_times.add(_stored_bytes(job), duration_s)

    def on_changed(self, job: JobRecord, duration_s: float) -> None:
        """Learn how long a job took to continue on other devices, from the order to its first turn there."""
        self._change_times.add(_stored_bytes(job), duration_s)

    async def situation(
        self, residences: Mapping[str, Residence], held_back: Mapping[str, float] = MappingProxyType({})
    ) -> tuple[Situation, dict[str, JobRecord]]:
        """Return what is so now, and the records of the jobs that wait; of those held back, and of those
        that pause after a failure, the ones whose time has come."""
        # Before the time is taken: a maintenance window that begins now has begun by then.
        condition = await self.sharing.condition()
        now_s = self.clock()
        # A job that is being loaded is still in the queue for a moment.
        queued = [
            job
            for job in await self.jobs.heads(MOST_WAITING)
            if job.job_id not in residences and max(job.not_before_s, held_back.get(job.job_id, 0.0)) <= now_s
        ]
        found = [await self.jobs.get(job_id) for job_id in residences]
        residents = [job for job in found if job is not None]
        self.named = _told_by_name([*residents, *queued])
        allowances = await self.sharing.allowances()
        self.shares.set_allowances(allowances)
        situation = Situation(
            now_s=now_s,
            waiting=[self._waiting(job) for job in queued],
            residents=[self._resident(job, residences[job.job_id]) for job in residents],
            node=Node(
                host_bytes=self.host_bytes(),
                devices=self.devices,
                process_bytes=PROCESS_BYTES,
                out={name: why for name, why in self.health.out(condition).items() if name in self.devices},
                is_open=condition.at(now_s) == "open",
                closed_why=_closed_why(condition, now_s),
                window=_window(condition, now_s),
                further=self.further(residences.keys()),
            ),
            condition=condition,
            allowances={(one.holder, one.name): one for one in allowances},
            device_s_of_week=_by_holder(await self.sharing.device_s_since(now_s - WEEK_S)),
            ends={job_id: one.estimated_end_s for job_id, one in self.outlooks.items()},
            max_resident_jobs=self.rules.max_resident_jobs,
        )
        return situation, {job.job_id: job for job in queued}

    async def find_outlooks(self, situation: Situation) -> None:
        """Work out where each job stands."""
        self.outlooks = await asyncio.to_thread(self._outlooks, situation, situation.waiting)

    async def outlook_of(
        self, job: JobRecord, residences: Mapping[str, Residence], *, coming: Sequence[JobRecord] = ()
    ) -> Outlook:
        """Return where a job would stand if it were submitted now, after those that are `coming`."""
        situation, _ = await self.situation(residences)
        last = max((one.order for one in situation.waiting), default=0)
        waiting = [
            *situation.waiting,
            *(
                replace(self._waiting(one), order=order, since_s=situation.now_s)
                for order, one in enumerate([*coming, job], last + 1)
            ),
        ]
        return (await asyncio.to_thread(self._outlooks, situation, waiting, job.job_id))[job.job_id]

    def _outlooks(self, situation: Situation, waiting: Iterable[Job], asked: str = "") -> Mapping[str, Outlook]:
        return outlooks(
            tuple(waiting),
            situation.residents,
            situation.node,
            self.shares.copy(),
            self.rules,
            situation.now_s,
            situation.held,
            asked=asked,
        )

    def _waiting(self, job: JobRecord) -> Job:
        plan, rate = job.plan, self._disk_bytes_per_s
        assert plan is not None, "no job is queued without a plan"
        stored_bytes, num_devices = _stored_bytes(job), plan.num_devices
        least, most = plan.least_devices, num_devices if plan.device_range is None else plan.device_range.most
        load_s = self._load_times.expected_s(stored_bytes)
        return Job(
            job_id=job.job_id,
            user=job.owner,
            project=job.project,
            priority=job.priority,
            order=job.queue_position,
            since_s=job.queued_s,
            device=kind_of(plan.device),
            host_bytes=plan.kept_host_bytes,
            device_bytes=plan.kept_device_bytes,
            base=plan.base,
            num_devices=least,
            more_devices=most - least,
            further_nodes=plan.least_nodes - 1,
            remaining_s=on_number(job.remaining_device_s, num_devices * plan.num_nodes, least * plan.least_nodes),
            # Written once and read once.
            unload_s=None if rate is None else 2 * stored_bytes / rate,
            load_s=load_s,
            # What it takes to be loaded is more, and known from the job itself.
            change_s=self._change_times.expected_s(stored_bytes) or load_s or UNKNOWN_CHANGE_S,
        )

    def _resident(self, job: JobRecord, residence: Residence) -> Resident:
        waiting, plan = self._waiting(job), job.plan
        assert plan is not None, "no job is loaded without a plan"
        remaining_s = on_number(
            waiting.remaining_s, waiting.num_devices * plan.least_nodes, len(residence.devices) * plan.num_nodes
        )
        return Resident(
            **{**vars(waiting), "since_s": residence.since_s, "remaining_s": remaining_s},
            devices=residence.devices,
            more_nodes=plan.num_nodes - plan.least_nodes,
            on_since_s=residence.on_since_s,
            can_change=residence.can_change,
            resident_since_s=residence.since_s,
            ready_s=residence.since_s + (waiting.load_s if residence.is_loading else 0.0),
            is_loading=residence.is_loading,
            waits_to_prepare=residence.waits_to_prepare,
            is_stopping=job.job_state == "STOPPING",
        )


def _window(condition: NodeCondition, now_s: float) -> Window | None:
    start_s, end_s = condition.window_start_s, condition.window_end_s
    if start_s is None or end_s is None or end_s <= now_s:
        return None
    return Window(start_s=start_s, end_s=end_s, message=condition.message, opens=condition.mode == "open")


def _stored_bytes(job: JobRecord) -> int:
    assert job.plan is not None, "no job is queued without a plan"
    return sum(job.plan.host_bytes.get(part, 0) for part in ("weights", "moments", "base"))


def _closed_why(condition: NodeCondition, now_s: float) -> str:
    why = f"the node is {condition.mode} by an admin"
    if condition.at(now_s) != condition.mode and condition.window_end_s is not None:
        why = f"the node is in maintenance until {time_text(condition.window_end_s, now_s)}"
    return f"{why} ({condition.message}): no job starts" if condition.message else f"{why}: no job starts"


def _by_holder(used: Mapping[tuple[str, str], float]) -> Mapping[tuple[Holder, str], float]:
    """Return the device seconds of each project and of each user, from those of users in projects."""
    sums: defaultdict[tuple[Holder, str], float] = defaultdict(float)
    for (project, user), device_s in used.items():
        sums["project", project] += device_s
        sums["user", user] += device_s
    return sums

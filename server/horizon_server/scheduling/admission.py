"""Which waiting jobs are loaded now, which resident ones make room for them, and why the others wait.

The order: first the job of a user without a resident job who has waited longer than `max_wait_s` and used no device in
that time, the longest wait first; then urgent jobs; then users without a resident job before those with one, because a
user's second job gets no more of the device; then the lowest use by weight, priority, and place in the queue. So no
user waits behind others for longer than `max_wait_s` and the time in which memory becomes free; among a user's own jobs
priority decides, however long they wait.

The first job in this order that the free memory does not hold is the *next* one. Memory is kept for it: later jobs may
pass only where that does not delay its predicted start (backfill), and resident jobs of users above their share may be
displaced by it.

Of the jobs that fit, only a few are loaded at a time, in this order: the next one begins when one of them has asked for
its first turn.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import itemgetter

from horizon_server.records.plan import HeldMemory
from horizon_server.scheduling.ranges import Changes, on_number
from horizon_server.scheduling.shares import Shares
from horizon_server.scheduling.state import Decision, Job, Node, Resident, Rules, kind_of
from horizon_server.scheduling.texts import jobs_text, time_text
from horizon_server.scheduling.turns import URGENT_PRIORITY, steady_shares
from horizon_server.texts import size_text

QuotaCheck = Callable[[Job, Sequence[Resident]], str]
"""What a quota has against loading a job next to the resident ones, or ""."""

_Holder = tuple[str, str]


def decide(
    waiting: Sequence[Job],
    residents: Sequence[Resident],
    node: Node,
    shares: Shares,
    rules: Rules,
    now_s: float,
    held: QuotaCheck,
    *,
    ends: Mapping[str, float | None] | None = None,
    explain: bool = True,
) -> Decision:
    """Decides about all waiting jobs at once.

    `ends` are predicted ends of resident jobs (Unix seconds); without them they are predicted from what the jobs still
    need and the shares that they have now. Without `explain` there are no reasons, which a simulation does not read.
    """
    if not node.is_open:
        changes = Changes(residents, node, shares, rules, now_s, {}).make([])
        why = {job.job_id: node.closed_why for job in waiting} if explain else {}
        return Decision(change=changes.of_residents, leave=tuple(changes.leaving), why=why)
    return _Round(node, shares, rules, now_s, held, residents).run(waiting, ends or {}, explain)


def as_resident(job: Job, devices: tuple[str, ...], now_s: float) -> Resident:
    """A job that is loaded now."""
    values = {name: getattr(job, name) for name in _JOB_FIELDS} | {"devices": devices, "since_s": now_s}
    values["remaining_s"] = on_number(job.remaining_s, job.num_devices, len(devices))
    return Resident(**values, resident_since_s=now_s, on_since_s=now_s, ready_s=now_s + job.load_s, is_loading=True)


def as_waiting(resident: Resident, now_s: float) -> Job:
    """A resident job once it is queued again now."""
    values = {name: getattr(resident, name) for name in _JOB_FIELDS}
    remaining_s = on_number(
        resident.remaining_s,
        len(resident.devices) * (1 + _nodes_of(resident)),
        resident.num_devices * (1 + resident.further_nodes),
    )
    return Job(**values | {"since_s": now_s, "remaining_s": remaining_s})


def in_order(
    waiting: Sequence[Job], residents: Sequence[Resident], shares: Shares, rules: Rules, now_s: float
) -> list[Job]:
    """The waiting jobs in the order in which they are considered; see the top of this module."""
    served = {(one.project, one.user) for one in residents if not one.is_stopping}
    users: dict[_Holder, list[Job]] = defaultdict(list)
    oldest: dict[_Holder, int] = {}
    for job in waiting:
        holder, whole = (job.project, job.user), (job.project, "")
        users[holder].append(job)
        oldest[holder] = min(oldest.get(holder, job.order), job.order)
        oldest[whole] = min(oldest.get(whole, job.order), job.order)
    keyed: list[tuple[tuple[float | str, ...], Job]] = []
    for (project, user), jobs in users.items():
        of_project, of_user = shares.rank(project, user, now_s)
        share = (of_project, oldest[project, ""], project, of_user, oldest[project, user], user)
        # The first job of a user without a resident one. A user's second job gets no more of the device.
        first = None if (project, user) in served else min(jobs, key=_inside_user)
        idle_s = now_s - max(shares.last_used_s(project, user), min(job.since_s for job in jobs))
        if first is not None and idle_s > rules.max_wait_s:
            keyed.append(((0, -idle_s, first.order, first.job_id), first))
            jobs = [job for job in jobs if job is not first]
        for job in jobs:
            if job.priority > URGENT_PRIORITY:
                keyed.append(((1, *_inside_user(job)), job))
            else:
                keyed.append(((2, job is not first, *share, *_inside_user(job)), job))
    keyed.sort(key=itemgetter(0))
    return [job for _, job in keyed]


def displaceable_s(one: Resident, rules: Rules) -> float:
    """When a residence is long enough for the job to be displaced, in itself and for the cost of unloading. Unix
    seconds."""
    if one.unload_s is None:
        return math.inf
    return one.resident_since_s + max(rules.max_residence_s, one.unload_s / rules.most_unload_share)


def predicted_ends(residents: Sequence[Resident], shares: Shares, now_s: float) -> dict[str, float]:
    """When the resident jobs end (Unix seconds) if no other is loaded; those that need an unknown time are left out.

    A job of several devices ends when it would on the one where its share is the smallest.
    """
    ends: dict[str, dict[str, float]] = defaultdict(dict)
    devices: dict[str, list[Resident]] = defaultdict(list)
    for one in residents:
        if not one.is_stopping:
            for device in one.devices:
                devices[device].append(one)
    for device, jobs in devices.items():
        time_s, remaining_s = now_s, {one.job_id: one.remaining_s for one in jobs if one.remaining_s is not None}
        while remaining_s:
            parts = {job_id: part for job_id, part in steady_shares(jobs, shares).items() if part > 0}
            waits_s = {job_id: remaining_s[job_id] / parts[job_id] for job_id in parts if job_id in remaining_s}
            if not waits_s:
                break
            ended, wait_s = min(waits_s.items(), key=lambda item: item[1])
            time_s += wait_s
            for job_id in waits_s:
                remaining_s[job_id] = max(0.0, remaining_s[job_id] - wait_s * parts[job_id])
            ends[ended][device] = time_s
            del remaining_s[ended]
            jobs = [one for one in jobs if one.job_id != ended]
    return {
        one.job_id: max(ends[one.job_id].values())
        for one in residents
        if one.job_id in ends and len(ends[one.job_id]) == len(one.devices)
    }


# Relative to the share: a user exactly at it is not above it for a rounding error.
LEAST_EXCESS = 1 + 1e-6

_JOB_FIELDS = tuple(field.name for field in fields(Job))


def _nodes_of(resident: Resident) -> int:
    """The further nodes that a job has now."""
    return resident.further_nodes + resident.more_nodes


def _holder(job: Job) -> _Holder:
    return job.project, job.user


def _inside_user(job: Job) -> tuple[int, int, str]:
    return -job.priority, job.order, job.job_id


def _being_loaded(number: int, whose: str = "") -> str:
    return f"{number} job{whose} is being loaded" if number == 1 else f"{number} jobs{whose} are being loaded"


@dataclass(kw_only=True)
class _HeadOfQueue:
    """The first job that the free memory does not hold: when it is predicted to start, which resident jobs' memory it
    gets then, what is in memory with it, and how much memory that leaves free."""

    job: Job
    start_s: float
    freed_by: list[Resident]
    memory: HeldMemory
    spare_bytes: int


class _Round:
    """One decision. What is resident and free changes while it is made."""

    def __init__(
        self, node: Node, shares: Shares, rules: Rules, now_s: float, held: QuotaCheck, residents: Sequence[Resident]
    ) -> None:
        self._node, self._shares, self._rules, self._now_s, self._held = node, shares, rules, now_s, held
        self._residents = list(residents)
        self._memory = HeldMemory(one.held for one in residents)
        self._free_nodes = sum(not why for why in node.further.values()) - sum(map(_nodes_of, residents))
        self._waiting: Sequence[Job] = ()
        self._next: _HeadOfQueue | None = None
        self._start: list[tuple[str, tuple[str, ...]]] = []
        self._num_expected: dict[str, int] = defaultdict(int)
        """By kind: devices for jobs that are loaded as soon as fewer are being loaded."""
        self._why: dict[str, str] = {}
        self._behind_quota: set[str] = set()
        self._parts: dict[tuple[str, str, int, tuple[str, ...]], float] = {}
        self._places = {name: place for place, name in enumerate(node.devices)}
        self._names: dict[str, list[str]] = defaultdict(list)
        self._sizes: dict[str, list[int]] = defaultdict(list)
        for name, size in node.devices.items():
            if name not in node.out:
                self._names[kind_of(name)].append(name)
                self._sizes[kind_of(name)].append(size)
        for of_kind in self._sizes.values():
            of_kind.sort(reverse=True)
        self._loading_of: dict[str, int] = defaultdict(int)
        self._num_loading = 0
        self._training = {one.user for one in residents if not one.is_loading and not one.is_stopping}
        for one in residents:
            self._count_loading(one)

    @property
    def _free_bytes(self) -> int:
        return self._node.host_bytes - self._memory.num_bytes

    def _needed_bytes(self, job: Job) -> int:
        """Memory that a job takes beside the resident ones."""
        return self._memory.needed_bytes(*job.held)

    def run(self, waiting: Sequence[Job], ends: Mapping[str, float | None], explain: bool) -> Decision:
        """Goes through the jobs in their order."""
        self._waiting = [job for job in waiting if self._may_be_loaded(job)]
        givers: list[Resident] = []
        for job in in_order(self._waiting, self._residents, self._shares, self._rules, self._now_s):
            if self._start and (message := self._held(job, self._residents)):
                self._why[job.job_id] = message
                self._behind_quota.add(job.job_id)
            elif self._needed_bytes(job) > self._free_bytes and self._next is None:
                givers = self._givers(job)
                self._next = self._make_next(job, givers, ends)
            elif self._devices_for(job) is None:
                self._why[job.job_id] = self._why_no_device(job)
            elif message := self._why_no_nodes(job):
                self._why[job.job_id] = message
            elif self._needed_bytes(job) <= self._free_bytes and (message := self._why_not_loading(job)):
                self._why[job.job_id] = message
                self._num_expected[job.device] += job.num_devices
            elif self._needed_bytes(job) <= self._free_bytes and (
                self._next is None or self._may_pass(job, self._next)
            ):
                self._load(job)
            elif explain:
                assert self._next is not None
                self._why[job.job_id] = self._why_behind(job, self._next)
        displaced = self._displaced_by(self._next.job, givers) if self._next else []
        if explain and self._behind_quota:
            self._name_who_is_before(waiting)
        if self._next is not None and explain:
            self._why[self._next.job.job_id] = self._why_next(self._next, displaced)
        changes = Changes(self._residents, self._node, self._shares, self._rules, self._now_s, self._num_expected).make(
            [job_id for job_id, _ in self._start]
        )
        return Decision(
            start=tuple((job_id, changes.devices.get(job_id, devices)) for job_id, devices in self._start),
            displace=tuple(one.job_id for one in displaced),
            change=changes.of_residents,
            leave=tuple(changes.leaving),
            why=self._why,
        )

    def _may_be_loaded(self, job: Job) -> bool:
        """Whether only other jobs' memory can be in the way; otherwise the reason is noted."""
        sizes = self._sizes.get(job.device, ())
        if job.host_bytes > self._node.host_bytes:
            need, limit = size_text(job.host_bytes), size_text(self._node.host_bytes)
            message = f"cannot start: it needs {need} of host memory and the node has {limit} for jobs"
        elif not sizes:
            names = ", ".join(name for name in self._node.devices if name not in self._node.out) or "none"
            message = f"cannot start: it needs a device of the kind {job.device} and the node's devices are: {names}"
            message += self._node.out_text(job.device)
        elif job.num_devices > len(sizes):
            names = ", ".join(self._names[job.device])
            message = f"cannot start: it needs {job.num_devices} {job.device} devices and the node has: {names}"
            if out := self._node.out_text(job.device):
                message += f"{out}; with gpus: {len(sizes)}-{job.most_devices} it would run on the others"
        elif job.device_bytes > (limit_bytes := sizes[job.num_devices - 1]):
            need, limit = size_text(job.device_bytes), size_text(limit_bytes)
            each = " on each of its devices" if job.num_devices > 1 else ""
            message = f"cannot start: it needs {need} of device memory{each} and {limit} are available"
        elif message := self._held(job, self._residents):
            self._behind_quota.add(job.job_id)
        else:
            message = self._why_no_nodes(job)
        if message:
            self._why[job.job_id] = message
        return not message

    def _name_who_is_before(self, waiting: Sequence[Job]) -> None:
        """Say of each job that a quota holds back whose turn comes first, where that is another waiting job of the same
        user."""
        before: dict[_Holder, str] = {}
        held = [job for job in waiting if job.job_id in self._behind_quota]
        for job in in_order(held, self._residents, self._shares, self._rules, self._now_s):
            what, _, freed = self._why[job.job_id].partition("; ")
            if (first := before.get(_holder(job))) is not None and freed.startswith(("job ", "cancel or wait for ")):
                self._why[job.job_id] = f"{what}; job {first} is before it"
            before[_holder(job)] = job.job_id

    def _load(self, job: Job) -> None:
        devices = self._devices_for(job)
        assert devices is not None
        self._start.append((job.job_id, devices))
        loaded = as_resident(job, devices, self._now_s)
        self._residents.append(loaded)
        self._count_loading(loaded)
        self._memory.add(*job.held)
        self._free_nodes -= job.further_nodes
        self._parts.clear()

    def _devices_for(self, job: Job) -> tuple[str, ...] | None:
        """The devices with the fewest resident jobs, of those the ones with the least work ahead, in the node's order.

        None where too few devices have room: the processes of the jobs that share a device must leave the largest of
        them enough memory for its turn.
        """
        places = self._places
        load = {name: (0, 0.0, name, job.device_bytes) for name in self._names[job.device]}
        for one in self._residents:
            for device in one.devices:
                if device in load:
                    num, work_s, name, most_bytes = load[device]
                    work_s += math.inf if one.remaining_s is None else one.remaining_s
                    load[name] = (num + 1, work_s, name, max(most_bytes, one.device_bytes))
        process_bytes = 0 if job.device == "host" else self._node.process_bytes
        sizes = self._node.devices
        fits = [one for one in load.values() if one[3] + one[0] * process_bytes <= sizes[one[2]]]
        if len(fits) < job.num_devices:
            return None
        if job.num_devices == len(fits):
            return tuple(name for _, _, name, _ in fits)
        chosen = sorted(fits, key=lambda one: (one[0], one[1], places[one[2]]))[: job.num_devices]
        return tuple(sorted((name for _, _, name, _ in chosen), key=places.__getitem__))

    def _why_not_loading(self, job: Job) -> str:
        """Return why a job for which there is room is not loaded now: as many as may be at a time are being loaded."""
        most, most_of_user = self._rules.max_loading_jobs, self._rules.max_loading_jobs_of_user
        of_user = self._loading_of[job.user]
        while_others = ""
        # Even at the lowest priority each takes a few hundredths of a processor from those that train.
        if most_of_user is not None and self._training - {job.user}:
            most_of_user, while_others = 1, " while jobs of others train"
        if most_of_user is not None and of_user >= most_of_user:
            return (
                f"{_being_loaded(of_user, f' of user {job.user}')}, and {most_of_user} may be at a time{while_others}; "
                "it follows when one is ready"
            )
        if most is not None and self._num_loading >= most:
            return f"{_being_loaded(self._num_loading)}, and {most} may be at a time; it follows in the order of shares"
        return ""

    def _count_loading(self, one: Resident) -> None:
        if one.is_loading and not one.is_stopping:
            self._loading_of[one.user] += 1
            # Who waits for the preparation of another one's data uses no processor; it is counted before it goes on.
            self._num_loading += not one.waits_to_prepare

    def _why_no_device(self, job: Job) -> str:
        process = size_text(self._node.process_bytes)
        return (
            f"waiting for device memory: each job that shares a GPU keeps {process} of it, and the largest needs the "
            "rest; "
            "a job that ends frees some"
        )

    def _why_no_nodes(self, job: Job) -> str:
        """Why a job waits for other nodes; nothing where enough are free."""
        if job.further_nodes <= max(0, self._free_nodes):
            return ""
        needs = f"it needs {job.further_nodes} further node{'' if job.further_nodes == 1 else 's'}"
        if job.further_nodes > len(self._node.further):
            return f"cannot start: {needs} and this one knows {len(self._node.further)}"
        ours = [one for one in self._residents if _nodes_of(one)]
        reasons = [f"{name} {why}" for name, why in self._node.further.items() if why]
        if ours:
            num_used, verb = sum(map(_nodes_of, ours)), "uses" if len(ours) == 1 else "use"
            reasons.append(f"{jobs_text([one.job_id for one in ours])} {verb} {num_used} of {len(self._node.further)}")
        return f"waiting for nodes: {needs}; {', '.join(reasons)}"

    def _make_next(self, job: Job, givers: Sequence[Resident], ends: Mapping[str, float | None]) -> _HeadOfQueue:
        """Goes through the times at which memory becomes free, until there is enough of it for the job."""
        all_ends = {**predicted_ends(self._residents, self._shares, self._now_s), **ends}
        gives = {one.job_id for one in givers}

        def release_s(one: Resident) -> float:
            end_s = all_ends.get(one.job_id)
            end_s = math.inf if end_s is None else end_s
            if one.job_id in gives:
                end_s = min(end_s, displaceable_s(one, self._rules))
            return self._now_s if one.is_stopping else max(self._now_s, end_s)

        start_s, memory, freed_by = self._now_s, self._memory.copy(), list[Resident]()
        for time_s, _, _, one in sorted(
            (release_s(one), not one.is_stopping, one.job_id, one) for one in self._residents
        ):
            if not self._holds(memory, job):
                start_s = time_s
                freed_by.append(one)
            elif time_s > start_s:
                break
            memory.remove(*one.held)
        start_s = self._node.open_from(start_s)
        memory.add(*job.held)
        # While the start is not known, any memory may be what the job is waiting for.
        spare_bytes = self._node.host_bytes - memory.num_bytes if start_s < math.inf else 0
        return _HeadOfQueue(job=job, start_s=start_s, freed_by=freed_by, memory=memory, spare_bytes=spare_bytes)

    def _holds(self, memory: HeldMemory, job: Job) -> bool:
        """Whether there is room for a job beside what is in memory."""
        return memory.num_bytes + memory.needed_bytes(*job.held) <= self._node.host_bytes

    def _may_pass(self, job: Job, first: _HeadOfQueue) -> bool:
        """Whether the job has ended before the next one starts, or leaves the memory that the next one needs."""
        ready_s = self._now_s + job.load_s
        if job.remaining_s is not None and ready_s + job.remaining_s <= first.start_s < math.inf:
            part = self._part_of(job)
            if part > 0 and ready_s + job.remaining_s / part <= first.start_s:
                return True
        needed_bytes = first.memory.needed_bytes(*job.held)
        if needed_bytes > first.spare_bytes:
            return False
        first.memory.add(*job.held)
        first.spare_bytes -= needed_bytes
        return True

    def _part_of(self, job: Job) -> float:
        """The share of its devices that the job has among the resident ones: the smallest of them."""
        devices = self._devices_for(job)
        if devices is None:
            return 0.0
        key = (job.project, job.user, job.priority, devices)
        if key not in self._parts:
            of_devices = []
            for device in devices:
                jobs = [one for one in self._residents if device in one.devices and not one.is_stopping]
                of_devices.append(steady_shares([*jobs, job], self._shares)[job.job_id])
            self._parts[key] = min(of_devices)
        return self._parts[key]

    def _givers(self, job: Job) -> list[Resident]:
        """The resident jobs that the job may displace once their residence is long enough, the furthest above its share
        first.

        The job must still be considered first when those wait again, with their users' other jobs: otherwise they would
        swap back.
        """
        excess = self._excess()
        above = [
            one
            for one in self._residents
            if excess[_holder(one)] > LEAST_EXCESS
            and not (one.unload_s is None or one.is_stopping or one.priority > URGENT_PRIORITY)
        ]
        loaded = {job.job_id, *(job_id for job_id, _ in self._start)}
        waiting: dict[_Holder, list[Job]] = defaultdict(list)
        for one in self._waiting:
            if one.job_id not in loaded:
                waiting[_holder(one)].append(one)
        givers: list[Resident] = []
        rivals: dict[str, Job] = {}
        for one in sorted(above, key=lambda one: (-excess[_holder(one)], one.resident_since_s, one.job_id)):
            mine = {one.job_id: as_waiting(one, self._now_s)}
            if theirs := waiting[_holder(one)]:
                # The order of a user's jobs depends on these two only.
                for rival in min(theirs, key=_inside_user), min(theirs, key=lambda job: (job.since_s, job.order)):
                    mine[rival.job_id] = rival
            others = [other for other in self._residents if other is not one and other not in givers]
            jobs = [job, *rivals.values(), *mine.values()]
            if in_order(jobs, others, self._shares, self._rules, self._now_s)[0] is job:
                givers.append(one)
                rivals |= mine
        return givers

    def _excess(self) -> dict[_Holder, float]:
        """What each user has used relative to what the weights give, among the users who have jobs here; 1 is exactly
        the share."""
        users = sorted({_holder(job) for job in (*self._waiting, *self._residents)})
        uses = {user: self._shares.use_of(*user, self._now_s) for user in users}
        used_s = sum(uses.values())
        weights: dict[str, float] = defaultdict(float)
        for project, user in users:
            weights[project] += self._shares.weight_of("user", user)
        total = sum(self._shares.weight_of("project", project) for project in weights)
        result = {}
        for project, user in users:
            due = self._shares.weight_of("project", project) / total
            due *= self._shares.weight_of("user", user) / weights[project]
            result[project, user] = uses[project, user] / used_s / due if used_s > 0 else 0.0
        return result

    def _displaced_by(self, job: Job, givers: Sequence[Resident]) -> list[Resident]:
        """The resident jobs to displace now: none where that does not make enough room, or where enough is being freed
        already."""
        memory = HeldMemory(one.held for one in self._residents if not one.is_stopping)
        chosen = []
        for one in givers:
            if not self._holds(memory, job) and displaceable_s(one, self._rules) <= self._now_s:
                chosen.append(one)
                memory.remove(*one.held)
        if not self._holds(memory, job):
            return []
        for one in reversed(chosen):
            memory.add(*one.held)
            if self._holds(memory, job):
                chosen.remove(one)
            else:
                memory.remove(*one.held)
        return chosen

    def _why_next(self, first: _HeadOfQueue, displaced: Sequence[Resident]) -> str:
        stopping = [one.job_id for one in first.freed_by if one.is_stopping]
        names = jobs_text([one.job_id for one in first.freed_by])
        plural = len(first.freed_by) > 1
        if displaced:
            unloaded = jobs_text([one.job_id for one in displaced])
            how = f"{unloaded} {'are' if len(displaced) > 1 else 'is'} checkpointed and unloaded to make room"
        elif len(stopping) == len(first.freed_by):
            how = f"{names} {'are' if plural else 'is'} stopping and {'free' if plural else 'frees'} it"
        elif first.start_s == math.inf:
            how = (
                f"{names} {'hold' if plural else 'holds'} it, and when {'they end' if plural else 'it ends'} is not "
                "known yet"
            )
        else:
            how = f"{names} {'free' if plural else 'frees'} it at about {time_text(first.start_s, self._now_s)}"
        return f"{self._needs(first.job)}; {how}"

    def _why_behind(self, job: Job, first: _HeadOfQueue) -> str:
        if self._needed_bytes(job) > self._free_bytes:
            return f"{self._needs(job)}; job {first.job.job_id} is next"
        behind = (
            f"waiting behind job {first.job.job_id}, which is next and waits for "
            f"{size_text(self._needed_bytes(first.job))} of host memory"
        )
        if first.start_s == math.inf:
            return f"{behind}; when that starts is not known yet, so no other job may pass it"
        if job.remaining_s is None:
            return f"{behind}; how long this job takes is not known, so it may not pass"
        return f"{behind}; this job would delay it beyond {time_text(first.start_s, self._now_s)}"

    def _needs(self, job: Job) -> str:
        free_bytes = max(0, self._free_bytes)
        return f"waiting for {size_text(self._needed_bytes(job))} of host memory, {size_text(free_bytes)} are free"

"""When jobs are expected to start and to end: the same decisions and turns as the daemon's, played forward without new
jobs."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from horizon_server.records.plan import HeldMemory
from horizon_server.records.sharing import Outlook
from horizon_server.scheduling.admission import (
    QuotaCheck,
    as_resident,
    as_waiting,
    decide,
    displaceable_s,
    in_order,
)
from horizon_server.scheduling.ranges import on_number
from horizon_server.scheduling.shares import Shares
from horizon_server.scheduling.state import Job, Node, Resident, Rules, kind_of
from horizon_server.scheduling.texts import ITS_SHARE, span_text
from horizon_server.scheduling.turns import URGENT_PRIORITY, next_turn, steady_shares
from horizon_server.texts import size_text

# A turn far in the future may be long: its length is this part of the time since the start, so that days take as many
# turns as hours.
TURN_PART = 1 / 500
# So does the time between decisions that no end of a job causes: residences become long enough, and shares change.
CHECK_PART = 1 / 50
CHECKS_PER_RESIDENCE = 16
# A job that needs less has ended: times since 1970 are exact to a fraction of a microsecond only.
LEAST_REMAINING_S = 1e-3
# Where a job of unknown length keeps the others from starting, nothing more is learned.
HORIZON_S = 2 * 365 * 86400.0
# How far ahead a maintenance window is named to jobs whose end is not known.
NEAR_S = 86400.0


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """When a job is expected to be loaded and to end (Unix seconds); None where that depends on a job of unknown
    length."""

    start_s: float | None = None
    end_s: float | None = None


def simulate(
    waiting: Sequence[Job],
    residents: Sequence[Resident],
    node: Node,
    shares: Shares,
    rules: Rules,
    now_s: float,
    held: QuotaCheck,
) -> dict[str, Estimate]:
    """Estimates for all jobs, by id, as if no other job were submitted and each needed what is predicted. `shares`
    stays as it is."""
    return _Simulation(waiting, residents, node, shares, rules, now_s, held).run()


def outlooks(
    waiting: Sequence[Job],
    residents: Sequence[Resident],
    node: Node,
    shares: Shares,
    rules: Rules,
    now_s: float,
    held: QuotaCheck,
    *,
    asked: str = "",
) -> dict[str, Outlook]:
    """Where each waiting and resident job stands, by id. Of the waiting job `asked` the share is the one that it starts
    with."""
    simulation = _Simulation(waiting, residents, node, shares, rules, now_s, held)
    estimates = simulation.run()
    decision = decide(waiting, residents, node, shares, rules, now_s, held, ends=simulation.released_s)
    why = {job.job_id: decision.why.get(job.job_id, "starts now") for job in waiting}
    present = [one for one in residents if not one.is_stopping]
    parts = _parts(present, shares)
    why |= {one.job_id: _why_resident(one, _beside(one, present), parts[one.job_id], node) for one in present}
    why |= dict.fromkeys(
        decision.leave,
        "a device of it is out of service: it is checkpointed and queued again",
    )
    why |= dict.fromkeys(
        decision.displace,
        "its user is above the share: it is checkpointed, unloaded and queued again to make room",
    )
    why |= {one.job_id: "stopping: its host memory is being freed" for one in residents if one.is_stopping}
    memory = HeldMemory(one.held for one in residents)
    why = {one.job_id: why[one.job_id] + _base_text(one, memory) for one in (*waiting, *residents)}
    places = {job.job_id: i for i, job in enumerate(in_order(waiting, residents, shares, rules, now_s), 1)}
    if asked:
        parts[asked] = simulation.first_shares.get(asked, 0.0)
    return {
        job_id: Outlook(
            why=text + _pause_text(estimates[job_id], node, now_s),
            share=parts.get(job_id, 0.0),
            estimated_start_s=estimates[job_id].start_s,
            estimated_end_s=estimates[job_id].end_s,
            place=places.get(job_id, 0),
        )
        for job_id, text in why.items()
    }


def _base_text(job: Job, memory: HeldMemory) -> str:
    """With how many resident jobs a job shares the frozen weights under its adapters; nothing where it is with none."""
    num_others = memory.num_on(job.base) - isinstance(job, Resident)
    if job.base is None or num_others < 1:
        return ""
    others = "1 job" if num_others == 1 else f"{num_others} jobs"
    shared = "is shared" if isinstance(job, Resident) else "is in memory already, shared"
    return f"; its base ({size_text(job.base.num_bytes)}) {shared} with {others}"


def _pause_text(estimate: Estimate, node: Node, now_s: float) -> str:
    """What a maintenance window ahead means for a job; nothing where the job ends before, or that is not known and the
    window is far."""
    window = node.window
    if window is None or window.start_s <= now_s:  # while it lasts, the reasons themselves say so
        return ""
    if window.start_s - now_s > NEAR_S if estimate.end_s is None else estimate.end_s <= window.start_s:
        return ""
    message = f" ({window.message})" if window.message else ""
    return f"; paused from {span_text(window.start_s, window.end_s, now_s)}{message}"


def _beside(job: Resident, jobs: Sequence[Resident]) -> list[Resident]:
    """The jobs that share a device with the job, itself among them."""
    return [one for one in jobs if not set(job.devices).isdisjoint(one.devices)]


def _parts(jobs: Sequence[Resident], shares: Shares) -> dict[str, float]:
    """The share of its devices that each job has, by id; of several devices the smallest share, as it runs on all or
    on none."""
    parts: dict[str, float] = {}
    for device in {device for one in jobs for device in one.devices}:
        of_device = steady_shares([one for one in jobs if device in one.devices], shares)
        parts |= {job_id: min(part, parts.get(job_id, part)) for job_id, part in of_device.items()}
    return parts


def _why_resident(job: Resident, jobs: Sequence[Resident], part: float, node: Node) -> str:
    kind = job.device
    is_one_of_many = sum(kind_of(name) == kind for name in node.devices) > 1
    device = " and ".join(job.devices) if is_one_of_many else {"cuda": "the GPU"}.get(kind, f"the {kind} device")
    if job.more_devices:
        device += f" ({len(job.devices)} of {job.num_devices} to {job.most_devices} devices)"
    if len(jobs) == 1:
        return f"resident, the only job on {device}"
    text = f"resident, {len(jobs)} jobs share {device}"
    if part > 0:
        share = Fraction(part).limit_denominator(12)
        return f"{text}{ITS_SHARE}{share if abs(share - part) < 1e-6 else format(part, '.0%')}"
    first = max(
        jobs, key=lambda one: (one.priority > URGENT_PRIORITY or one.user == job.user, one.priority, one.job_id)
    )
    if first.priority > URGENT_PRIORITY:
        return f"{text}; the urgent job {first.job_id} with priority {first.priority} goes first"
    return f"{text}; job {first.job_id} of the same user, with priority {first.priority}, goes first"


class _Simulation:
    """The node at `_time_s`. Events: a turn ends on a device, a job is loaded, a job's memory is free, or decisions are
    due."""

    def __init__(
        self,
        waiting: Sequence[Job],
        residents: Sequence[Resident],
        node: Node,
        shares: Shares,
        rules: Rules,
        now_s: float,
        held: QuotaCheck,
    ) -> None:
        self._node, self._shares, self._rules, self._held = node, shares.copy(), rules, held
        self._bounds_loading = rules.max_loading_jobs is not None or rules.max_loading_jobs_of_user is not None
        self._began_s = self._time_s = now_s
        self._waiting = {job.job_id: job for job in waiting}
        self._residents = {one.job_id: one for one in residents}
        self._starts_s = {one.job_id: one.resident_since_s for one in residents}
        self._ends_s: dict[str, float] = {}
        # By device: the job that has the turn, since when, and the event that ends it; 0 while the job waits for
        # another of its devices.
        self._turns: dict[str, tuple[str, float, int] | None] = dict.fromkeys(node.devices)
        self._events: list[tuple[float, int, str, str]] = []
        self._num_events = 0
        # Whether these are queued again once they have stopped is not known here: a user may have paused or cancelled
        # them.
        self._leaving = {one.job_id for one in residents if one.is_stopping}
        self._looks_s: set[float] = set()
        """When decisions are due because a job has had its devices for long enough."""
        self.first_shares: dict[str, float] = {}
        """The share of its device that each job has right after its start."""
        self.released_s: dict[str, float | None] = dict.fromkeys(self._residents)
        """When the memory of the jobs that are resident at the start becomes free."""

    def run(self) -> dict[str, Estimate]:
        """Plays until every job of known length has ended, or nothing can happen to it."""
        jobs = [*self._waiting.values(), *self._residents.values()]
        num_to_end = sum(job.remaining_s is not None and job.job_id not in self._leaving for job in jobs)
        for job_id in self._leaving:
            self._at(self._time_s + (self._residents[job_id].unload_s or 0.0) / 2, "free", job_id)
        for one in self._residents.values():
            self._await_ready(one)
        window = self._node.window
        if window is not None:
            if window.start_s > self._time_s:
                self._at(window.start_s, "close", "")
            self._at(max(window.end_s, self._time_s), "open", "")
        self._at(self._time_s, "check", "")
        # What happens now is played whatever is known: jobs of unknown length start too.
        while self._events and (len(self._ends_s) < num_to_end or self._events[0][0] <= self._began_s):
            self._time_s, number, kind, name = heapq.heappop(self._events)
            if self._time_s - self._began_s > HORIZON_S:
                break
            if kind == "turn":
                self._end_turn(name, number)
            elif kind == "ready":
                self._be_ready(name)
            elif kind == "free":
                self._free(name)
            elif kind == "look":
                self._decide()
            elif kind == "close":
                self._close()
            elif kind == "open":
                self._node = replace(self._node, is_open=self._node.window is not None and self._node.window.opens)
                self._check()
            else:
                self._check()
        return {
            job.job_id: Estimate(start_s=self._starts_s.get(job.job_id), end_s=self._ends_s.get(job.job_id))
            for job in jobs
        }

    def _at(self, time_s: float, kind: str, name: str) -> int:
        self._num_events += 1
        heapq.heappush(self._events, (time_s, self._num_events, kind, name))
        return self._num_events

    def _await_ready(self, one: Resident) -> None:
        if one.is_loading or one.ready_s > self._time_s:
            self._at(max(one.ready_s, self._time_s), "ready", one.job_id)

    def _be_ready(self, job_id: str) -> None:
        """A job is loaded: it takes turns, and the next one may be loaded."""
        one = self._residents.get(job_id)
        if one is None:
            return
        self._residents[job_id] = replace(one, is_loading=False)
        if one.is_loading and ((self._waiting and self._bounds_loading) or self._has_ranges):
            self._decide()
        else:
            for device in one.devices:
                self._grant_if_idle(device)

    def _check(self) -> None:
        """Decides, and again where a residence becomes long enough or shares may have changed, as long as a job waits
        for memory."""
        self._decide()
        if self._waiting and self._residents:
            pause_s = self._rules.max_residence_s / CHECKS_PER_RESIDENCE
            check_s = self._time_s + max(pause_s, CHECK_PART * (self._time_s - self._began_s))
            over_s = (displaceable_s(one, self._rules) for one in self._residents.values() if not one.is_stopping)
            self._at(min([check_s, *(one for one in over_s if one > self._time_s)]), "check", "")

    def _close(self) -> None:
        """Begins the maintenance window: every resident job is checkpointed and waits."""
        self._node = replace(self._node, is_open=False)
        for one in list(self._residents.values()):
            if not one.is_stopping:
                self._displace(one.job_id)

    def _displace(self, job_id: str) -> None:
        self._stop_turn(job_id)
        one = self._residents[job_id] = replace(self._residents[job_id], is_stopping=True)
        self._at(self._time_s + (one.unload_s or 0.0) / 2, "free", job_id)

    @property
    def _has_ranges(self) -> bool:
        return any(one.more_devices for one in self._residents.values())

    def _change(self, job_id: str, devices: tuple[str, ...]) -> None:
        """A job continues on other devices, after its processes were started again."""
        self._stop_turn(job_id)
        one = self._residents[job_id]
        changed = self._residents[job_id] = replace(
            one,
            devices=devices,
            remaining_s=on_number(one.remaining_s, len(one.devices), len(devices)),
            on_since_s=self._time_s,
            ready_s=self._time_s + one.change_s,
        )
        self._await_ready(changed)

    def _look_again(self) -> None:
        """Decides again once a job has had its devices for long enough to change them."""
        for one in self._residents.values():
            look_s = one.on_since_s + self._rules.keep_devices_s
            if one.more_devices and look_s > self._time_s and look_s not in self._looks_s:
                self._looks_s.add(look_s)
                self._at(look_s, "look", one.job_id)

    def _decide(self) -> None:
        """Loads, displaces and moves what the daemon would now, and gives idle devices to their next jobs."""
        if self._waiting or self._has_ranges or self._node.out:
            waiting, residents = list(self._waiting.values()), list(self._residents.values())
            decision = decide(
                waiting, residents, self._node, self._shares, self._rules, self._time_s, self._held, explain=False
            )
            for job_id, devices in decision.start:
                one = self._residents[job_id] = as_resident(self._waiting.pop(job_id), devices, self._time_s)
                self._await_ready(one)
                self._starts_s.setdefault(job_id, self._time_s)
                if job_id not in self.first_shares:
                    present = [other for other in self._residents.values() if not other.is_stopping]
                    self.first_shares[job_id] = _parts(_beside(one, present), self._shares)[job_id]
            for job_id in (*decision.displace, *decision.leave):
                self._displace(job_id)
            for job_id, devices in decision.change:
                self._change(job_id, devices)
            self._look_again()
        for device in self._turns:
            self._grant_if_idle(device)

    def _grant_if_idle(self, device: str) -> None:
        if self._turns[device] is None:
            self._grant(device)

    def _grant(self, device: str) -> None:
        """Gives an idle device to its next job. One that needs more devices keeps it until it has all of them."""
        slice_s = max(self._rules.time_slice_s, TURN_PART * (self._time_s - self._began_s))
        ready = self._ready(device)
        # Kept idle only for a job that is next on the devices that it does not have yet, where others want it.
        jobs = [one for one in ready if self._is_due(one, device)] or ready
        chosen = next_turn(jobs, self._shares, self._time_s, rules=replace(self._rules, time_slice_s=slice_s))
        if chosen is None:
            return
        one = self._residents[chosen.job_id]
        self._turns[device] = (one.job_id, self._time_s, 0)
        if device != one.devices[-1]:
            self._grant_if_idle(one.devices[one.devices.index(device) + 1])
            return
        used_s = slice_s if one.remaining_s is None else min(slice_s, one.remaining_s)
        number = self._at(self._time_s + used_s, "turn", device)
        self._turns |= dict.fromkeys(one.devices, (one.job_id, self._time_s, number))

    def _ready(self, device: str) -> list[Resident]:
        """The jobs that want the device now: those that have all of their devices before it."""
        return [
            one
            for one in self._residents.values()
            if device in one.devices
            and not one.is_stopping
            and one.ready_s <= self._time_s
            and all(self._has(one, before) for before in one.devices[: one.devices.index(device)])
        ]

    def _has(self, one: Resident, device: str) -> bool:
        turn = self._turns[device]
        return turn is not None and turn[0] == one.job_id

    def _is_due(self, one: Resident, device: str) -> bool:
        """Whether the job would be next on all of its devices after this one."""
        for later in one.devices[one.devices.index(device) + 1 :]:
            turn, ready = self._turns[later], self._ready(later)
            holder = [replace(self._residents[turn[0]], since_s=self._time_s)] if turn else []
            rivals = [other for other in ready if not turn or other.job_id != turn[0]]
            if next_turn([*holder, *rivals, one], self._shares, self._time_s, rules=self._rules) is not one:
                return False
        return True

    def _stop_turn(self, job_id: str) -> None:
        """Ends the job's turn on its devices, if it has it, and charges it for each of them."""
        one = self._residents[job_id]
        had = [device for device in one.devices if self._has(one, device)]
        turn = self._turns[had[0]] if had else None
        if turn is not None and turn[2]:
            used_s = self._time_s - turn[1]
            self._shares.charge(one.project, one.user, used_s * len(one.devices), self._time_s)
            remaining_s = None if one.remaining_s is None else max(0.0, one.remaining_s - used_s)
            self._residents[job_id] = replace(one, since_s=self._time_s, remaining_s=remaining_s)
        self._turns |= dict.fromkeys(had)

    def _end_turn(self, device: str, number: int) -> None:
        turn = self._turns[device]
        if turn is None or turn[2] != number:
            return  # the job was displaced in that turn
        job_id = turn[0]
        self._stop_turn(job_id)
        one = self._residents[job_id]
        if one.remaining_s is not None and one.remaining_s < LEAST_REMAINING_S:
            self._ends_s[job_id] = self._time_s
            self._release(job_id)
            self._decide()
        else:
            for freed in one.devices:
                self._grant_if_idle(freed)

    def _free(self, job_id: str) -> None:
        """A stopping job's memory is free; one that was displaced waits again."""
        one = self._residents[job_id]
        self._release(job_id)
        if job_id not in self._leaving:
            self._waiting[job_id] = as_waiting(one, self._time_s)
        self._decide()

    def _release(self, job_id: str) -> None:
        del self._residents[job_id]
        if self.released_s.get(job_id, 0.0) is None:
            self.released_s[job_id] = self._time_s

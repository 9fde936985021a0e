"""A node that is played second by second with the real decisions, turns and quotas, and that checks itself at each of
them. Its jobs use one device each."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from tests.sharing_parts import NOW

from horizon_server.records.sharing import Allowance, Quota
from horizon_server.scheduling.admission import as_resident, as_waiting, decide, displaceable_s
from horizon_server.scheduling.quotas import why_not_resident
from horizon_server.scheduling.shares import Shares
from horizon_server.scheduling.simulation import Estimate, simulate
from horizon_server.scheduling.state import Job, Node, Resident, Rules
from horizon_server.scheduling.turns import MAX_TURN_WAIT_SLICES, next_turn


class Life:
    """Jobs on a node. A job needs `left_s` device seconds in truth, whatever its `remaining_s` predicts, in steps of
    `step_s`; before its first turn it is loaded for `load_s`."""

    def __init__(
        self,
        node: Node,
        rules: Rules,
        shares: Shares,
        quotas: Mapping[str, Quota] | None = None,
        *,
        step_s: float = 1.0,
        unload_s: float = 20.0,
    ) -> None:
        self.node, self.rules, self.shares, self.quotas = node, rules, shares, quotas or {}
        self.step_s, self.unload_s, self.now_s = step_s, unload_s, NOW
        self.waiting: dict[str, Job] = {}
        self.residents: dict[str, Resident] = {}
        self.paused: dict[str, Job] = {}
        self.ended: dict[str, str] = {}
        self.left_s: dict[str, float] = {}
        self.started_s: dict[str, float] = {}
        self.ended_s: dict[str, float] = {}
        self.used_s: dict[str, float] = defaultdict(float)
        """Device seconds by user."""
        self.num_displaced = 0
        self.longest_turn_wait = 0.0
        """The longest wait for the device, relative to the stated bound."""
        self.longest_without_s: dict[str, float] = defaultdict(float)
        """The longest time in which a user had a job that waited for memory, and no resident one."""
        self._without_since_s: dict[str, float] = {}
        self._turns: dict[str, tuple[str, float, float] | None] = dict.fromkeys(node.devices)
        self._stopping: dict[str, tuple[float, str]] = {}
        self._most_sharing: dict[str, int] = {}
        self._next_check_s = NOW
        self._order = 0

    # What users and workers do.

    def submit(self, job: Job, left_s: float) -> None:
        self._order += 1
        self.waiting[job.job_id] = dataclasses.replace(
            job, order=self._order, since_s=self.now_s, unload_s=self.unload_s
        )
        self.left_s[job.job_id] = left_s
        self._next_check_s = self.now_s

    def cancel(self, job_id: str) -> None:
        self._leave(job_id, "cancelled")

    def pause(self, job_id: str) -> None:
        self._leave(job_id, "paused")

    def resume(self, job_id: str) -> None:
        self.submit(self.paused.pop(job_id), self.left_s[job_id])

    def open(self, is_open: bool) -> None:
        self.node = dataclasses.replace(self.node, is_open=is_open)
        self._next_check_s = self.now_s

    def die(self, job_id: str) -> None:
        """The worker of a resident job dies: its turn and its memory are free at once."""
        one = self.residents[job_id]
        self._give_back(one.devices[0], job_id)
        self._stopping.pop(job_id, None)
        del self.residents[job_id]
        self.ended[job_id], self.ended_s[job_id] = "failed", self.now_s
        self._next_check_s = self.now_s

    def set_priority(self, job_id: str, priority: int) -> None:
        for jobs in (self.waiting, self.residents):
            if job_id in jobs:
                jobs[job_id] = dataclasses.replace(jobs[job_id], priority=priority)  # type: ignore[assignment]

    def _leave(self, job_id: str, how: str) -> None:
        if job_id in self.residents:
            self._stop(job_id, how)
        elif how == "paused":
            self.paused[job_id] = self.waiting.pop(job_id)
        else:
            del self.waiting[job_id]
            self.ended[job_id] = how
        self._next_check_s = self.now_s

    def _stop(self, job_id: str, how: str) -> None:
        if job_id not in self._stopping:
            self._give_back(self.residents[job_id].devices[0], job_id)
            self.residents[job_id] = dataclasses.replace(self.residents[job_id], is_stopping=True)
            self._stopping[job_id] = (self.now_s + self.unload_s / 2, how)

    # What one can see.

    def turn_s(self, job_id: str) -> float:
        """How long the job has had its present turn; 0 where it has none."""
        return next((self.now_s - turn[1] for turn in self._turns.values() if turn and turn[0] == job_id), 0.0)

    def known_s(self, job_id: str) -> float | None:
        """Device seconds that the job still needs, known from its steps; None before the first."""
        one, turn_s = self.residents.get(job_id), self.turn_s(job_id)
        if one is None or not (turn_s or one.since_s > one.resident_since_s):
            return None
        return max(1e-3, self.left_s[job_id] - turn_s)

    def estimates(self, load_s: Callable[[str], float]) -> dict[str, Estimate]:
        """What the daemon says of each job, by id: what a job needs is predicted before its first step and known after
        it, and loading is expected to take `load_s`."""
        shares, residents = self.shares.copy(), list[Resident]()
        for one in self.residents.values():
            if (turn_s := self.turn_s(one.job_id)) > 0:
                shares.charge(one.project, one.user, turn_s, self.now_s)
            known_s, usual_s = self.known_s(one.job_id), load_s(one.job_id)
            values = {"remaining_s": one.remaining_s if known_s is None else known_s, "load_s": usual_s}
            if one.is_loading:
                values["ready_s"] = one.resident_since_s + usual_s
            residents.append(dataclasses.replace(one, **values))  # type: ignore[arg-type]
        waiting = [dataclasses.replace(one, load_s=load_s(one.job_id)) for one in self.waiting.values()]
        return simulate(waiting, residents, self.node, shares, self.rules, self.now_s, self.held)

    def fork(self) -> Life:
        """The same jobs on the same node, to be played on alone."""
        other = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, dict):
                setattr(other, name, value.copy())
        other.shares = self.shares.copy()
        return other

    # What the daemon does.

    def advance(self, until_s: float) -> None:
        """Plays to a time."""
        while True:
            if self.now_s >= self._next_check_s:
                self._decide()
            for device, turn in self._turns.items():
                if turn is None:
                    self._grant(device)
            turns = [turn for turn in self._turns.values() if turn]
            events_s = [turn[2] for turn in turns] + [time_s for time_s, _ in self._stopping.values()]
            events_s += [one.ready_s for one in self.residents.values() if one.is_loading]
            next_s = min([*events_s, self._next_check_s, until_s])
            if next_s >= until_s and not (events_s and min(events_s) <= until_s):
                self.now_s = max(self.now_s, until_s)
                return
            self.now_s = max(self.now_s, next_s)
            for one in list(self.residents.values()):
                if one.is_loading and one.ready_s <= self.now_s:
                    self.residents[one.job_id] = dataclasses.replace(one, is_loading=False)
                    self._next_check_s = self.now_s  # the next one may be loaded
            for device, turn in self._turns.items():
                if turn and turn[2] <= self.now_s:
                    self._end_turn(device, turn[0])
            for job_id, (time_s, how) in list(self._stopping.items()):
                if time_s <= self.now_s:
                    self._stopped(job_id, how)

    def held(self, job: Job, residents: Sequence[Resident]) -> str:
        if job.user not in self.quotas:
            return ""
        own = [one for one in residents if one.user == job.user]
        allowance = Allowance(holder="user", name=job.user, quota=self.quotas[job.user])
        return why_not_resident(allowance, job, own, now_s=self.now_s)

    def _decide(self) -> None:
        decision = decide(
            list(self.waiting.values()),
            list(self.residents.values()),
            self.node,
            self.shares,
            self.rules,
            self.now_s,
            self.held,
            explain=False,
        )
        for job_id, devices in decision.start:
            job = self.waiting.pop(job_id)
            self.residents[job_id] = as_resident(job, devices, self.now_s)
            self.started_s.setdefault(job_id, self.now_s)
            self._most_sharing[job_id] = 0
        for job_id in decision.displace:
            one = self.residents[job_id]
            assert self.now_s - one.resident_since_s >= self.rules.max_residence_s
            self._stop(job_id, "displaced")
            self.num_displaced += 1
        over_s = [displaceable_s(one, self.rules) for one in self.residents.values()]
        later_s = [self.now_s + self.rules.max_residence_s / 8, *over_s]
        self._next_check_s = min(time_s for time_s in later_s if time_s > self.now_s)
        self.check()

    def check(self) -> None:
        """What must hold at any time."""
        assert sum(one.host_bytes for one in self.residents.values()) <= self.node.host_bytes
        places = (self.waiting, self.residents, self.paused, self.ended)
        assert sum(len(place) for place in places) == len(self.left_s), "a job is in two places"
        assert set().union(*places) == self.left_s.keys(), "a job is lost"
        for user, quota in self.quotas.items():
            own = [one for one in self.residents.values() if one.user == user]
            assert quota.max_resident_jobs is None or len(own) <= quota.max_resident_jobs
            assert quota.max_host_bytes is None or sum(one.host_bytes for one in own) <= quota.max_host_bytes
        served = {one.user for one in self.residents.values()}
        without = {job.user for job in self.waiting.values()} - served
        for user in without:
            since_s = self._without_since_s.setdefault(user, self.now_s)
            self.longest_without_s[user] = max(self.longest_without_s[user], self.now_s - since_s)
        self._without_since_s = {user: self._without_since_s[user] for user in without}

    def _grant(self, device: str) -> None:
        jobs = [
            one for one in self.residents.values() if device in one.devices and not (one.is_stopping or one.is_loading)
        ]
        for one in jobs:
            self._most_sharing[one.job_id] = max(self._most_sharing[one.job_id], len(jobs))
        chosen = next_turn(jobs, self.shares, self.now_s, rules=self.rules)
        if chosen is None:
            return
        bound_s = MAX_TURN_WAIT_SLICES * self.rules.time_slice_s + self.rules.time_slice_s + self.step_s
        wait = (self.now_s - chosen.since_s) / (bound_s * self._most_sharing[chosen.job_id])
        self.longest_turn_wait = max(self.longest_turn_wait, wait)
        slice_s = math.ceil(self.rules.time_slice_s / self.step_s) * self.step_s
        self._most_sharing[chosen.job_id] = 0
        self._turns[device] = (chosen.job_id, self.now_s, self.now_s + min(slice_s, self.left_s[chosen.job_id]))

    def _give_back(self, device: str, job_id: str) -> None:
        turn = self._turns[device]
        if turn is None or turn[0] != job_id:
            return
        used_s, one = self.now_s - turn[1], self.residents[job_id]
        self.shares.charge(one.project, one.user, used_s, self.now_s)
        self.used_s[one.user] += used_s
        left_s = max(0.0, self.left_s[job_id] - used_s)
        if one.remaining_s is not None:
            # As measured steps correct a prediction: in proportion to the work that is left.
            one = dataclasses.replace(one, remaining_s=one.remaining_s * left_s / max(self.left_s[job_id], 1e-9))
        self.left_s[job_id] = left_s
        self.residents[job_id] = dataclasses.replace(one, since_s=self.now_s)
        self._turns[device] = None

    def _end_turn(self, device: str, job_id: str) -> None:
        self._give_back(device, job_id)
        if self.left_s[job_id] < 1e-3:
            del self.residents[job_id]
            self.ended[job_id], self.ended_s[job_id] = "succeeded", self.now_s
            self._next_check_s = self.now_s

    def _stopped(self, job_id: str, how: str) -> None:
        del self._stopping[job_id]
        one = as_waiting(self.residents.pop(job_id), self.now_s)
        if how == "displaced":
            self.waiting[job_id] = one
        elif how == "paused":
            self.paused[job_id] = one
        else:
            self.ended[job_id] = how
        self._next_check_s = self.now_s

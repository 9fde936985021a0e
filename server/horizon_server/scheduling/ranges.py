"""When a job that may use several numbers of devices changes those that it has.

A change costs the restart of its processes, `change_s`: the worker ends after a step, and another one continues in the
same memory. So a job changes its devices

* at once where one of them is out of service: it continues on others, where the node has enough of them;
* else at most once in `keep_devices_s`, and
* gives back devices that other jobs use too, down to its fewest, where that makes these jobs faster, and they still
  need more than PAYS_TIMES what the change costs;
* takes devices that nobody uses or is about to, where the change is expected to save it more than PAYS_TIMES what it
  costs, if twice the devices are twice as fast. Jobs of the users with the lowest use come first.

A job that is being loaded takes what is left of free devices before those: it costs nothing then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Self

from horizon_server.scheduling.shares import Shares
from horizon_server.scheduling.state import Node, Resident, Rules

PAYS_TIMES = 3.0
"""What a change has to bring, relative to its cost."""


def on_number(seconds: float | None, before: int, now: int) -> float | None:
    """What takes that many seconds on `before` devices, on `now` of them, if twice the devices are twice as fast."""
    return None if seconds is None else seconds * before / now


class Changes:
    """The changes of one decision.

    `devices` has those of each job that gets others, in the node's order, and `leaving` the jobs that cannot continue.

    Args:
        residents: all of them, those included that are loaded now.
        num_expected: by kind of device, how many of them are left to jobs that are about to be loaded.
    """

    def __init__(
        self,
        residents: Sequence[Resident],
        node: Node,
        shares: Shares,
        rules: Rules,
        now_s: float,
        num_expected: Mapping[str, int],
    ) -> None:
        self._jobs = {one.job_id: one for one in residents if not one.is_stopping}
        self._node, self._shares, self._rules, self._now_s = node, shares, rules, now_s
        self._num_expected = num_expected
        self._places = {name: place for place, name in enumerate(node.devices)}
        self._starting: frozenset[str] = frozenset()
        self.devices: dict[str, tuple[str, ...]] = {}
        self.leaving: list[str] = []

    @property
    def of_residents(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """The changes of jobs that were resident before."""
        return tuple((job_id, names) for job_id, names in self.devices.items() if job_id not in self._starting)

    def make(self, starting: Sequence[str]) -> Self:
        """Decide about all jobs; `starting` are those that are loaded now."""
        self._starting = frozenset(starting)
        for one in list(self._jobs.values()):
            if not self._node.out.keys().isdisjoint(one.devices):
                self._replace(one)
        ranges = [one.job_id for one in self._jobs.values() if one.more_devices]
        for job_id in ranges:
            if self._may_change(one := self._jobs[job_id]):
                self._give_back(one)
        for job_id in (*starting, *sorted(set(ranges) - self._starting, key=self._place)):
            one = self._jobs[job_id]
            if one.more_devices and (job_id in self._starting or self._may_change(one)):
                self._take(one)
        return self

    def _place(self, job_id: str) -> tuple[float, float, int, float, str]:
        one = self._jobs[job_id]
        return (*self._shares.rank(one.project, one.user, self._now_s), -one.priority, one.resident_since_s, job_id)

    def _may_change(self, one: Resident) -> bool:
        had_s = self._now_s - one.on_since_s
        is_new = one.job_id in self.devices or had_s < self._rules.keep_devices_s
        return one.can_change and self._is_ready(one) and not is_new

    def _set(self, one: Resident, names: Sequence[str]) -> None:
        devices = tuple(sorted(names, key=self._places.__getitem__))
        self.devices[one.job_id] = devices
        self._jobs[one.job_id] = replace(one, devices=devices)

    def _others(self, one: Resident, device: str) -> list[Resident]:
        return [other for other in self._jobs.values() if other is not one and device in other.devices]

    def _best(self, one: Resident, names: Sequence[str]) -> list[str]:
        """Devices of `names`, those with the fewest other jobs first, and of those the job's own."""
        return sorted(
            names, key=lambda name: (len(self._others(one, name)), name not in one.devices, self._places[name])
        )

    def _replace(self, one: Resident) -> None:
        """Have a job continue without its devices that are out of service."""
        names = [name for name in self._node.in_service(one.device) if one.device_bytes <= self._node.devices[name]]
        if len(names) < one.num_devices:
            self.leaving.append(one.job_id)
            del self._jobs[one.job_id]
        elif one.can_change and not one.is_loading:
            kept = [name for name in one.devices if name in names]
            others = [name for name in self._best(one, names) if name not in kept]
            self._set(one, [*kept, *others[: max(0, one.num_devices - len(kept))]])

    def _give_back(self, one: Resident) -> None:
        """Leave devices to the others on them, where that makes them faster for long enough."""
        ready = [other for name in one.devices for other in self._others(one, name) if self._is_ready(other)]
        alone = [name for name in one.devices if not any(name in other.devices for other in ready)]
        shared = [name for name in one.devices if name not in alone]
        kept = [*alone, *self._best(one, shared)[: max(0, one.num_devices - len(alone))]]
        if len(kept) == len(one.devices):
            return
        speeds = {other.job_id: self._speed(other, other.devices) for other in ready}
        self._jobs[one.job_id] = replace(one, devices=tuple(kept))
        faster = [
            self._jobs[job_id]
            for job_id, before in speeds.items()
            if self._speed(self._jobs[job_id], self._jobs[job_id].devices) > before
        ]
        self._jobs[one.job_id] = one
        need_s = sum(math.inf if other.remaining_s is None else other.remaining_s for other in faster)
        if need_s > PAYS_TIMES * one.change_s:
            self._set(one, kept)

    def _is_ready(self, one: Resident) -> bool:
        """Whether the job is loaded, and so uses its devices."""
        return not one.is_loading and one.ready_s <= self._now_s

    def _take(self, one: Resident) -> None:
        free = [
            name
            for name in self._best(one, self._node.in_service(one.device))
            if not self._others(one, name) and one.device_bytes <= self._node.devices[name]
        ]
        own = [name for name in free if name in one.devices]
        more = [name for name in free if name not in own]
        more = more[: max(0, len(more) - self._num_expected.get(one.device, 0))]
        chosen = [*own, *more][: one.most_devices]
        if len(chosen) >= one.num_devices and self._speed(one, chosen) > self._speed(one, one.devices):
            remaining_s, cost_s = one.remaining_s, 0.0 if one.job_id in self._starting else one.change_s
            if remaining_s is not None:
                alone_s = remaining_s * len(one.devices)
                saved_s = alone_s / self._speed(one, one.devices) - alone_s / self._speed(one, chosen)
                if saved_s <= PAYS_TIMES * cost_s:
                    return
            self._set(one, chosen)

    def _speed(self, one: Resident, devices: Sequence[str]) -> float:
        """How many devices these are worth: it computes on all of them or on none."""
        return len(devices) / (1 + max(len(self._others(one, name)) for name in devices))

"""A step's units on their way through the queues of a device and the optimizer's, one after the other. Torch-free.

Units go through the queues as in the engine: a unit's upload waits for its slot and for the last step's update of it,
its compute for the upload, its gradient's way down for the compute, and its update for the end of the step (with
clipping) or for the gradient alone. So a phase takes as long as its slowest queue, and what is exposed at both ends of
a step comes out of the play.

Where several ranks divide the layers of a step, each rank has such queues, and a layer begins when the one before it
has handed on the first micro-batch. Ranks may compute at different speeds.

Units: seconds.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from horizon_server.records.execution import NUM_SLOTS

# The first step finds nothing updated, the second is like all later ones; one more, because queues may need a step to
# settle.
_NUM_PLAYED = 3

Ring = Literal["layer", "edge"]


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One unit's turn in a pass. `download_s` is what d2h does after it; `gradient` says that this is the unit's
    gradient. `unit` counts from the embedding (0) to the head. A `resident` unit has a slot of its own in the ring's
    place. `hop_up_s` and `hop_down_s` are what hidden states of other ranks and for them take besides, in all
    micro-batches of the step."""

    unit: int
    ring: Ring
    upload_s: float
    compute_s: float
    download_s: float = 0.0
    gradient: bool = False
    resident: bool = False
    hop_up_s: float = 0.0
    hop_down_s: float = 0.0


@dataclass(kw_only=True)
class Timeline:
    """A step as it was played. `ramp_s` is from its start to the first layer's start, `tail_s` from the last work to
    its end; both are in `exposed_s`, in which compute has nothing to do."""

    step_s: float = 0.0
    compute_s: float = 0.0
    ramp_s: float = 0.0
    tail_s: float = 0.0

    @property
    def exposed_s(self) -> float:
        """All seconds in which compute waits."""
        return self.step_s - self.compute_s


@dataclass(frozen=True, kw_only=True)
class DriveWork:
    """States on drives: seconds of reading and writing those of each unit, into how many spans they are cut, and how
    many spans are in memory at a time."""

    seconds: Mapping[int, float] = field(default_factory=dict)
    spans: Mapping[int, int] = field(default_factory=dict)
    """One where it does not say."""
    num_slots: int = 1

    def spans_of(self, unit: int) -> int:
        """Into how many spans the states of a unit are cut."""
        return self.spans.get(unit, 1)


@dataclass
class _Drives:
    """The queue of the drives, which read and write in turn. `ready` is when the states of the spans that come next in
    the optimizer's order are in memory."""

    work: DriveWork
    busy: float = 0.0
    ready: deque[float] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.ready.extend([0.0] * self.work.num_slots)

    def update(self, unit: int, start: float, seconds: float) -> float:
        """When a unit's update is done that could begin at `start`. What is written behind it, and what is read into
        its place, is in the queue then."""
        if unit not in self.work.seconds:
            return start + seconds
        number = self.work.spans_of(unit)
        for _ in range(number):
            start = max(start, self.ready.popleft()) + seconds / number
            self.busy = max(self.busy, start) + self.work.seconds[unit] / number
            self.ready.append(self.busy)
        return start


NO_DRIVES = DriveWork()


@dataclass
class _Queues:
    """When each queue has done what was played so far, and each unit was updated; from one step to the next."""

    now: float = 0.0
    optimizer: float = 0.0
    updated: dict[int, float] = field(default_factory=dict)
    drives: _Drives = field(default_factory=lambda: _Drives(NO_DRIVES))
    landing: dict[Ring, deque[float]] = field(
        default_factory=lambda: {"layer": deque([0.0] * NUM_SLOTS), "edge": deque([0.0])}
    )


def play(
    visits: Sequence[Visit],
    updates: Sequence[tuple[int, float]],
    *,
    updates_in_backward: bool,
    drives: DriveWork = NO_DRIVES,
) -> Timeline:
    """Play the visits of one step again and again, and return the last step. `updates` are (unit, seconds) in the order
    of forward; a unit may come twice, and what is read first waits for the first. Updates wait for states that are on
    `drives`."""
    queues, timeline = _Queues(drives=_Drives(drives)), Timeline()
    in_backward: dict[int, float] = {}
    for unit, seconds in updates if updates_in_backward else ():
        in_backward[unit] = in_backward.get(unit, 0.0) + seconds
    for _ in range(_NUM_PLAYED + bool(drives.seconds)):
        timeline = _play_step(visits, in_backward, queues)
        if not updates_in_backward:
            queues.updated.clear()
            for unit, seconds in updates:
                queues.optimizer = queues.drives.update(unit, max(queues.optimizer, queues.now), seconds)
                queues.updated.setdefault(unit, queues.optimizer)
    return timeline


def _play_step(visits: Sequence[Visit], in_backward: Mapping[int, float], queues: _Queues) -> Timeline:
    """One step from where the last one has ended; its queues are idle then, but for the optimizer's. `in_backward` are
    the seconds of updates that come as soon as a unit's gradient has landed."""
    start = h2d = compute = d2h = queues.now
    slots: dict[Ring, deque[float]] = {"layer": deque([start] * NUM_SLOTS), "edge": deque([start])}
    gradients: dict[Ring, deque[float]] = {"layer": deque([start] * NUM_SLOTS), "edge": deque([start])}
    timeline, has_ramp = Timeline(), False
    for visit in visits:
        # Uploads keep their order, so one that waits for its update holds up all later ones.
        slot_s = start if visit.resident else slots[visit.ring].popleft()
        h2d = max(h2d, slot_s, queues.updated.get(visit.unit, 0.0)) + visit.upload_s
        begin = max(compute, h2d)
        if visit.gradient:
            begin = max(begin, gradients[visit.ring].popleft())
        if visit.ring == "layer" and not has_ramp:
            timeline.ramp_s, has_ramp = begin - start - timeline.compute_s, True
        compute = begin + visit.compute_s
        timeline.compute_s += visit.compute_s
        if not visit.resident:
            slots[visit.ring].append(compute)
        if visit.download_s or visit.gradient:
            updates = visit.gradient and visit.unit in in_backward
            # A gradient that no plane keeps lands in a slot, which is free after the update from it.
            landing_s = queues.landing[visit.ring].popleft() if updates else start
            d2h = max(d2h, compute, landing_s) + visit.download_s
            if updates:
                begin_s, seconds = max(queues.optimizer, d2h), in_backward[visit.unit]
                queues.optimizer = queues.updated[visit.unit] = queues.drives.update(visit.unit, begin_s, seconds)
                queues.landing[visit.ring].append(queues.optimizer)
        if visit.gradient:
            gradients[visit.ring].append(d2h)
    queues.now = max(compute, d2h)
    timeline.step_s, timeline.tail_s = queues.now - start, queues.now - compute
    return timeline


def pass_length(layer_ranks: Sequence[int], num_micro_batches: int) -> int:
    """How long a pass takes over layers of these ranks, in units of one layer with one micro-batch, which takes each
    rank as long."""
    begin, free = -1, defaultdict[int, int](int)
    for rank in layer_ranks:
        # After the first micro-batch of the layer before; the others then come as fast as they are computed.
        begin = max(begin + 1, free[rank])
        free[rank] = begin + num_micro_batches
    return begin + num_micro_batches


@dataclass(frozen=True)
class _Landed:
    """When the first and the last micro-batch of a hidden state are where all ranks find them."""

    first_s: float
    last_s: float

    def part(self, index: int, num_parts: int) -> float:
        """When one of equal parts is there."""
        return self.first_s + (self.last_s - self.first_s) * (index + 1) / num_parts


class _RankQueues:
    """The queues of one of the ranks that divide the layers, in one step. It computes at `speed`; `updated` is when
    each unit was."""

    def __init__(self, start: float, visits: Sequence[Visit], speed: float, updated: Mapping[int, float]) -> None:
        self.h2d = self.compute = self.d2h = self.hops_up = self.hops_down = start
        self.computed_s, self._speed = 0.0, speed
        self._slots: dict[Ring, deque[float]] = {"layer": deque([start] * NUM_SLOTS), "edge": deque([start])}
        self._gradients: dict[Ring, deque[float]] = {"layer": deque([start] * NUM_SLOTS), "edge": deque([start])}
        self._coming, self._updated = deque(visits), updated
        self._ready = deque[float]()
        self._fetch()

    def visit(self, visit: Visit, landed: _Landed, num_micro_batches: int) -> tuple[float, _Landed]:
        """Compute the next unit on micro-batches that land meanwhile. Returns when it begins, and when its results
        land."""
        compute_s = visit.compute_s / self._speed
        up, each, down = (seconds / num_micro_batches for seconds in (visit.hop_up_s, compute_s, visit.hop_down_s))
        first_up, last_up = landed.first_s, landed.last_s
        if visit.hop_up_s:
            first_up = max(self.hops_up, landed.first_s) + up
            last_up = self.hops_up = max(first_up + visit.hop_up_s - up, landed.last_s + up)
        self._fetch(visit.hop_up_s, first_up)
        begin = max(self.compute, self._ready.popleft(), first_up)
        if visit.gradient:
            begin = max(begin, self._gradients[visit.ring].popleft())
        self.compute = max(begin + compute_s, last_up + each)
        self.computed_s += compute_s
        self._slots[visit.ring].append(self.compute)
        first = max(self.hops_down, begin + each) + down
        last = max(first + visit.hop_down_s - down, self.compute + down)
        if visit.hop_down_s:
            self.hops_down = last
        if visit.download_s:
            self.d2h = max(self.d2h + visit.hop_down_s, self.compute) + visit.download_s
        if visit.gradient:
            self._gradients[visit.ring].append(self.d2h)
        return begin, _Landed(first, last)

    def _fetch(self, hop_up_s: float = 0.0, first_up: float = 0.0) -> None:
        """Bring the weights of the unit that comes next, as soon as there is a slot. Hops have a queue of their own
        over the same link: weights that are not there when the first has come up come later by all of them."""
        if self._coming:
            visit = self._coming.popleft()
            slot_s = self._slots[visit.ring].popleft()
            self.h2d = max(self.h2d, slot_s, self._updated.get(visit.unit, 0.0)) + visit.upload_s
            if visit.upload_s and self.h2d > first_up:
                self.h2d += hop_up_s
            self._ready.append(self.h2d)


def visits_of(visits: Sequence[Visit], layer_ranks: Sequence[int], rank: int) -> list[Visit]:
    """Those of one of the ranks that divide the layers: its layers, and its part of embedding and head."""
    return [visit for visit in visits if visit.ring == "edge" or layer_ranks[visit.unit - 1] == rank]


def play_by_layers(
    visits: Sequence[Visit],
    updates: Sequence[tuple[int, float]],
    *,
    layer_ranks: Sequence[int],
    speeds: Sequence[float],
    num_micro_batches: int,
) -> Timeline:
    """As `play`, of a step whose layers the ranks divide; every rank visits embedding and head, for its part of the
    tokens. Each computes at its speed, in units of that of the visits. The timeline's compute is that of the rank with
    the most. Updates come after the step, of one layer of each rank at a time."""
    timeline, now, optimizer, updated = Timeline(), 0.0, 0.0, dict[int, float]()
    num_ranks = len(speeds)
    of_rank = max(1, -(-num_micro_batches // num_ranks))
    own = [(visits_of(visits, layer_ranks, rank), speed) for rank, speed in enumerate(speeds)]
    for _ in range(_NUM_PLAYED):
        ranks = [_RankQueues(now, of_one, speed, updated) for of_one, speed in own]
        timeline, start, landed, has_ramp = Timeline(), now, _Landed(now, now), False
        for visit in visits:
            if visit.ring == "layer":
                rank = ranks[layer_ranks[visit.unit - 1]]
                computed_s = rank.computed_s
                begin, landed = rank.visit(visit, landed, num_micro_batches)
                if not has_ramp:
                    timeline.ramp_s, has_ramp = begin - start - computed_s, True
            else:
                parts = [landed.part(index, num_ranks) for index in range(num_ranks)]
                found = [rank.visit(visit, _Landed(at, at), of_rank)[1] for rank, at in zip(ranks, parts, strict=True)]
                landed = _Landed(found[0].first_s, max(part.last_s for part in found))
        now = max(max(rank.compute, rank.d2h, rank.hops_down) for rank in ranks)
        timeline.step_s, timeline.compute_s = now - start, max(rank.computed_s for rank in ranks)
        timeline.tail_s = now - max(rank.compute for rank in ranks)
        updated, optimizer = _updated_together(updates, max(optimizer, now), layer_ranks)
    return timeline


def _updated_together(
    updates: Sequence[tuple[int, float]], start: float, layer_ranks: Sequence[int]
) -> tuple[dict[int, float], float]:
    """When each unit is updated by ranks that share the host's memory and have a layer each at a time; and when all
    are."""
    # Embedding; the first layer of each rank, the second of each, and so on; head and what remains of the embedding.
    rounds, num_own = defaultdict[tuple[int, int], list[tuple[int, float]]](list), Counter[int]()
    for number, (unit, seconds) in enumerate(updates):
        place = (0, 0) if number == 0 else (2, number)
        if 0 < unit <= len(layer_ranks):
            rank = layer_ranks[unit - 1]
            place, num_own[rank] = (1, num_own[rank]), num_own[rank] + 1
        rounds[place].append((unit, seconds))
    updated, optimizer = dict[int, float](), start
    for _, together in sorted(rounds.items()):
        optimizer += sum(seconds for _, seconds in together)
        for unit, _ in together:
            updated.setdefault(unit, optimizer)
    return updated, optimizer

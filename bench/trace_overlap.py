"""How much of a step's copying compute stood still for, worked out from a trace: a second opinion on the engine's own
account.

Uses only what ran when on the queues h2d, compute and d2h, and what the schedule says each piece of compute depends on.
Knows nothing of the waits that the engine logs and sums up itself. A pause of compute counts for a direction as long as
the copy that the next piece needs from it is on its way, or queued behind one that is; where both are missing, for the
weights until they are there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from horizon_server.engine.device.timeline import Span

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class DirectionOverlap:
    """One direction over a step."""

    busy_s: float
    exposed_s: float

    @property
    def ratio(self) -> float:
        """1 is fully hidden behind compute."""
        return 1.0 - self.exposed_s / self.busy_s if self.busy_s else 1.0


def overlap_of_step(spans: Sequence[Span], *, num_gradient_slots: int) -> dict[str, DirectionOverlap]:
    """Overlap per direction, from all spans of one training step whose layer inputs stay on the device."""
    ran: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.waits_for is None:
            ran[span.queue].append(span)
    needs = _Needs(ran["h2d"], ran["d2h"], num_gradient_slots=num_gradient_slots)
    exposed = {"h2d": 0.0, "d2h": 0.0}
    compute = _with_units(ran["compute"])
    for (start_s, end_s), work in _pauses(compute, first_s=ran["h2d"][0].start_s, last_s=ran["d2h"][-1].end_s):
        weights_s, slot_s = needs.of(work) if work is not None else (start_s, end_s)
        weights_s = min(max(weights_s, start_s), end_s)
        exposed["h2d"] += _busy_within(ran["h2d"], (start_s, weights_s))
        exposed["d2h"] += _busy_within(ran["d2h"], (weights_s, min(slot_s, end_s)))
    return {
        name: DirectionOverlap(busy_s=sum(span.end_s - span.start_s for span in ran[name]), exposed_s=exposed[name])
        for name in exposed
    }


class _Needs:
    """When the copies that a piece of compute depends on had arrived; ask in the order the pieces ran."""

    def __init__(self, h2d: Sequence[Span], d2h: Sequence[Span], *, num_gradient_slots: int) -> None:
        self._num_gradient_slots = num_gradient_slots
        self._arrivals = [(_unit_of(span), span.end_s) for span in h2d]
        self._left = {_unit_of(span): span.end_s for span in d2h if span.label.startswith("gradient")}
        self._head = max((unit for unit, _ in self._arrivals), default=0)
        self._phase = ""
        self._weights_s = 0.0

    def of(self, work: Span) -> tuple[float, float]:
        """When its weights were there, and when the slot for its gradient was free."""
        kind, _, unit_name = work.label.rpartition(" ")
        unit, phase = int(unit_name), f"{'forward' if kind == 'forward' else 'backward'} {unit_name}"
        if phase != self._phase:
            self._phase, self._weights_s = phase, self._next_arrival(unit)
        return self._weights_s, 0.0 if kind == "forward" else self._slot_free(unit)

    def _next_arrival(self, unit: int) -> float:
        """Layer 0 comes ahead of the embedding; a tied head comes in two parts, its table second; the last layers need
        not come again."""
        position = next((i for i, (arrived_unit, _) in enumerate(self._arrivals) if arrived_unit == unit), None)
        if position is None:
            return 0.0
        arrived_s = self._arrivals.pop(position)[1]
        if unit == self._head and position < len(self._arrivals) and self._arrivals[position][0] == 0:
            arrived_s = self._arrivals.pop(position)[1]
        return arrived_s

    def _slot_free(self, unit: int) -> float:
        """Layers share a ring of slots, in backward order; the embedding takes the one that the head has left."""
        if unit == 0:
            return self._left.get(self._head, 0.0)
        user_before = unit + self._num_gradient_slots
        return self._left.get(user_before, 0.0) if user_before < self._head else 0.0


def _with_units(compute: Sequence[Span]) -> list[Span]:
    """Work whose label names no unit prepares what comes after it, and needs what that needs."""
    named: list[Span] = []
    for work in reversed(compute):
        if work.label.rpartition(" ")[2].isdigit():
            named.append(work)
        elif named:
            named.append(replace(work, label=named[-1].label))
    return named[::-1]


def _pauses(compute: Sequence[Span], *, first_s: float, last_s: float) -> Iterator[tuple[Interval, Span | None]]:
    """Before each piece of work, how long compute paused, if at all; None stands for the end of the step."""
    idle_since_s = first_s
    for work in compute:
        yield (idle_since_s, max(idle_since_s, work.start_s)), work
        idle_since_s = max(idle_since_s, work.end_s)
    yield (idle_since_s, max(idle_since_s, last_s)), None


def _busy_within(spans: Sequence[Span], window: Interval) -> float:
    return sum(max(0.0, min(span.end_s, window[1]) - max(span.start_s, window[0])) for span in spans)


def _unit_of(span: Span) -> int:
    """Rows are the embedding's."""
    last = span.label.rpartition(" ")[2]
    return int(last) if last.isdigit() else 0

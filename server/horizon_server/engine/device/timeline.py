"""What each queue did and when, and what of it compute had to wait for.

Owns intervals and their arithmetic.

Units: seconds of one monotonic clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from horizon_server.figures import QueueFigures, TransferFigures

Interval = tuple[float, float]


@dataclass(frozen=True)
class Busy:
    """Work a queue did; `label` says what, to a person who looks at a trace."""

    start_s: float
    end_s: float
    num_bytes: int
    label: str = ""


@dataclass(frozen=True)
class Wait:
    """A queue waiting for an event of the queue named `origin`."""

    start_s: float
    end_s: float
    origin: str


class Timeline:
    """One queue's log; `observer`, where there is one, receives every entry.

    Thread: the queue's own thread writes, one other thread takes.
    """

    def __init__(self) -> None:
        self._entries: deque[Busy | Wait] = deque()
        self.observer: Callable[[Busy | Wait], None] | None = None

    def add(self, entry: Busy | Wait) -> None:
        """Log an interval that has ended."""
        self._entries.append(entry)
        if self.observer is not None:
            self.observer(entry)

    def take(self) -> tuple[list[Busy], list[Wait]]:
        """Everything logged since the last call."""
        # By number, because the queue's thread may append meanwhile.
        entries = [self._entries.popleft() for _ in range(len(self._entries))]
        return [e for e in entries if isinstance(e, Busy)], [e for e in entries if isinstance(e, Wait)]


def summarise(*, h2d: Timeline, compute: Timeline, d2h: Timeline, host_queues: Iterable[Timeline]) -> QueueFigures:
    """Busy and exposed seconds of a period.

    Exposed is what compute waits for. When it waits for a copy while the copy's queue itself waits for a host queue, that queue
    (the optimizer) is what is exposed, not the copy. When it lacks copies of both directions, the time counts once: for the one it
    asks for first, which the schedule makes the weights, up to their arrival, and then for the other.
    """
    h2d_busy, h2d_waits = h2d.take()
    compute_busy, compute_waits = compute.take()
    d2h_busy, d2h_waits = d2h.take()
    host_busy = [busy for timeline in host_queues for busy in timeline.take()[0]]

    for_h2d = [(w.start_s, w.end_s) for w in compute_waits if w.origin == "h2d"]
    for_d2h = [(w.start_s, w.end_s) for w in compute_waits if w.origin == "d2h"]
    # A copy that waits for the optimizer is not slow itself: that part of compute's wait is the optimizer's.
    h2d_held_s, d2h_held_s = overlap_s(for_h2d, _for_host(h2d_waits)), overlap_s(for_d2h, _for_host(d2h_waits))

    def transfer(busy: Sequence[Busy], exposed_s: float) -> TransferFigures:
        busy_s = _length_s((b.start_s, b.end_s) for b in busy)
        return TransferFigures(bytes=sum(b.num_bytes for b in busy), busy_s=busy_s, exposed_s=exposed_s)

    return QueueFigures(
        h2d=transfer(h2d_busy, _length_s(for_h2d) - h2d_held_s),
        d2h=transfer(d2h_busy, _length_s(for_d2h) - d2h_held_s),
        compute_s=_length_s((b.start_s, b.end_s) for b in compute_busy),
        optimizer_s=_length_s((b.start_s, b.end_s) for b in host_busy),
        optimizer_exposed_s=h2d_held_s + d2h_held_s,
    )


def overlap_s(first: Sequence[Interval], second: Sequence[Interval]) -> float:
    """Length of what two lists of ordered, disjoint intervals have in common."""
    total_s, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        start_s = max(first[i][0], second[j][0])
        end_s = min(first[i][1], second[j][1])
        total_s += max(0.0, end_s - start_s)
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total_s


def _for_host(waits: Iterable[Wait]) -> list[Interval]:
    return [(w.start_s, w.end_s) for w in waits if w.origin not in ("h2d", "compute", "d2h")]


def _length_s(intervals: Iterable[Interval]) -> float:
    return sum(end_s - start_s for start_s, end_s in intervals)

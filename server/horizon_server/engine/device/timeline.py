"""What a device's queues did and when, what of it compute had to wait for, and a trace of it for people.

Units: seconds of one monotonic clock.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from horizon_server.figures import CollectiveFigures, CollectiveKind, DeviceFigures, TransferFigures

# The last hundred steps or so of a deep model: 10 MB of memory, and as much JSON.
MAX_SPANS = 50_000

Interval = tuple[float, float]

HOPS = ("hops up", "hops down", "signals")
"""Queues for hidden states from other ranks, for those to them, and for telling the others of these."""
RANKS = "ranks"
"""In the place of a queue's name: a wait for what other ranks do."""


@dataclass(frozen=True, slots=True)
class Span:
    """An interval of one queue: work named `label`, or a wait for an event of the queue that `waits_for` names.

    `launched_s` is when the host had launched all of the work, None where work runs as it is called. `collective` is
    the kind of an exchange with other ranks.
    """

    queue: str
    start_s: float
    end_s: float
    num_bytes: int = 0
    label: str = ""
    waits_for: str | None = None
    launched_s: float | None = None
    collective: CollectiveKind | None = None

    @property
    def launching_s(self) -> float:
        """How long the work ran, or waited for its next launch, while the host was still launching it."""
        return 0.0 if self.launched_s is None else max(0.0, min(self.end_s, self.launched_s) - self.start_s)


class Trace:
    """The last `max_spans` spans of all queues. A span is here once it has ended, on a cuda device once its step has
    been reported.

    Thread: queues add from threads of their own; the rest is for one thread, while the queues are idle.
    """

    def __init__(self, *, max_spans: int = MAX_SPANS) -> None:
        self._spans: deque[Span] = deque(maxlen=max_spans)
        # Without a lock: a deque's append is one operation, and drops the oldest span by itself.
        self.add = self._spans.append
        self.clear = self._spans.clear

    def spans(self) -> list[Span]:
        """Everything kept, in the order of its end within each queue."""
        return list(self._spans)

    def write(self, path: Path) -> None:
        """Write it as Chrome trace events, which Perfetto and chrome://tracing open: one track per queue."""
        spans = self.spans()
        origin_s = min((span.start_s for span in spans), default=0.0)
        tracks = {queue: number for number, queue in enumerate(dict.fromkeys(span.queue for span in spans), start=1)}
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": queue}}
            for queue, number in tracks.items()
        ]
        for span in spans:
            is_wait = span.waits_for is not None
            events.append(
                {
                    "ph": "X",
                    "name": f"wait for {span.waits_for}" if is_wait else span.label or "work",
                    "cat": "wait" if is_wait else "work",
                    "pid": 1,
                    "tid": tracks[span.queue],
                    # The format counts in microseconds.
                    "ts": (span.start_s - origin_s) * 1e6,
                    "dur": (span.end_s - span.start_s) * 1e6,
                    "args": {"bytes": span.num_bytes} if span.num_bytes else {},
                }
            )
        lines = ",\n".join(map(json.dumps, events))
        path.write_text(f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n', encoding="utf-8")


class Timeline:
    """One queue's log; `trace` receives every span too. Thread: the queue's own thread writes, one other thread
    takes."""

    def __init__(self, trace: Trace | None = None) -> None:
        self._spans: deque[Span] = deque()
        self._trace = trace

    def add(self, span: Span) -> None:
        """Log a span that has ended."""
        self._spans.append(span)
        if self._trace is not None:
            self._trace.add(span)

    def take(self) -> tuple[list[Span], list[Span]]:
        """The work and the waits logged since the last call."""
        # By number, because the queue's thread may append meanwhile.
        spans = [self._spans.popleft() for _ in range(len(self._spans))]
        return [s for s in spans if s.waits_for is None], [s for s in spans if s.waits_for is not None]


def summarise(
    *,
    h2d: Timeline,
    compute: Timeline,
    d2h: Timeline,
    host_queues: Iterable[Timeline],
    hops: Sequence[Timeline] = (),
) -> DeviceFigures:
    """Busy and exposed seconds of a period.

    Exposed is what compute waits for. When it waits for a copy while the copy's queue itself waits for a host queue,
    that queue (the optimizer) is what is exposed, not the copy; where it waits for other ranks, nothing here is. When
    it lacks copies of both directions, the time counts once: for the one it asks for first, which the schedule makes
    the weights, up to their arrival, and then for the other. `hops` are the queues of HOPS, where there are such; a
    link that two queues copy over is busy once.
    """
    compute_work, compute_waits = compute.take()
    collectives: dict[CollectiveKind, CollectiveFigures] = {}
    ranks_wait_s = 0.0
    host_work = [span for timeline in host_queues for span in timeline.take()[0]]

    def note_collectives(work: Sequence[Span], exposed: Sequence[Interval]) -> None:
        nonlocal ranks_wait_s
        for kind in dict.fromkeys(span.collective for span in work if span.collective):
            spans = [span for span in work if span.collective == kind]
            exposed_s = overlap_s(exposed, [(span.start_s, span.end_s) for span in spans])
            before = collectives.get(kind, CollectiveFigures(kind=kind))
            collectives[kind] = CollectiveFigures(
                kind=kind,
                bytes=before.bytes + sum(span.num_bytes for span in spans),
                busy_s=before.busy_s + _length_s(spans),
                exposed_s=before.exposed_s + exposed_s,
            )
            ranks_wait_s += exposed_s

    # What compute itself does with the others, nothing hides.
    note_collectives(compute_work, [(span.start_s, span.end_s) for span in compute_work])

    def transfer(queues: Sequence[tuple[str, Timeline]]) -> tuple[TransferFigures, float]:
        nonlocal ranks_wait_s
        copies, exposed_s, optimizer_s = list[Span](), 0.0, 0.0
        for name, timeline in queues:
            work, waits = timeline.take()
            exposed = [(w.start_s, w.end_s) for w in compute_waits if w.waits_for == name]
            found = [w for w in waits if w.waits_for not in ("h2d", "compute", "d2h", *HOPS)]
            # A copy that waits for the optimizer is not slow itself: that part of compute's wait is the optimizer's.
            held_s, held_by_ranks_s = (
                overlap_s(exposed, [(w.start_s, w.end_s) for w in found if (w.waits_for == RANKS) == by_ranks])
                for by_ranks in (False, True)
            )
            note_collectives(work, exposed)
            ranks_wait_s += held_by_ranks_s
            optimizer_s += held_s
            exposed_s += sum(end_s - start_s for start_s, end_s in exposed) - held_s - held_by_ranks_s
            copies += work
        num_bytes = sum(span.num_bytes for span in copies if not span.collective)
        return TransferFigures(bytes=num_bytes, busy_s=_busy_s(copies), exposed_s=exposed_s), optimizer_s

    of_hops = list(zip(HOPS, hops, strict=True)) if hops else []
    up, up_held_s = transfer([("h2d", h2d), *of_hops[:1]])
    down, down_held_s = transfer([("d2h", d2h), *of_hops[1:]])
    return DeviceFigures(
        h2d=up,
        d2h=down,
        compute_s=_length_s(compute_work),
        launching_s=sum(span.launching_s for span in compute_work),
        optimizer_s=_length_s(host_work),
        optimizer_exposed_s=up_held_s + down_held_s,
        collectives=tuple(collectives.values()),
        ranks_wait_s=ranks_wait_s,
    )


def overlap_s(first: Sequence[Interval], second: Sequence[Interval]) -> float:
    """Length of what two lists of ordered, disjoint intervals have in common."""
    total_s, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        start_s = max(first[i][0], second[j][0])
        end_s = min(first[i][1], second[j][1])
        total_s += max(0.0, end_s - start_s)
        # The one that ends first has nothing more in common with the other list.
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total_s


def _busy_s(spans: Iterable[Span]) -> float:
    """Seconds in which there was at least one."""
    total_s, last_s = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start_s):
        total_s += max(0.0, span.end_s - max(span.start_s, last_s))
        last_s = max(last_s, span.end_s)
    return total_s


def _length_s(spans: Iterable[Span]) -> float:
    return sum(span.end_s - span.start_s for span in spans)

"""A record of what ran when on a device's queues, for a person who wants to see it and for tests that compute from it.

Owns the bounded record and its export.

Units: seconds of one monotonic clock.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from horizon_server.engine.device.timeline import Busy, Wait

MAX_SPANS = 50_000
"""The last hundred steps or so of a deep model: 10 MB of memory, and as much JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """An interval of one queue: work named `label`, or a wait for the queue that `waits_for` names."""

    queue: str
    start_s: float
    end_s: float
    label: str = ""
    num_bytes: int = 0
    waits_for: str | None = None


class Trace:
    """The last `max_spans` intervals of every queue it was given to; `HostDevice(trace=...)` does that.

    A span is here once it has ended, on a cuda device once its step has been reported.

    Thread: queues add from threads of their own; the rest is for one thread, while the queues are idle.
    """

    def __init__(self, *, max_spans: int = MAX_SPANS) -> None:
        self._spans: deque[Span] = deque(maxlen=max_spans)

    def observer(self, queue: str) -> Callable[[Busy | Wait], None]:
        """What a queue's timeline calls with every interval that has ended."""

        def add(entry: Busy | Wait) -> None:
            if isinstance(entry, Busy):
                span = Span(
                    queue=queue,
                    start_s=entry.start_s,
                    end_s=entry.end_s,
                    label=entry.label,
                    num_bytes=entry.num_bytes,
                )
            else:
                span = Span(queue=queue, start_s=entry.start_s, end_s=entry.end_s, waits_for=entry.origin)
            self._spans.append(span)

        return add

    def spans(self) -> list[Span]:
        """Everything kept, in the order of its end within each queue."""
        return list(self._spans)

    def clear(self) -> None:
        """Forget everything, to begin a period."""
        self._spans.clear()

    def write(self, path: Path) -> None:
        """Write it as Chrome trace events, which Perfetto and chrome://tracing open: one track per queue."""
        spans = self.spans()
        origin_s = min((span.start_s for span in spans), default=0.0)
        tracks = {queue: number for number, queue in enumerate(dict.fromkeys(span.queue for span in spans), start=1)}
        names = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": queue}}
            for queue, number in tracks.items()
        ]
        events = (_event(span, tracks[span.queue], origin_s) for span in spans)
        with path.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            file.write(",\n".join(map(json.dumps, names)))
            file.writelines(f",\n{json.dumps(event)}" for event in events)
            file.write("\n]}\n")


def _event(span: Span, track: int, origin_s: float) -> dict[str, object]:
    waits = span.waits_for is not None
    return {
        "ph": "X",
        "name": f"wait for {span.waits_for}" if waits else span.label or "work",
        "cat": "wait" if waits else "work",
        "pid": 1,
        "tid": track,
        "ts": (span.start_s - origin_s) * 1e6,
        "dur": (span.end_s - span.start_s) * 1e6,
        "args": {"bytes": span.num_bytes} if span.num_bytes else {},
    }

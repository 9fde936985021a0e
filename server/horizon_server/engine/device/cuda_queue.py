"""A queue of the cuda device: a thread that launches, a stream that runs, and the stream's own clock.

The thread keeps the driver free: it may be blocked until another queue has launched something, or until the host has
finished something, while the stream runs what it was given before.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from horizon_server.engine.device.cuda_runtime import Mark, Runtime
from horizon_server.engine.device.protocol import Event, Work
from horizon_server.engine.device.queued_device import HostQueue, QueueGroup
from horizon_server.engine.device.timeline import Span, Timeline, Trace
from horizon_server.errors import DoesNotFit
from horizon_server.figures import CollectiveKind

# A thread that loses the processor between its looks at the two clocks looks again, a few times.
_CLOSE_S, _MOST_LOOKS = 1e-4, 5


class StreamClock:
    """Turns marks into seconds of the host's monotonic clock, so that streams and host threads share one time line.

    CUDA: `rebase` synchronises the host with the stream it is given, which should be idle.
    """

    def __init__(self, runtime: Runtime, stream: Any) -> None:
        self._runtime = runtime
        self.rebase(stream)

    def rebase(self, stream: Any) -> None:
        """Synchronise both clocks again; a mark's distance in milliseconds is a float32 and must not grow large."""
        gap_s = float("inf")
        for _ in range(_MOST_LOOKS):
            mark, before_s = self._runtime.new_mark(), time.perf_counter()
            mark.record(stream)
            mark.synchronize()
            now_s = time.perf_counter()
            if now_s - before_s < gap_s:
                gap_s, self._base, self._base_s = now_s - before_s, mark, now_s
            if gap_s < _CLOSE_S:
                break

    def seconds(self, mark: Mark) -> float:
        """When the device passed a mark."""
        return self._base_s + self._base.elapsed_time(mark) / 1e3


class StreamTimeline(Timeline):
    """A timeline whose spans are kept as two marks until `take`. CUDA: `take` waits for the marks."""

    def __init__(self, queue: str, clock: StreamClock, trace: Trace | None) -> None:
        super().__init__(trace)
        self._queue, self._clock = queue, clock
        self._pending: deque[tuple[Mark, Mark, dict[str, Any]]] = deque()

    def add_marks(self, start: Mark, end: Mark, **what: Any) -> None:
        """Log work between two marks, or a wait; `what` are the other fields of its span. Thread: the queue's own."""
        self._pending.append((start, end, what))

    def take(self) -> tuple[list[Span], list[Span]]:
        # By number, because the queue's thread may append meanwhile.
        for _ in range(len(self._pending)):
            start, end, what = self._pending.popleft()
            # The driver has no time of a mark that the device has not passed.
            end.synchronize()
            start_s, end_s = self._clock.seconds(start), self._clock.seconds(end)
            self.add(Span(self._queue, start_s, end_s, **what))
        return super().take()


class CudaEvent:
    """A point in a stream's order, known before the queue's thread has got there."""

    def __init__(self, origin: str, mark: Mark, group: QueueGroup) -> None:
        self.origin = origin
        self._mark, self._group = mark, group
        # CUDA returns at once from waiting for a mark that was not recorded yet.
        self._issued = threading.Event()

    @property
    def happened(self) -> bool:
        """Whether the stream has passed this point."""
        return self._issued.is_set() and self._mark.query()

    def wait(self) -> None:
        """Block until it happened; an error of the device fails the queues."""
        mark = self.issued()
        try:
            mark.synchronize()
        except RuntimeError as error:
            self._group.keep(error)

    def issued(self) -> Mark:
        """Block until the mark is in its stream, and return it."""
        self._issued.wait()
        return self._mark

    def issue(self, stream: Any) -> None:
        """Put the mark into its stream. Thread: the queue's own."""
        try:
            self._mark.record(stream)
        finally:
            # Even where recording failed, or a thread that waits for the event would wait forever.
            self._issued.set()


class CudaQueue(HostQueue):
    """Launches work in order on a thread of its own, into a stream of its own."""

    timeline: StreamTimeline

    def __init__(
        self, name: str, group: QueueGroup, *, num_threads: int, runtime: Runtime, stream: Any, clock: StreamClock
    ) -> None:
        # First: the thread, which the base class starts, records its first event into the stream.
        self.stream, self._runtime = stream, runtime
        timeline = StreamTimeline(name, clock, group.trace)
        super().__init__(name, group, num_threads=num_threads, timeline=timeline)

    def record(self) -> Event:
        """CUDA: the event is in the stream when the thread has got there."""
        event = CudaEvent(self.name, self._runtime.new_mark(), self._group)
        self._tasks.put(partial(event.issue, self.stream))
        return event

    def _execute(self, work: Work, num_bytes: int, label: str, collective: CollectiveKind | None) -> None:
        start, end = self._runtime.new_mark(), self._runtime.new_mark()
        with self._runtime.using(self.stream):
            start.record(self.stream)
            with memory_refusals():
                work()
            launched_s = time.perf_counter()
            end.record(self.stream)
        self.timeline.add_marks(
            start, end, num_bytes=num_bytes, label=label, launched_s=launched_s, collective=collective
        )

    def _wait(self, event: Event) -> None:
        if event.happened:
            return
        start, end = self._runtime.new_mark(), self._runtime.new_mark()
        start.record(self.stream)
        if isinstance(event, CudaEvent):
            self._runtime.wait(self.stream, event.issued())
        else:
            # An event of the host has no mark that the stream could wait for, so the thread waits before it launches
            # more.
            event.wait()
        end.record(self.stream)
        self.timeline.add_marks(start, end, waits_for=event.origin)


@contextmanager
def memory_refusals() -> Iterator[None]:
    """Inside, a device that has no memory left raises DoesNotFit, as its limit does."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        first_line = str(error).partition("\n")[0]
        raise DoesNotFit(
            f"device memory: {first_line}; lower tokens_per_step or sequence_length, or raise the device's memory limit"
        ) from error

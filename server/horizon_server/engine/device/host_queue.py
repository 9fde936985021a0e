"""A queue of the host device: one thread, real events, its own clock.

Owns order, asynchrony and the transport of errors. Must not know what the work is.
"""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from horizon_server.engine.device.protocol import Event, Work
from horizon_server.engine.device.timeline import Busy, Timeline, Wait
from horizon_server.engine.device.trace import Trace


class Failure:
    """The first error of a group of queues; the others stop working when there is one. Thread: safe from any."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    @property
    def happened(self) -> bool:
        """Whether any queue failed."""
        return self._error is not None

    def collect(self, future: Future[None]) -> None:
        """Keep a finished work's error if it is the first."""
        error = None if future.cancelled() else future.exception()
        if error is not None:
            self.keep(error)

    def keep(self, error: BaseException) -> None:
        """Keep an error if it is the first."""
        with self._lock:
            self._error = self._error or error

    def raise_first(self) -> None:
        """Raise the error that was kept, if any."""
        if self._error is not None:
            raise self._error


class HostEvent:
    """A point in a `HostQueue`'s order."""

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self._happened = threading.Event()

    @property
    def happened(self) -> bool:
        """Whether the queue has passed this point."""
        return self._happened.is_set()

    def wait(self) -> None:
        """Block until it happened."""
        self._happened.wait()

    def set(self) -> None:
        """Mark it as happened. Thread: the queue's own."""
        self._happened.set()


class HostQueue:
    """Runs work in order on a thread of its own.

    After a failure anywhere in the group the remaining work is skipped, while events still happen: nothing waits forever.
    `max_delay_s` puts a random pause before each piece of work, to bring races to light. `trace` is shown what ran when.
    """

    def __init__(
        self,
        name: str,
        *,
        failure: Failure,
        num_threads: int,
        max_delay_s: float = 0.0,
        delay_seed: int = 0,
        timeline: Timeline | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.name = name
        self.timeline = timeline or Timeline()
        self.timeline.observer = trace.observer(name) if trace is not None else None
        self._failure = failure
        self._max_delay_s = max_delay_s
        self._random = random.Random(f"{delay_seed}-{name}")
        self._executor = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix=f"horizon-{name}",
            initializer=_start_thread,
            initargs=(num_threads,),
        )
        # Until the thread runs: the next queue's thread must not set its count of threads before this one has asked for its own.
        self.record().wait()

    def submit(self, work: Work, *, num_bytes: int = 0, label: str = "") -> None:
        """Append work; its error, if any, is kept in the group's `Failure`."""
        self._executor.submit(self._run, work, num_bytes, label).add_done_callback(self._failure.collect)

    def wait(self, event: Event) -> None:
        """Let later work wait for the event."""
        self._executor.submit(self._wait, event).add_done_callback(self._failure.collect)

    def record(self) -> Event:
        """An event after everything submitted so far."""
        event = HostEvent(self.name)
        # Not by `submit`: it must happen after a failure too, or a thread that waits for it would wait forever.
        self._executor.submit(event.set)
        return event

    def close(self) -> None:
        """Let what was submitted end, then end the thread."""
        self._executor.shutdown(wait=True)

    def _run(self, work: Work, num_bytes: int, label: str) -> None:
        # Its inputs may be what the failed work has not written.
        if self._failure.happened:
            return
        if self._max_delay_s:
            time.sleep(self._random.random() * self._max_delay_s)
        self._execute(work, num_bytes, label)

    def _execute(self, work: Work, num_bytes: int, label: str) -> None:
        start_s = time.perf_counter()
        work()
        self.timeline.add(Busy(start_s, time.perf_counter(), num_bytes, label))

    def _wait(self, event: Event) -> None:
        if event.happened:
            return
        start_s = time.perf_counter()
        event.wait()
        self.timeline.add(Wait(start_s, time.perf_counter(), event.origin))


def _start_thread(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    # torch gives a thread its counts (OpenMP's and MKL's, both per thread) when the thread first asks, from the last value that any thread
    # has set: ask now, while that value is this thread's own.
    torch.get_num_threads()

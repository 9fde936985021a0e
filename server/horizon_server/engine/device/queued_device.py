"""What both devices have in common: queues on threads of their own, a bounded arena, host buffers, one account."""

from __future__ import annotations

import atexit
import random
import threading
import time
import traceback
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from mmap import mmap
from queue import SimpleQueue
from typing import TypedDict

import torch
from torch import Tensor

from horizon_server.engine.device.memory import Arena, HostBuffers
from horizon_server.engine.device.protocol import Component, Event, HostComponent, Queue, Work
from horizon_server.engine.device.timeline import HOPS, Span, Timeline, Trace, summarise
from horizon_server.figures import CollectiveKind, DeviceFigures

Task = Callable[[], object]
"""What a queue's thread calls next."""

_open_queues: weakref.WeakSet[HostQueue] = weakref.WeakSet()


class Switches(TypedDict, total=False):
    """What tests and traces ask of a device. None of it changes a result."""

    poison_on_free: bool
    """Fill freed memory with NaN, so that a use after free shows in the loss."""
    max_delay_s: float
    """Put a random pause of up to this before each piece of work, to bring races to light; `delay_seed` seeds it."""
    delay_seed: int
    trace: Trace | None
    """Receives what ran when on every queue."""


class QueueGroup:
    """What the queues of a device share: their first error, after which all of them skip their work. Thread: safe from
    any."""

    def __init__(self, *, max_delay_s: float = 0.0, delay_seed: int = 0, trace: Trace | None = None) -> None:
        self.max_delay_s, self.delay_seed, self.trace = max_delay_s, delay_seed, trace
        self.signals: HostQueue | None = None
        """What tells other ranks that hidden states have gone to them."""
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    @property
    def failed(self) -> bool:
        """Whether any queue failed."""
        return self._error is not None

    def keep(self, error: BaseException) -> None:
        """Keep an error if it is the first: later ones are consequences of it."""
        _clear_frames(error)
        with self._lock:
            self._error = self._error or error

    def raise_first(self) -> None:
        """Raise the error that was kept, if any."""
        if self._error is not None:
            raise self._error


class HostEvent(threading.Event):
    """A point in a `HostQueue`'s order."""

    def __init__(self, origin: str) -> None:
        super().__init__()
        self.origin = origin

    @property
    def happened(self) -> bool:
        """Whether the queue has passed this point."""
        return self.is_set()


class HostQueue:
    """Runs work in order on a thread of its own.

    After a failure anywhere in the group the remaining work is skipped, while events still happen: nothing waits
    forever.
    """

    def __init__(self, name: str, group: QueueGroup, *, num_threads: int, timeline: Timeline | None = None) -> None:
        self.name = name
        self.timeline = timeline or Timeline(group.trace)
        self._group = group
        # By name, so that queues of one seed do not pause in step.
        self._random = random.Random(f"{group.delay_seed}-{name}")
        # Not an executor, whose futures make a submission seven times as costly; the driver submits hundreds for each
        # step.
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=_serve, args=(self._tasks, group, num_threads), name=f"horizon-{name}", daemon=True
        )
        self._thread.start()
        _open_queues.add(self)
        # A queue that is dropped without `close` takes its thread along.
        self._finish = weakref.finalize(self, self._tasks.put, None)
        self._finish.atexit = False
        # Until the thread runs: the next queue's thread must not set its count of threads before this one has asked for
        # its own.
        self.record().wait()

    def submit(
        self, work: Work, *, num_bytes: int = 0, label: str = "", collective: CollectiveKind | None = None
    ) -> None:
        """Append work; its error, if any, is kept in the group."""
        if collective is not None and self._group.signals is not None:
            # Else it could be in there when a copy fails without which the others never come: nothing would end it.
            self.wait(self._group.signals.record())
        self._tasks.put(partial(self._run, work, num_bytes, label, collective))

    def wait(self, event: Event) -> None:
        """Let later work wait for the event."""
        self._tasks.put(partial(self._wait, event))

    def record(self) -> Event:
        """An event after everything submitted so far."""
        event = HostEvent(self.name)
        # Not by `submit`: it must happen after a failure too, or a thread that waits for it would wait forever.
        self._tasks.put(event.set)
        return event

    def close(self) -> None:
        """Let what was submitted end, then end the thread."""
        self._finish()
        self._thread.join()

    def _run(self, work: Work, num_bytes: int, label: str, collective: CollectiveKind | None) -> None:
        # Its inputs may be what the failed work has not written.
        if self._group.failed:
            return
        if self._group.max_delay_s:
            time.sleep(self._random.random() * self._group.max_delay_s)
        self._execute(work, num_bytes, label, collective)

    def _execute(self, work: Work, num_bytes: int, label: str, collective: CollectiveKind | None) -> None:
        start_s = time.perf_counter()
        work()
        self.timeline.add(Span(self.name, start_s, time.perf_counter(), num_bytes, label, collective=collective))

    def _wait(self, event: Event) -> None:
        # No wait is logged where there was none: it would show as exposed time.
        if event.happened:
            return
        start_s = time.perf_counter()
        event.wait()
        self.timeline.add(Span(self.name, start_s, time.perf_counter(), waits_for=event.origin))


class QueuedDevice(ABC):
    """The common part of a `Device`; subclasses set `h2d`, `compute` and `d2h` and make the copies."""

    h2d: HostQueue
    compute: HostQueue
    d2h: HostQueue

    def __init__(
        self,
        *,
        arena: Arena,
        host_buffers: HostBuffers,
        poison_on_free: bool = False,
        max_delay_s: float = 0.0,
        delay_seed: int = 0,
        trace: Trace | None = None,
    ) -> None:
        self.arena = arena
        self._host_buffers = host_buffers
        self._poison_on_free = poison_on_free
        self._group = QueueGroup(max_delay_s=max_delay_s, delay_seed=delay_seed, trace=trace)
        self._host_queues: list[HostQueue] = []
        self._hops: tuple[HostQueue, HostQueue, HostQueue] | None = None

    def hops(self) -> tuple[HostQueue, HostQueue, HostQueue]:
        if self._hops is None:
            up, down, signals = HOPS
            self._group.signals = HostQueue(signals, self._group, num_threads=1)
            self._hops = self._new_queue(up), self._new_queue(down), self._group.signals
        return self._hops

    def drain(self) -> None:
        # By way of compute, so that a tail of copies shows as exposed time.
        for queue in (self.h2d, self.d2h, *(self._hops or ())):
            self.compute.wait(queue.record())
        self.compute.record().wait()

    @abstractmethod
    def _new_queue(self, name: str) -> HostQueue:
        """One that copies."""

    def allocate(self, component: Component, num_elements: int, dtype: torch.dtype) -> Tensor:
        tensor = self.arena.allocate(component, num_elements, dtype)
        if self._poison_on_free:
            _poison(tensor)
        return tensor

    def free(self, tensor: Tensor) -> None:
        if self._poison_on_free:
            _poison(tensor)
        self.arena.free(tensor)

    def allocate_host(
        self, component: HostComponent, num_elements: int, dtype: torch.dtype, *, piece_elements: int | None = None
    ) -> Tensor:
        tensor = self._host_buffers.allocate(component, num_elements, dtype)
        if self._poison_on_free:
            _poison(tensor)
        return tensor

    def share_host(
        self, component: HostComponent, memory: mmap, dtype: torch.dtype, *, piece_elements: int, is_counted: bool
    ) -> Tensor:
        return self._host_buffers.share(component, memory, dtype, is_counted=is_counted)

    def free_host(self, tensor: Tensor) -> None:
        self._host_buffers.free(tensor)

    def charge(self, component: Component, num_bytes: int) -> None:
        self.arena.charge(component, num_bytes)

    def poison(self, queue: Queue, tensor: Tensor) -> None:
        # On the queue, after the last work that reads the memory.
        if self._poison_on_free:
            queue.submit(partial(_poison, tensor), label="poison")

    def host_queue(self, name: str) -> HostQueue:
        queue = HostQueue(name, self._group, num_threads=1)
        self._host_queues.append(queue)
        return queue

    @property
    def refusals(self) -> list[str]:
        return []

    def raise_failure(self) -> None:
        self._group.raise_first()

    def take_use(self) -> DeviceFigures:
        return summarise(
            h2d=self.h2d.timeline,
            compute=self.compute.timeline,
            d2h=self.d2h.timeline,
            host_queues=[queue.timeline for queue in self._host_queues],
            hops=[queue.timeline for queue in self._hops or ()],
        )

    def peak_bytes(self) -> Mapping[str, int]:
        return self.arena.peak_bytes()

    def host_peak_bytes(self) -> Mapping[str, int]:
        return self._host_buffers.peak_bytes()

    def close(self) -> None:
        # In any order: each finishes what it was given, so that events that another one waits for still happen.
        for queue in (self.h2d, self.compute, self.d2h, *(self._hops or ()), *self._host_queues):
            queue.close()


def _poison(tensor: Tensor) -> None:
    """Fill memory with what nobody writes: not a number where it holds numbers, ones in every bit where it holds packed
    bytes."""
    tensor.fill_(torch.nan if tensor.is_floating_point() else 255)


def _clear_frames(error: BaseException) -> None:
    """Drop the local variables of an error and of what caused it, but not where it happened."""
    # They are what the failed work computed with, gigabytes of it on a GPU, for as long as somebody holds the error.
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__


@atexit.register
def _close_queues() -> None:
    # A thread that is still inside torch while the interpreter goes down would crash the process.
    for open_queue in list(_open_queues):
        open_queue.close()


def _serve(tasks: SimpleQueue[Task | None], group: QueueGroup, num_threads: int) -> None:
    """The thread of a queue, which does not hold the queue itself."""
    _start_thread(num_threads)
    while (task := tasks.get()) is not None:
        try:
            task()
        except BaseException as error:  # noqa: BLE001  # whatever it is, the driving thread raises it
            group.keep(error)
        # Or the last task's tensors would live until the next one comes.
        del task


def _start_thread(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    # torch gives a thread its counts (OpenMP's and MKL's, both per thread) when the thread first asks, from the last
    # value that any thread has set: ask now, while that value is this thread's own.
    torch.get_num_threads()

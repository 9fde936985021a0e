"""The common part of both devices: queues on threads of their own, a bounded arena, host buffers, one account.

Owns what `host` and `cuda` have in common. Must not know how a copy is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TypedDict

import torch
from torch import Tensor

from horizon_server.engine.device.arena import Arena, HostBuffers
from horizon_server.engine.device.host_queue import Failure, HostQueue
from horizon_server.engine.device.protocol import Component, HostComponent, Queue
from horizon_server.engine.device.timeline import summarise
from horizon_server.engine.device.trace import Trace
from horizon_server.figures import QueueFigures


class _QueueOptions(TypedDict):
    failure: Failure
    max_delay_s: float
    delay_seed: int
    trace: Trace | None


class QueuedDevice:
    """The common part of a `Device`; subclasses set `h2d`, `compute` and `d2h` and make the copies.

    `poison_on_free` fills freed memory with NaN; `max_delay_s` delays every piece of work at random; `trace` records what ran when
    on every queue.
    """

    h2d: HostQueue
    compute: HostQueue
    d2h: HostQueue

    def __init__(
        self,
        *,
        arena: Arena,
        host_buffers: HostBuffers,
        poison_on_free: bool,
        max_delay_s: float,
        delay_seed: int,
        trace: Trace | None,
    ) -> None:
        self.arena = arena
        self._host_buffers = host_buffers
        self._poison_on_free = poison_on_free
        self._max_delay_s = max_delay_s
        self._delay_seed = delay_seed
        self._trace = trace
        self._failure = Failure()
        self._host_queues: list[HostQueue] = []

    def allocate(self, component: Component, num_elements: int, dtype: torch.dtype) -> Tensor:
        tensor = self.arena.allocate(component, num_elements, dtype)
        if self._poison_on_free:
            tensor.fill_(torch.nan)
        return tensor

    def free(self, tensor: Tensor) -> None:
        if self._poison_on_free:
            tensor.fill_(torch.nan)
        self.arena.free(tensor)

    def allocate_host(
        self, component: HostComponent, num_elements: int, dtype: torch.dtype, *, piece_elements: int | None = None
    ) -> Tensor:
        tensor = self._host_buffers.allocate(component, num_elements, dtype)
        if self._poison_on_free:
            tensor.fill_(torch.nan)
        return tensor

    def free_host(self, tensor: Tensor) -> None:
        self._host_buffers.free(tensor)

    def charge(self, component: Component, num_bytes: int) -> None:
        self.arena.charge(component, num_bytes)

    def poison(self, queue: Queue, tensor: Tensor) -> None:
        if self._poison_on_free:
            queue.submit(partial(tensor.fill_, torch.nan), label="poison")

    def host_queue(self, name: str) -> HostQueue:
        queue = HostQueue(name, num_threads=1, **self._queue_options())
        self._host_queues.append(queue)
        return queue

    @property
    def refusals(self) -> list[str]:
        return []

    def raise_failure(self) -> None:
        self._failure.raise_first()

    def take_use(self) -> QueueFigures:
        return summarise(
            h2d=self.h2d.timeline,
            compute=self.compute.timeline,
            d2h=self.d2h.timeline,
            host_queues=[queue.timeline for queue in self._host_queues],
        )

    def peak_bytes(self) -> Mapping[str, int]:
        return self.arena.peak_bytes()

    def host_peak_bytes(self) -> Mapping[str, int]:
        return self._host_buffers.peak_bytes()

    def close(self) -> None:
        # In any order: each finishes what it was given, so that events that another one waits for still happen.
        for queue in (self.h2d, self.compute, self.d2h, *self._host_queues):
            queue.close()

    def _queue_options(self) -> _QueueOptions:
        return {
            "failure": self._failure,
            "max_delay_s": self._max_delay_s,
            "delay_seed": self._delay_seed,
            "trace": self._trace,
        }

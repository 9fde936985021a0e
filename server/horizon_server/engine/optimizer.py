"""AdamW on the host, behind the schedule: a step's updates run in forward order, just ahead of the next step's reads.

Owns when a unit is updated and the events that say so. Must not know how gradients came about or who reads the weights.

The update is deferred whether clipping is on or off: a step must be known to be finite before any weight is touched.

Source: AdamW, Loshchilov and Hutter (arXiv 1711.05101), as torch.optim.AdamW computes it.
"""

from __future__ import annotations

import math
from functools import partial

from torch import Tensor

from horizon_server.engine.device.protocol import Device, Event
from horizon_server.store.adamw import AdamWStep, update_unit
from horizon_server.store.host_store import HostStore

_CLIP_EPS = 1e-6


class Optimizer:
    """Updates every unit of the store once per submitted step, on a queue of its own.

    Thread: one driving thread submits; updates of one unit never overlap.
    """

    def __init__(self, store: HostStore, device: Device, *, num_threads: int) -> None:
        self._store, self._device, self._num_threads = store, device, num_threads
        self._queue = device.host_queue("optimizer")
        self._updated: dict[int, Event] = {}

    def submit(self, hyper: AdamWStep) -> None:
        """Queue the update of all units, in forward order. The gradients must be in the store and stay until updated."""
        for unit in self._store.layout.units:
            work = partial(update_unit, self._store, unit.index, hyper, num_threads=self._num_threads)
            self._queue.submit(work)
            self._updated[unit.index] = self._queue.record()

    def updated(self, unit_index: int) -> Event | None:
        """The event after which a unit's weights may be read, or None when nothing was ever submitted."""
        return self._updated.get(unit_index)

    def flush(self) -> None:
        """Block until every submitted update is done.

        Raises:
            HorizonError: whatever made a queue of the device fail.
        """
        self.wait()
        self._device.raise_failure()

    def wait(self) -> None:
        """Block until nothing is under way, failed or not."""
        self._queue.record().wait()


def global_norm(square_sums: Tensor) -> float:
    """Norm over all units, from their float64 square sums in unit order; not finite if any element was not."""
    return math.sqrt(sum(float(value) for value in square_sums))


def clip_coefficient(grad_norm: float, max_grad_norm: float | None) -> float:
    """What to scale every gradient by so that their norm is at most `max_grad_norm`, as torch.nn.utils.clip_grad_norm_ does."""
    if max_grad_norm is None:
        return 1.0
    return min(1.0, max_grad_norm / (grad_norm + _CLIP_EPS))

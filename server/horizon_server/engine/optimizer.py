"""AdamW on the host, at the end of the schedule: a step's updates run in forward order, just ahead of the next step's reads.

Where gradients are kept until the norm is known, the update is deferred: `submit` takes a whole step, which is finite. Where they
are not, each unit is updated in backward, as its gradient lands: `begin` and then `update_landed`, in the order of backward. What
is known to be finite then is the loss and the gradients so far. From the first unit that is not, all later units of the step are
left alone; the earlier ones cannot be taken back, and `num_updated_in_backward` says how many they are.

Source: AdamW, Loshchilov and Hutter (arXiv 1711.05101), as torch.optim.AdamW computes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from horizon_server.engine.device.protocol import Device, Event
from horizon_server.store.adamw import AdamWStep, update_unit
from horizon_server.store.host_store import HostStore

LrSchedule = Literal["constant", "linear", "cosine"]
IsFinite = Callable[[], bool]


class Optimizer:
    """Updates every unit of the store once per submitted step, on a queue of its own.

    `updated` holds the event after which a unit's weights may be read, where any update of it was ever submitted.
    Thread: one driving thread submits; updates of one unit never overlap.
    """

    def __init__(self, store: HostStore, device: Device, *, num_threads: int) -> None:
        self._store, self._num_threads = store, num_threads
        self.queue = device.host_queue("optimizer")
        self.updated: dict[int, Event] = {}
        self._update_if_finite: Callable[[int, Tensor, IsFinite, Set[str]], None] | None = None

    def submit(self, hyper: AdamWStep, reached: Set[str]) -> None:
        """Queue the update of all units, in forward order. The gradients must be in the store and stay until updated.

        `reached` are the tensors that have a gradient; the others stay as they are.
        """
        for unit in self._store.layout.units:
            # Forward order is the order in which the next step reads the weights.
            work = partial(update_unit, self._store, unit.index, hyper, num_threads=self._num_threads, only=reached)
            self.queue.submit(work, label=f"update {unit.index}")
            self.updated[unit.index] = self.queue.record()

    def begin(self, hyper: AdamWStep) -> None:
        """A step whose units come by `update_landed`."""
        # A flag of this step's own, because updates of the last step may still be queued. The queue's thread alone changes it.
        dropped = False

        def update(unit_index: int, gradient: Tensor, is_finite: IsFinite, reached: Set[str]) -> None:
            nonlocal dropped
            dropped = dropped or not is_finite()
            if not dropped:
                store, num_threads = self._store, self._num_threads
                update_unit(store, unit_index, hyper, num_threads=num_threads, grad=gradient, only=reached)

        self._update_if_finite = update

    def update_landed(
        self, unit_index: int, gradient: Tensor, landed: Event, is_finite: IsFinite, reached: Set[str]
    ) -> None:
        """Queue the update of one unit from a gradient that is there after `landed`, and with it what `is_finite` looks at.

        `reached` is as in `submit`; it is complete for the unit when the gradient has landed.
        """
        assert self._update_if_finite is not None, "begin comes first"
        self.queue.wait(landed)
        work = partial(self._update_if_finite, unit_index, gradient, is_finite, reached)
        self.queue.submit(work, label=f"update {unit_index}")
        self.updated[unit_index] = self.queue.record()


def num_updated_in_backward(loss: float, square_sums: Tensor) -> int:
    """How many units a step updates in backward: from the head down to the first gradient that is not finite."""
    if not math.isfinite(loss):
        return 0
    # Backward begins with the head, which is the last unit.
    finite = torch.isfinite(square_sums).flip(0).tolist()
    return finite.index(False) if False in finite else len(finite)


def global_norm(square_sums: Tensor) -> float:
    """Norm over all units, from their float64 square sums in unit order; not finite if any element was not."""
    # One by one in float64: torch may sum in another order, with another last bit.
    return math.sqrt(sum(float(value) for value in square_sums))


def clip_coefficient(grad_norm: float, max_grad_norm: float | None) -> float:
    """What to scale every gradient by so that their norm is at most `max_grad_norm`, as torch.nn.utils.clip_grad_norm_ does."""
    if max_grad_norm is None:
        return 1.0
    # The 1e-6 is torch's.
    return min(1.0, max_grad_norm / (grad_norm + 1e-6))


def learning_rate_at(
    step: int, *, learning_rate: float, schedule: LrSchedule, warmup_steps: int, num_steps: int
) -> float:
    """The rate of the step with this 0-based index.

    It rises linearly from 0 over `warmup_steps`; then it stays (constant), falls linearly to 0 at `num_steps` (linear), or
    follows half a cosine to 0 at `num_steps` (cosine).
    """
    # The formulas are those of transformers' schedulers of the same names, so that curves compare.
    if step < warmup_steps:
        return learning_rate * step / max(1, warmup_steps)
    if schedule == "constant":
        return learning_rate
    progress = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    if schedule == "linear":
        return learning_rate * max(0.0, 1.0 - progress)
    return learning_rate * max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))

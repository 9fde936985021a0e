"""What a step tells the world: plain numbers, ready to be sent on.

Owns the shapes of reports. Must not know who reads them.

Units: seconds and bytes; a loss is the mean over supervised tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TransferReport:
    """One direction of the link during a step."""

    bytes: int
    busy_s: float
    exposed_s: float

    @property
    def overlap_ratio(self) -> float:
        """How much of the copying was hidden behind compute: 1 is all of it."""
        return overlap_ratio(busy_s=self.busy_s, exposed_s=self.exposed_s)


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One call of `Trainer.train_step`.

    `step` counts from 1. `skipped` says why not every weight was updated, or None: `non_finite_gradient` touched nothing,
    `partly_non_finite_gradient` only the units that an update in backward had reached. The optimizer's seconds are those
    spent since the previous report: the update of a step runs during the next one. `device_memory` holds each component's peak so far.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    num_tokens: int
    num_targets: int
    duration_s: float
    skipped: str | None
    transfer: Mapping[str, TransferReport]
    compute_s: float
    optimizer_s: float
    optimizer_exposed_s: float
    model_flops: float
    device_memory: Mapping[str, int]
    host_memory: Mapping[str, int]

    @property
    def overlap_ratio(self) -> float:
        """How much of the copying in both directions was hidden behind compute: 1 is all of it."""
        return overlap_ratio(
            busy_s=sum(direction.busy_s for direction in self.transfer.values()),
            exposed_s=sum(direction.exposed_s for direction in self.transfer.values()),
        )


@dataclass(frozen=True, kw_only=True)
class EvalReport:
    """One call of `Trainer.evaluate`: the mean loss over its supervised tokens, and what the queues did for it.

    The optimizer's seconds are the rest of the last step's update, which runs ahead of the evaluation's own reads.
    """

    loss: float
    num_tokens: int
    num_targets: int
    duration_s: float
    transfer: Mapping[str, TransferReport]
    compute_s: float
    optimizer_s: float
    optimizer_exposed_s: float


def overlap_ratio(*, busy_s: float, exposed_s: float) -> float:
    """1 - exposed / busy, and 1 where nothing was copied; waits beyond the copies' own time do not make it negative."""
    if busy_s <= 0:
        return 1.0
    return min(1.0, max(0.0, 1.0 - exposed_s / busy_s))

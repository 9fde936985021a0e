"""What the engine measures in a step and in an evaluation: one definition from the engine to the events and the metrics.

Units: bytes and seconds. A loss is the mean over supervised tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class TransferFigures:
    """One direction of the link over a period. Units: bytes and seconds; `exposed_s` is compute idle, waiting for it."""

    bytes: int = 0
    busy_s: float = 0.0
    exposed_s: float = 0.0

    @property
    def overlap_ratio(self) -> float:
        """Share of the copying time that compute hid."""
        return overlap_ratio([self])


@dataclass(frozen=True, kw_only=True)
class QueueFigures:
    """What the device's queues did over a period, from their own clocks. Units: seconds.

    The optimizer's seconds are those since the previous figures were taken: the update of a step runs during the next one, or
    during the evaluation that follows it. `optimizer_exposed_s` is the part that nothing else hid.
    """

    h2d: TransferFigures = field(default_factory=TransferFigures)
    d2h: TransferFigures = field(default_factory=TransferFigures)
    compute_s: float = 0.0
    optimizer_s: float = 0.0
    optimizer_exposed_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StepFigures(QueueFigures):
    """One optimizer step.

    `step` counts from 1. `num_tokens` are real tokens, without padding. `grad_norm` is the global norm before clipping.
    `skipped` says why not every weight was updated, or is empty: `non_finite_gradient` changed nothing,
    `partly_non_finite_gradient` only the units that an update during backward had reached. `model_flops` are the model's own
    operations, without recompute. The memory figures hold each component's peak since the start.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    num_tokens: int
    duration_s: float
    overlap_ratio: float = 1.0
    model_flops: float = 0.0
    host_memory_bytes: dict[str, int] = field(default_factory=dict)
    device_memory_bytes: dict[str, int] = field(default_factory=dict)
    skipped: str = ""


@dataclass(frozen=True, kw_only=True)
class EvalFigures(QueueFigures):
    """One evaluation: the mean loss over its `num_targets` supervised tokens. No step's figures include it."""

    eval_loss: float
    num_targets: int
    num_tokens: int = 0
    duration_s: float = 0.0


def overlap_ratio(transfers: Iterable[TransferFigures]) -> float:
    """Share of the copying time that compute hid: 1 is all of it, also where nothing was copied.

    Waits can be longer than the copies themselves; the ratio is 0 then, not negative.
    """
    listed = list(transfers)
    busy_s = sum(transfer.busy_s for transfer in listed)
    exposed_s = sum(transfer.exposed_s for transfer in listed)
    return 1.0 if busy_s <= 0.0 else min(1.0, max(0.0, 1.0 - exposed_s / busy_s))


def total_evaluation(parts: Iterable[EvalFigures]) -> EvalFigures:
    """The figures of an evaluation that ran in parts: the loss weighted by each part's targets, everything else added."""
    listed = list(parts)
    num_targets = sum(part.num_targets for part in listed)
    return EvalFigures(
        eval_loss=sum(part.eval_loss * part.num_targets for part in listed) / num_targets,
        num_targets=num_targets,
        num_tokens=sum(part.num_tokens for part in listed),
        duration_s=sum(part.duration_s for part in listed),
        h2d=_total_transfer(part.h2d for part in listed),
        d2h=_total_transfer(part.d2h for part in listed),
        compute_s=sum(part.compute_s for part in listed),
        optimizer_s=sum(part.optimizer_s for part in listed),
        optimizer_exposed_s=sum(part.optimizer_exposed_s for part in listed),
    )


def _total_transfer(parts: Iterable[TransferFigures]) -> TransferFigures:
    listed = list(parts)
    return TransferFigures(
        bytes=sum(part.bytes for part in listed),
        busy_s=sum(part.busy_s for part in listed),
        exposed_s=sum(part.exposed_s for part in listed),
    )

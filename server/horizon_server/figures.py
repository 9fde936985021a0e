"""What the engine measures in a step and in an evaluation: one definition from the engine to the events and the
metrics.

Units: bytes and seconds. A loss is the mean over supervised tokens. A figure that /metrics shows names its metric in
its type.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

# Up to half an hour: the models that this daemon is for take minutes a step, those of tests milliseconds.
_STEP_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1800.0)
_LINK = ("device", "direction")
_COLLECTIVE = ("device", "kind", "path")
_JOB = ("job_id",)
_SET = ("job_id", "set")
# Of exp, in fp64.
_MAX_EXPONENT = 709.0


@dataclass(frozen=True)
class Metric:
    """A family of /metrics. With the label `job_id` it has a series only while that job is on the device."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def kind(self) -> str:
        """Its Prometheus type; the name shows a counter, as queries expect."""
        return "histogram" if self.buckets else "counter" if self.name.endswith("_total") else "gauge"


@dataclass(frozen=True, kw_only=True)
class TransferFigures:
    """One direction of the link over a period. Units: bytes and seconds; `exposed_s` is compute idle, waiting for
    it."""

    bytes: Annotated[int, Metric("horizon_transfer_bytes_total", "Bytes moved over the link.", _LINK)] = 0
    busy_s: Annotated[float, Metric("horizon_transfer_seconds_total", "Seconds the link's queue was busy.", _LINK)] = (
        0.0
    )
    exposed_s: Annotated[
        float,
        Metric("horizon_transfer_exposed_seconds_total", "Seconds compute stood idle waiting for the link.", _LINK),
    ] = 0.0

    @property
    def overlap_ratio(self) -> float:
        """Share of the copying time that compute hid."""
        return overlap_ratio([self])


CollectiveKind = Literal["weights", "rows", "gradients", "numbers"]
"""What ranks exchange: weights and their gradients, rows of the embedding, squares and losses."""


@dataclass(frozen=True, kw_only=True)
class CollectiveFigures:
    """What one rank did in the exchanges of one kind over a period; `exposed_s` is compute idle, waiting for them."""

    kind: CollectiveKind
    bytes: Annotated[
        int, Metric("horizon_collective_bytes_total", "Bytes that a device got from others of its job.", _COLLECTIVE)
    ] = 0
    busy_s: Annotated[
        float,
        Metric("horizon_collective_seconds_total", "Seconds that it was in exchanges with others.", _COLLECTIVE),
    ] = 0.0
    exposed_s: Annotated[
        float,
        Metric("horizon_collective_exposed_seconds_total", "Seconds compute stood idle waiting for them.", _COLLECTIVE),
    ] = 0.0


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """What one of the ranks of a job did with the others over a period.

    `path` is the library that carries their exchanges. `wait_s` are the seconds in which its compute stood idle for
    one, or for what others had to do first: a rank that others wait for has the least.
    """

    path: Literal["gloo", "nccl"]
    collectives: tuple[CollectiveFigures, ...] = ()
    wait_s: Annotated[
        float,
        Metric(
            "horizon_rank_wait_seconds_total",
            "Seconds in which a rank stood idle for exchanges with the others of its job, or for their work.",
            ("job_id", "rank"),
        ),
    ] = 0.0


_DRIVE = ("drive",)


@dataclass(frozen=True, kw_only=True)
class DriveFigures:
    """What a job read from one drive, and wrote to it, over a period: states of its layers, and nothing else."""

    read_bytes: Annotated[
        int, Metric("horizon_drive_read_bytes_total", "Bytes of states that jobs read from a drive.", _DRIVE)
    ] = 0
    written_bytes: Annotated[
        int, Metric("horizon_drive_written_bytes_total", "Bytes of states that jobs wrote to a drive.", _DRIVE)
    ] = 0


@dataclass(frozen=True, kw_only=True)
class QueueFigures:
    """What the device's queues did over a period, from their own clocks. Units: seconds.

    `compute_s` is from the first to the last operation of each piece of work. On a GPU it counts the gaps in between,
    where the device waits for the next launch. `launching_s` is the part of it in which the host was still launching
    that piece: gaps are there and nowhere else, so they are at most as long. Where it is near 0, the device always had
    work queued; it is 0 where work runs as it is called.

    The optimizer's seconds are those since the previous figures were taken: the update of a step runs during the next
    one, or during the evaluation that follows it. `optimizer_exposed_s` is the part that nothing else hid.
    """

    h2d: TransferFigures = field(default_factory=TransferFigures)
    d2h: TransferFigures = field(default_factory=TransferFigures)
    compute_s: Annotated[
        float, Metric("horizon_compute_seconds_total", "Seconds the compute queue worked.", ("device",))
    ] = 0.0
    launching_s: Annotated[
        float,
        Metric(
            "horizon_compute_launching_seconds_total",
            "Seconds the compute queue worked while the host was still launching that work: launch gaps are at most "
            "this.",
            ("device",),
        ),
    ] = 0.0
    optimizer_s: Annotated[float, Metric("horizon_optimizer_seconds_total", "Seconds the optimizer worked.")] = 0.0
    optimizer_exposed_s: Annotated[
        float, Metric("horizon_optimizer_exposed_seconds_total", "Seconds of optimizer work that nothing hid.")
    ] = 0.0


@dataclass(frozen=True, kw_only=True)
class DeviceFigures(QueueFigures):
    """With what the device's rank did with the others, as in `RankFigures`."""

    collectives: tuple[CollectiveFigures, ...] = ()
    ranks_wait_s: float = 0.0

    @property
    def of_queues(self) -> dict[str, Any]:
        """The fields of `QueueFigures`."""
        return {one.name: getattr(self, one.name) for one in fields(QueueFigures)}


@dataclass(frozen=True, kw_only=True)
class StepFigures(QueueFigures):
    """One optimizer step.

    `step` counts from 1. `num_tokens` are real tokens, without padding. `grad_norm` is the global norm before clipping.
    `noise_scale_tokens` is the gradient noise scale, averaged over steps (`engine.noise_scale`); None while unknown.
    `method_figures` are what the job's method reports besides its loss, a handful by name; empty for cross-entropy.
    `skipped` says why not every weight was updated, or is empty: `non_finite_gradient` changed nothing,
    `partly_non_finite_gradient` only the units that an update during backward had reached. `model_flops` are the
    model's own operations, without recompute. The memory figures hold each component's peak since the start.
    """

    step: int
    loss: Annotated[float, Metric("horizon_train_loss", "Token-weighted mean loss of the last step.", _JOB)]
    grad_norm: Annotated[
        float, Metric("horizon_grad_norm", "Global gradient norm of the last step before clipping.", _JOB)
    ]
    learning_rate: Annotated[float, Metric("horizon_learning_rate", "Learning rate of the last step.", _JOB)]
    num_tokens: Annotated[int, Metric("horizon_tokens_total", "Real tokens trained on.", ("project",))]
    duration_s: Annotated[
        float, Metric("horizon_step_duration_seconds", "Duration of an optimizer step.", buckets=_STEP_BUCKETS_S)
    ]
    # At /metrics for each direction, and over more than one step.
    overlap_ratio: float = 1.0
    # At /metrics as a share of the device's measured peak, which the engine does not know.
    model_flops: float = 0.0
    # Not at /metrics: it is a slow average that a job shows.
    noise_scale_tokens: float | None = None
    ranks: tuple[RankFigures, ...] = ()
    """Of a job that several devices compute, in order."""
    drives: tuple[DriveFigures, ...] = ()
    """Of a job with states on drives, in the order of its plan."""
    method_figures: Annotated[
        dict[str, float],
        Metric(
            "horizon_method_figure",
            "Figures of a job's method in its last step, by name, such as rewards/margins of dpo.",
            ("job_id", "component"),
        ),
    ] = field(default_factory=dict)
    host_memory_bytes: Annotated[
        dict[str, int],
        Metric("horizon_host_memory_bytes", "Host memory a running job uses, by component.", ("job_id", "component")),
    ] = field(default_factory=dict)
    device_memory_bytes: Annotated[
        dict[str, int],
        Metric(
            "horizon_device_memory_bytes",
            "Peak device memory of a running job's last step, by component.",
            ("job_id", "device", "component"),
        ),
    ] = field(default_factory=dict)
    skipped: Annotated[
        str,
        Metric("horizon_steps_skipped_total", "Steps whose update was dropped, wholly or in part.", ("reason",)),
    ] = ""


@dataclass(frozen=True, kw_only=True)
class EvalFigures(QueueFigures):
    """One evaluation: the mean loss over its `num_targets` supervised tokens, or the loss of the job's method. No
    step's figures include it."""

    eval_loss: Annotated[float, Metric("horizon_eval_loss", "Token-weighted mean loss of the last evaluation.", _JOB)]
    num_targets: int
    num_correct: int = 0
    """Of the supervised tokens, those that the model finds the likeliest of the whole vocabulary."""
    # Not in horizon_tokens_total, which counts tokens trained on.
    num_tokens: int = 0
    duration_s: float = 0.0
    # Of the whole evaluation; its parts have none.
    method_figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EvalSetFigures:
    """What an evaluation measured of one set. Counts are exact, and the shares follow from them: `accuracy` is the
    share of the `num_targets` supervised tokens that the model finds the likeliest, `exact_match` that of the answers
    whose final answer is the data's, None where that was not compared.
    """

    name: str
    loss: Annotated[float, Metric("horizon_eval_set_loss", "Mean loss of a set in the last evaluation.", _SET)]
    perplexity: float | None = None
    """The exponential of the loss. It and `accuracy` are None where the loss is that of a method such as dpo."""
    accuracy: Annotated[
        float | None,
        Metric("horizon_eval_set_accuracy", "Share of a set's tokens that the model finds the likeliest.", _SET),
    ] = None
    num_targets: int
    num_correct: int
    num_answers: int = 0
    num_matches: int = 0
    exact_match: Annotated[
        float | None,
        Metric("horizon_eval_set_exact_match", "Share of a set's prompts answered as the data does.", _SET),
    ] = None

    @classmethod
    def of(cls, name: str, figures: EvalFigures) -> EvalSetFigures:
        """Return what the engine has measured of a set, before any prompt is answered."""
        loss, is_cross_entropy = figures.eval_loss, not figures.method_figures
        # Beyond what a float holds it is infinite; of a loss that is not a number it is none either.
        perplexity = math.inf if loss >= _MAX_EXPONENT else math.exp(loss)
        return cls(
            name=name,
            loss=loss,
            perplexity=perplexity if is_cross_entropy else None,
            accuracy=figures.num_correct / figures.num_targets if is_cross_entropy else None,
            num_targets=figures.num_targets,
            num_correct=figures.num_correct,
        )


def overlap_ratio(transfers: Iterable[TransferFigures]) -> float:
    """Share of the copying time that compute hid: 1 is all of it, also where nothing was copied."""
    total = _total_transfer(transfers)
    # Waits can be longer than the copies themselves; the ratio is 0 then, not negative.
    return 1.0 if total.busy_s <= 0.0 else min(1.0, max(0.0, 1.0 - total.exposed_s / total.busy_s))


def total_evaluation(parts: Iterable[EvalFigures]) -> EvalFigures:
    """The figures of an evaluation that ran in parts: the loss weighted by each part's targets, everything else
    added."""
    listed = list(parts)
    num_targets = sum(part.num_targets for part in listed)
    return EvalFigures(
        eval_loss=sum(part.eval_loss * part.num_targets for part in listed) / num_targets,
        num_targets=num_targets,
        num_correct=sum(part.num_correct for part in listed),
        num_tokens=sum(part.num_tokens for part in listed),
        duration_s=sum(part.duration_s for part in listed),
        h2d=_total_transfer(part.h2d for part in listed),
        d2h=_total_transfer(part.d2h for part in listed),
        compute_s=sum(part.compute_s for part in listed),
        launching_s=sum(part.launching_s for part in listed),
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

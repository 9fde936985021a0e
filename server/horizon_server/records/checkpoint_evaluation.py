"""The evaluation of a checkpoint: the request to the child that computes it, and what came out.

Free of torch and transformers, as the daemon imports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from horizon_server.events import EvalDone
from horizon_server.records.execution import DeviceKind, Execution
from horizon_server.spec import JobSpec


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """What the child evaluates: the checkpoint of `step`, on the eval sets of `spec`.

    `spec` is the job's, with other eval sets where others are asked for; `model` the folder that the job began with.
    """

    spec: JobSpec
    step: int
    model: Path
    checkpoint: Path
    prepared: dict[str, Path]
    """The prepared folder of each eval set, by its name."""
    execution: Execution
    trained_on: DeviceKind
    """The device that the job's own evaluations were computed on."""
    digests: Path
    """The book of the digests of models."""


@dataclass(frozen=True, kw_only=True)
class CheckpointEvaluation:
    """The figures of a checkpoint. `differences` are what was computed in another way than in the job's own evaluation
    of that step, as messages: empty where the figures are the same to the last bit.
    """

    figures: EvalDone
    differences: tuple[str, ...] = ()

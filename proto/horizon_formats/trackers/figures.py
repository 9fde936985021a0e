"""What a tracker is given of a job: its config, and the figures of its steps and evaluations under the names that
people look for.

An event is read by its attributes, which have the same names in the server's and in the client's records.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_MAIN_SET = "eval"
# Of a step, by the names that notebooks know.
_OF_STEP = (
    "loss",
    "grad_norm",
    "learning_rate",
    "tokens_per_second",
    "epoch",
    "num_input_tokens_seen",
    "overlap_ratio",
    "noise_scale_tokens",
)
_OF_SET = ("loss", "accuracy", "perplexity", "exact_match")


class Ending(enum.Enum):
    """How a run ends in a tracker."""

    FINISHED = "finished"
    FAILED = "failed"
    KILLED = "killed"


@dataclass(frozen=True, kw_only=True)
class TrackedJob:
    """The job that a run is of. A run has the job's name; its identity is the job's id, so a resume is the same
    run."""

    job_id: str
    name: str
    owner: str = ""
    spec: Mapping[str, Any] = field(default_factory=dict)

    @property
    def project(self) -> str:
        """The job's project."""
        return str(self.spec.get("project") or "")

    @property
    def config(self) -> dict[str, Any]:
        """The spec with the job's id and owner."""
        return {**self.spec, "job_id": self.job_id, "owner": self.owner}

    @property
    def flat_config(self) -> dict[str, Any]:
        """The config with dotted paths, such as train.learning_rate."""
        return dict(_flat("", self.config))

    @property
    def labels(self) -> dict[str, str]:
        """What runs are filtered by."""
        return {name: str(self.spec[name]) for name in ("method", "model", "dataset") if self.spec.get(name)}


@dataclass(frozen=True, kw_only=True)
class Point:
    """The figures of one step or one evaluation. `kind` is train or eval, `time_s` when it happened (Unix seconds)."""

    kind: str
    step: int
    time_s: float
    figures: Mapping[str, float]


def point_of(kind: str, event: Any, time_s: float) -> Point | None:
    """Return the figures of an event of this kind; None for all but steps and evaluations."""
    if kind == "step":
        return Point(kind="train", step=event.step, time_s=time_s, figures=dict(_of_step(event)))
    if kind == "eval":
        return Point(kind="eval", step=event.step, time_s=time_s, figures=dict(_of_evaluation(event)))
    return None


def ending_of(state: str) -> Ending | None:
    """Return how a run ends whose job has come to this state; None for states that a job does not end in."""
    return {"SUCCEEDED": Ending.FINISHED, "FAILED": Ending.FAILED, "CANCELLED": Ending.KILLED}.get(state.upper())


def _of_step(event: Any) -> Iterator[tuple[str, float]]:
    for name in _OF_STEP:
        if (value := getattr(event, name)) is not None:
            yield f"train/{name}", float(value)
    for name, value in event.method_figures.items():
        yield f"train/{name}", float(value)
    for place, by_component in (("host", event.host_memory_bytes), ("device", event.device_memory_bytes)):
        for component, size in by_component.items():
            yield f"memory/{place}/{component}_bytes", float(size)
        if by_component:
            yield f"memory/{place}_bytes", float(sum(by_component.values()))


def _of_evaluation(event: Any) -> Iterator[tuple[str, float]]:
    yield "eval/loss", float(event.eval_loss)
    for name, value in event.method_figures.items():
        yield f"eval/{name}", float(value)
    for figures in event.sets:
        prefix = "eval" if figures.name == _MAIN_SET else f"eval/{figures.name}"
        for name in _OF_SET:
            if (value := getattr(figures, name)) is not None:
                yield f"{prefix}/{name}", float(value)


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flat(f"{prefix}.{name}" if prefix else str(name), inner)
    else:
        yield prefix, value

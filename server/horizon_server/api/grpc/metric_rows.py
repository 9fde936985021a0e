"""What a job's steps and evaluations measured, whole: a row for each, as columns, so that a client reads a hundred
thousand steps in seconds."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from horizon_server.records.job import JobRecord
from horizon_server.services.jobs import JobService

# Events of an answer: some hundred kilobytes.
_ROWS_AT_ONCE = 1000
_KINDS = ("step", "eval")
_OF_A_STEP = (
    *("loss", "grad_norm", "learning_rate", "epoch", "num_input_tokens_seen", "num_tokens", "tokens_per_second"),
    *("duration_s", "overlap_ratio", "noise_scale_tokens"),
)
_MEMORY = ("host_memory_bytes", "device_memory_bytes")
_OF_A_SET = ("loss", "perplexity", "accuracy", "exact_match")


@dataclass(frozen=True, kw_only=True)
class MetricColumn:
    """One figure of all rows; NaN where a row has none."""

    name: str
    values: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class MetricRows:
    """Some events, a row for each; `last_sequence` is the number of the last one."""

    last_sequence: int
    steps: Sequence[int]
    times_s: Sequence[float]
    are_evals: Sequence[bool]
    columns: Sequence[MetricColumn]


@dataclass(kw_only=True)
class _Rows:
    """Rows that are being read."""

    last_sequence: int
    steps: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    are_evals: list[bool] = field(default_factory=list)
    figures: list[Mapping[str, Any]] = field(default_factory=list)

    def take(self, sequence: int, time_s: float, event: Mapping[str, Any]) -> None:
        """Take in the next event."""
        self.last_sequence = sequence
        self.steps.append(event["step"])
        self.times_s.append(time_s)
        self.are_evals.append(event["kind"] == "eval")
        self.figures.append(_of_eval(event) if event["kind"] == "eval" else _of_step(event))

    def columns(self) -> list[MetricColumn]:
        """Return each figure that a row has."""
        names = dict.fromkeys(name for figures in self.figures for name in figures)
        return [
            MetricColumn(name=name, values=[figures.get(name, math.nan) for figures in self.figures]) for name in names
        ]


async def metric_rows(jobs: JobService, job: JobRecord, after: int) -> AsyncIterator[MetricRows]:
    """Yield what was measured after an event, up to the last one that the caller's record knows of: a running job keeps
    writing, and this must end."""
    while after < job.last_sequence:
        rows = _Rows(last_sequence=after)
        number = await jobs.visit_events(job, kinds=_KINDS, after=after, limit=_ROWS_AT_ONCE, visit=rows.take)
        if not number:
            return
        after = rows.last_sequence
        yield MetricRows(
            last_sequence=after,
            steps=rows.steps,
            times_s=rows.times_s,
            are_evals=rows.are_evals,
            columns=rows.columns(),
        )


def _of_step(event: Mapping[str, Any]) -> dict[str, Any]:
    figures = {name: event[name] for name in _OF_A_STEP if event.get(name) is not None}
    figures |= {name: sum(event.get(name, {}).values()) for name in _MEMORY}
    return figures | {f"method/{name}": value for name, value in event.get("method_figures", {}).items()}


def _of_eval(event: Mapping[str, Any]) -> dict[str, Any]:
    figures = {"eval_loss": event["eval_loss"]}
    for one in event.get("sets", ()):
        figures |= {f"{one['name']}/{name}": one[name] for name in _OF_A_SET if one.get(name) is not None}
    return figures

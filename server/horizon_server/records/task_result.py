"""What evaluation programs have measured of a job's checkpoints, as their callers have recorded it."""

from __future__ import annotations

from dataclasses import dataclass

from horizon_server.records.times import UnixTime


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """One metric of a task, of one checkpoint. The daemon stores it as it was sent, unchecked."""

    step: int
    """The checkpoint's."""
    task: str
    metric: str
    """Such as acc, or exact_match,strict-match where the program filters answers first."""
    value: float
    stderr: float | None = None
    num_samples: int = 0
    """How many documents of the task were used, of `num_documents`."""
    num_documents: int = 0
    version: str = ""
    """Of the task."""
    program: str = ""
    """That has measured it, with its version."""
    recorded_s: UnixTime = 0.0

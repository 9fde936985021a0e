"""When an attempt is at its end: all steps done, a limit of the job reached, or no better evaluation for long
enough."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from horizon_server.errors import Stalled
from horizon_server.spec import EvalSpec
from horizon_server.worker_link.request import RunLimits


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How an attempt ended; `stopped`: by an order, checkpointed unless it was cancelled, or paused without disk space;
    `moved`: by the order to let another worker continue in its memory. `reason` is empty where all steps were done."""

    outcome: Literal["succeeded", "stopped", "moved"]
    reason: str = ""
    message: str = ""


class Ending:
    """Decides after each step whether the job is at its end. What it knows of evaluations is in checkpoints."""

    def __init__(self, *, num_steps: int, limits: RunLimits, evaluation: EvalSpec) -> None:
        self._num_steps, self._limits, self._evaluation = num_steps, limits, evaluation
        self._best: float | None = None
        self._num_without_gain = 0

    @property
    def last_step(self) -> int:
        """The last step that the job may do."""
        limit = self._limits.max_steps
        return self._num_steps if limit is None else min(limit, self._num_steps)

    def observe(self, judged: float) -> None:
        """Take note of the figure that decides. That of the model as it was given counts too, as the first to be better
        than."""
        evaluation = self._evaluation
        if self._best is None or evaluation.is_better(judged, self._best, by=evaluation.min_delta):
            self._best, self._num_without_gain = judged, 0
        else:
            self._num_without_gain += 1

    def at(self, step: int) -> Outcome | None:
        """The outcome of a job that has done `step` steps, None where it is not at its end.

        Raises:
            Stalled: its time is over before the first step, so that there is nothing to keep.
        """
        patience, limits, done = self._evaluation.patience, self._limits, f"after step {step} of {self._num_steps}"
        if step >= self._num_steps:
            return Outcome(outcome="succeeded")
        if patience and self._num_without_gain >= patience:
            message = (
                f"ended {done}: eval.patience is {patience}, and as many evaluations were not better than "
                f"{self._best:.4g}"
            )
            return Outcome(outcome="succeeded", reason="EARLY_STOPPED", message=message)
        if limits.max_steps is not None and step >= limits.max_steps:
            message = f"ended {done}, which is limits.max_steps"
            return Outcome(outcome="succeeded", reason="STEP_LIMIT", message=message)
        if limits.deadline_s is not None and time.time() >= limits.deadline_s:
            if step == 0:
                raise Stalled(
                    "limits.max_hours were over before the job's first step; raise it and submit the job again"
                )
            message = f"ended {done}, as limits.max_hours were over"
            return Outcome(outcome="succeeded", reason="WALL_CLOCK_LIMIT", message=message)
        return None

    def state(self) -> dict[str, Any]:
        """What to keep in a checkpoint, as JSON values."""
        return {"best": self._best, "num_without_gain": self._num_without_gain}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self._best, self._num_without_gain = state["best"], int(state["num_without_gain"])

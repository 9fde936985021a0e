"""Learning rate as a pure function of the step.

Owns the three schedules with warmup. The formulas are those of transformers' schedulers of the same names, so that curves compare.
"""

from __future__ import annotations

import math
from typing import Literal

LrSchedule = Literal["constant", "linear", "cosine"]


def learning_rate_at(
    step: int, *, learning_rate: float, schedule: LrSchedule, warmup_steps: int, num_steps: int
) -> float:
    """The rate of the step with this 0-based index.

    It rises linearly from 0 over `warmup_steps`; then it stays (constant), falls linearly to 0 at `num_steps` (linear), or
    follows half a cosine to 0 at `num_steps` (cosine).
    """
    if step < warmup_steps:
        return learning_rate * step / max(1, warmup_steps)
    if schedule == "constant":
        return learning_rate
    progress = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    if schedule == "linear":
        return learning_rate * max(0.0, 1.0 - progress)
    return learning_rate * max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))

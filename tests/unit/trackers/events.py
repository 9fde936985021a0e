"""Events as the client receives them, and a job for trackers to follow."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from horizon_formats.trackers import Point, TrackedJob, point_of

JOB = TrackedJob(
    job_id="job_0123456789ab",
    name="gsm8k",
    owner="ada",
    spec={
        "name": "gsm8k",
        "project": "nlp",
        "model": "tiny",
        "dataset": "sums",
        "method": "dpo",
        "train": {"learning_rate": 1e-5, "betas": [0.9, 0.999]},
    },
)


def step_event(step: int, loss: float = 2.0, **more: Any) -> Any:
    return SimpleNamespace(
        **{
            "step": step,
            "loss": loss,
            "grad_norm": 0.5,
            "learning_rate": 1e-5,
            "tokens_per_second": 1000.0,
            "epoch": 0.1 * step,
            "num_input_tokens_seen": 64 * step,
            "overlap_ratio": 0.9,
            "noise_scale_tokens": None,
            "method_figures": {"rewards/margins": 0.25},
            "host_memory_bytes": {"weights": 100, "moments": 200},
            "device_memory_bytes": {},
            **more,
        }
    )


def eval_event(step: int, loss: float = 3.0) -> Any:
    sets = [
        SimpleNamespace(name="eval", loss=loss, accuracy=0.5, perplexity=20.0, exact_match=None),
        SimpleNamespace(name="hard", loss=4.0, accuracy=None, perplexity=None, exact_match=0.75),
    ]
    return SimpleNamespace(step=step, eval_loss=loss, sets=sets, method_figures={})


def points(*events: Any) -> list[Point]:
    found = [
        point_of("eval" if hasattr(event, "eval_loss") else "step", event, 1_700_000_000.0 + event.step)
        for event in events
    ]
    return [point for point in found if point is not None]


def steps(numbers: Sequence[int], loss: float = 2.0) -> list[Point]:
    return points(*(step_event(number, loss + number) for number in numbers))

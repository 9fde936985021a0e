"""Learning rates step by step against transformers' schedulers."""

from __future__ import annotations

import pytest
import torch
import transformers

from horizon_server.engine.optimizer import learning_rate_at
from horizon_server.recipe import LrSchedule, Recipe

PEAK = 3e-4
CASES = [(0, 12), (5, 12), (1, 1), (12, 12), (20, 12)]


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)


def check(
    reference: torch.optim.lr_scheduler.LRScheduler,
    schedule: LrSchedule,
    warmup_steps: int,
    num_steps: int,
    *,
    min_ratio: float = 0.0,
    decay_ratio: float = 0.0,
) -> None:
    recipe = Recipe(
        learning_rate=PEAK,
        lr_schedule=schedule,
        warmup_steps=warmup_steps,
        min_lr_ratio=min_ratio,
        lr_decay_ratio=decay_ratio,
    )
    for step in range(num_steps):
        rate = learning_rate_at(step, recipe, num_steps=num_steps)
        assert rate == pytest.approx(reference.get_last_lr()[0], rel=1e-12, abs=1e-18), f"step {step}"
        reference.optimizer.step()
        reference.step()


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("warmup_steps", "num_steps"), CASES)
def test_the_rates_are_those_of_transformers(schedule: LrSchedule, warmup_steps: int, num_steps: int) -> None:
    name = {"constant": "constant_with_warmup"}.get(schedule, schedule)
    check(transformers.get_scheduler(name, optimizer(), warmup_steps, num_steps), schedule, warmup_steps, num_steps)


@pytest.mark.parametrize("min_ratio", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(("warmup_steps", "num_steps"), CASES)
def test_a_cosine_ends_at_its_share(min_ratio: float, warmup_steps: int, num_steps: int) -> None:
    reference = transformers.get_scheduler(
        "cosine_with_min_lr", optimizer(), warmup_steps, num_steps, {"min_lr_rate": min_ratio}
    )
    check(reference, "cosine_with_min_lr", warmup_steps, num_steps, min_ratio=min_ratio)


@pytest.mark.parametrize("min_ratio", [0.0, 0.1])
@pytest.mark.parametrize(
    ("warmup_steps", "num_steps", "decay_ratio", "decay_steps"),
    # The last three: a share is rounded up, and a decay begins after the warmup.
    [
        (0, 12, 0.5, 6),
        (5, 12, 0.25, 3),
        (1, 1, 0.1, 0),
        (20, 12, 0.5, 0),
        (3, 12, 0.0, 0),
        (5, 12, 0.2, 3),
        (9, 100, 0.07, 7),
        (5, 12, 1.0, 7),
    ],
)
def test_wsd_stays_and_decays(
    min_ratio: float, warmup_steps: int, num_steps: int, decay_ratio: float, decay_steps: int
) -> None:
    reference = transformers.get_wsd_schedule(
        optimizer(), warmup_steps, decay_steps, num_training_steps=num_steps, min_lr_ratio=min_ratio
    )
    check(reference, "wsd", warmup_steps, num_steps, min_ratio=min_ratio, decay_ratio=decay_ratio)

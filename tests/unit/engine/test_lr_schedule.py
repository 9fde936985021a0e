from __future__ import annotations

from typing import get_args

import pytest
import torch
import transformers

from horizon_server.engine.optimizer import LrSchedule, learning_rate_at


@pytest.mark.parametrize("schedule", get_args(LrSchedule))
@pytest.mark.parametrize(("warmup_steps", "num_steps"), [(0, 12), (5, 12), (1, 1), (12, 12), (20, 12)])
def test_the_rates_are_those_of_transformers(schedule: LrSchedule, warmup_steps: int, num_steps: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    name = {"constant": "constant_with_warmup"}.get(schedule, schedule)
    reference = transformers.get_scheduler(name, optimizer, warmup_steps, num_steps)

    for step in range(num_steps):
        rate = learning_rate_at(
            step, learning_rate=3e-4, schedule=schedule, warmup_steps=warmup_steps, num_steps=num_steps
        )
        assert rate == pytest.approx(reference.get_last_lr()[0], rel=1e-12, abs=1e-18)
        optimizer.step()
        reference.step()

"""Calls of a session with experts in pages: the bytes of whole layers whose classes compute their experts one by
one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tests.golden.test_called_steps import ADAM, Begin, begin, call, called, objective_of, rows_of, same
from tests.golden.test_paged_experts import ONE_EXPERT, eager_model

from horizon_server.engine.called_trainer import CalledTrainer
from horizon_server.engine.device.host import HostDevice

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine

__all__ = ["begin"]
PAGES = (0, ONE_EXPERT, 1 << 28)


@pytest.mark.parametrize("num_calls", [1, 3])
@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_calls_that_add_up_give_the_bytes_of_whole_layers(
    architecture: str, num_calls: int, engine: Engine, begin: Begin
) -> None:
    model = eager_model(engine, architecture)
    found = []
    for elements in PAGES:
        device = HostDevice(num_threads=1, max_delay_s=0.001, delay_seed=1, poison_on_free=True)
        life = begin(CalledTrainer, model, device=device, expert_page_elements=elements)
        numbers = []
        for step in range(3):
            numbers += [call(life, num_calls * step + number) for number in range(num_calls)]
            numbers.append(called(life).apply(**ADAM, max_grad_norm=0.5).grad_norm)
            # As another job's turn does.
            life.trainer.release_device()
        rows = rows_of(9)
        scored = torch.cat(called(life).forward(rows, objective_of(rows)).logprobs)
        found.append((numbers, [*life.planes(), scored]))
    for numbers, planes in found[1:]:
        assert numbers == found[0][0]
        assert same(planes, found[0][1])

"""Layers whose experts come in pages give the bytes of whole layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from horizon_server.engine.template import Template

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine, Run, TinyModel

PLANES = ("hi", "lo", "exp_avg", "exp_avg_sq")
FAMILIES = ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "ernie4_5_moe", "minimax", "phimoe", "qwen3_next", "deepseek_v32"]


def eager(engine: Engine, architecture: str, **changes: Any) -> TinyModel:
    """A model whose whole layers compute their experts one by one, as pages do."""
    model = engine.tiny_model(architecture, **changes)
    return model


def planes(run: Run) -> list[Tensor]:
    run.trainer.flush()
    return [run.store.plane(name).view(torch.uint8).clone() for name in PLANES]


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("num_experts_of_a_page", [1, 2])
def test_pages_give_the_bytes_of_whole_layers(architecture: str, num_experts_of_a_page: int, engine: Engine) -> None:
    model = engine.tiny_model(architecture, experts_implementation="eager")
    rows = [engine.pack(engine.documents(20)), engine.pack(engine.documents(31)), engine.pack(engine.documents(9))]
    size = 3 * 32 * 48 * num_experts_of_a_page + 400
    found = []
    for elements in (0, size):
        run = engine.start(model, max_grad_norm=0.5, expert_page_elements=elements)
        steps = [run.trainer.train_step(rows) for _ in range(3)]
        found.append(([(step.loss, step.grad_norm) for step in steps], planes(run)))

    (numbers, whole), (others, paged) = found
    assert numbers == others
    for one, other in zip(whole, paged, strict=True):
        assert torch.equal(one, other)

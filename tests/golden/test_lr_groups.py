"""Learning-rate groups: a whole run against torch.optim.AdamW with parameter groups."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup

from horizon_server.engine.template import Template
from horizon_server.planning.lr_groups import with_lr_groups
from horizon_server.spec import LrGroup

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine

NUM_STEPS = 20
GROUPS = (
    LrGroup(match="embed_tokens", scale=0.1),
    LrGroup(match=r"layers\.0\.", scale=0.5),
    LrGroup(match=r"down_proj|norm", scale=2.0),
)


# The table of qwen3 is the output projection too; llama's is updated by rows.
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("updates_in_backward", [False, True])
def test_twenty_steps_follow_a_plain_loop(
    architecture: str,
    updates_in_backward: bool,
    engine: Engine,
) -> None:
    model = engine.tiny_model(architecture)
    layout = with_lr_groups(model.template.layout, GROUPS)
    model = dataclasses.replace(model, template=Template.from_config(model.config, layout=layout))
    store = model.store(grad_dtype=None if updates_in_backward else torch.float32)
    limit = None if updates_in_backward else 1.0
    steps = [
        [engine.pack(engine.documents(11, 20, seed=step % 5)), engine.pack(engine.documents(16, seed=step % 3))]
        for step in range(NUM_STEPS)
    ]
    run = engine.start(
        model, store=store, learning_rate=3e-3, betas=(0.9, 0.99), weight_decay=0.1, warmup_steps=3, max_grad_norm=limit
    )

    losses = [run.trainer.train_step(rows).loss for rows in steps]
    run.trainer.flush()

    reference, before = model.reference(), model.weights
    groups: list[dict[str, Any]] = [
        {"params": [parameter], "lr": 3e-3 * place.lr_scale, "weight_decay": 0.1 if place.decay else 0.0}
        for name, parameter in reference.named_parameters()
        for place in [layout.find(name)[1]]
    ]
    assert len({group["lr"] for group in groups}) == 4
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), eps=1e-8)
    schedule = get_cosine_schedule_with_warmup(optimizer, 3, NUM_STEPS)
    expected = []
    for rows in steps:
        loss = sum((engine.plain_loss(reference, row) for row in rows), torch.zeros(())) / sum(
            r.num_targets for r in rows
        )
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        if limit is not None:
            torch.nn.utils.clip_grad_norm_(reference.parameters(), limit)
        optimizer.step()
        schedule.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, parameter in reference.named_parameters():
        wanted = parameter.detach() - before[name]
        unit, place = layout.find(name)
        weights = torch.empty(unit.num_elements)
        store.merge_master(unit.index, weights)
        moved = weights[place.offset :][: place.num_elements].view(place.shape) - before[name]
        error = float((moved - wanted).norm() / wanted.norm())
        assert error <= 2e-3, f"{name} has moved otherwise, by {error:.1e}"

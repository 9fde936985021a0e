"""Label smoothing: loss and gradients of a whole model against plain autograd with torch's own cross_entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from horizon_server.engine.micro_batch import IGNORED_LABEL, MicroBatch

if TYPE_CHECKING:
    from tests.support.tiny_models import Run, TinyModel

Pack = Callable[[list[Tensor]], MicroBatch]
SMOOTHING = 0.15


# gemma2 caps its logits, so that its backward wants them again; qwen3 ties the table.
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "qwen3"])
def test_gradients_are_those_of_torch(
    architecture: str,
    tiny_model: Callable[..., TinyModel],
    start: Callable[..., Run],
    documents: Callable[..., list[Tensor]],
    pack: Pack,
) -> None:
    model = tiny_model(architecture)
    rows = [pack(documents(14)), pack(documents(25, seed=3))]
    # Tokens without loss, whose logits get no gradient.
    rows[1].labels_T[:9] = IGNORED_LABEL
    num_targets = sum(row.num_targets for row in rows)
    run = start(model, head_chunk_tokens=8, label_smoothing=SMOOTHING)

    report = run.trainer.train_step(rows)

    reference, loss = model.reference(), 0.0
    for row in rows:
        logits_TV = reference(input_ids=row.input_ids_T[None], use_cache=False).logits[0]
        part = functional.cross_entropy(
            logits_TV, row.labels_T, reduction="sum", ignore_index=IGNORED_LABEL, label_smoothing=SMOOTHING
        )
        torch.autograd.backward(part / num_targets)
        loss += part.item() / num_targets
    assert report.loss == pytest.approx(loss, rel=1e-6)
    wanted, got = [], []
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        wanted.append(parameter.grad.reshape(-1))
        got.append(run.gradient(name).reshape(-1))
    error = float((torch.cat(got) - torch.cat(wanted)).norm() / torch.cat(wanted).norm())
    assert error <= 1e-6, f"gradients are off by {error:.1e}"


def test_an_evaluation_is_not_smoothed(
    tiny_model: Callable[..., TinyModel], start: Callable[..., Run], documents: Callable[..., list[Tensor]], pack: Pack
) -> None:
    rows = [pack(documents(14, 22))]
    smoothed = start(tiny_model("llama"), label_smoothing=SMOOTHING).trainer
    plain = start(tiny_model("llama")).trainer

    assert smoothed.evaluate(rows).eval_loss == plain.evaluate(rows).eval_loss
    assert smoothed.train_step(rows).loss != plain.train_step(rows).loss

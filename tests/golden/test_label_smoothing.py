"""Label smoothing: loss and gradients of a whole model against plain autograd with torch's own cross_entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.double import check_gradients, check_numbers, gradients_of, plain_and_exact
from torch import Tensor
from torch.nn import functional

from horizon_server.engine.micro_batch import IGNORED_LABEL, MicroBatch

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine

Pack = Callable[[list[Tensor]], MicroBatch]
SMOOTHING = 0.15


# gemma2 caps its logits, so that its backward wants them again; qwen3 ties the table.
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "qwen3"])
def test_gradients_are_those_of_torch(
    architecture: str,
    engine: Engine,
) -> None:
    model = engine.tiny_model(architecture)
    rows = [engine.pack(engine.documents(14)), engine.pack(engine.documents(25, seed=3))]
    # Tokens without loss, whose logits get no gradient.
    rows[1].labels_T[:9] = IGNORED_LABEL
    num_targets = sum(row.num_targets for row in rows)
    run = engine.start(model, head_chunk_tokens=8, label_smoothing=SMOOTHING)

    report = run.trainer.train_step(rows)

    def autograd(reference: Any) -> tuple[float, dict[str, Tensor]]:
        loss = 0.0
        for row in rows:
            logits_TV = reference(input_ids=row.input_ids_T[None], use_cache=False).logits[0]
            part = functional.cross_entropy(
                logits_TV, row.labels_T, reduction="sum", ignore_index=IGNORED_LABEL, label_smoothing=SMOOTHING
            )
            torch.autograd.backward(part / num_targets)
            loss += part.item() / num_targets
        return loss, gradients_of(reference)

    plain, exact = plain_and_exact(model.reference, autograd)
    check_numbers(report.loss, plain[0], exact[0])
    check_gradients({name: run.gradient(name) for name in exact[1]}, plain[1], exact[1])


def test_an_evaluation_is_not_smoothed(engine: Engine) -> None:
    rows = [engine.pack(engine.documents(14, 22))]
    smoothed = engine.start(engine.tiny_model("llama"), label_smoothing=SMOOTHING).trainer
    plain = engine.start(engine.tiny_model("llama")).trainer

    assert smoothed.evaluate(rows).eval_loss == plain.evaluate(rows).eval_loss
    assert smoothed.train_step(rows).loss != plain.train_step(rows).loss

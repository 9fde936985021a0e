"""Steps in lanes have the same bits on any number of ranks; these are threads with a device each, joined by gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.ranks import SharedStore, trained
from tests.support.tiny_models import Engine

from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.trainer import Trainer

LENGTHS = [(9, 14, 5), (21,), (7, 3, 12), (16, 4), (11, 8), (6, 19)]


def rows_of(engine: Engine, *, num_steps: int) -> list[list[MicroBatch]]:
    return [
        [engine.pack(engine.documents(*lengths, seed=10 * step + index)) for index, lengths in enumerate(LENGTHS)]
        for step in range(num_steps)
    ]


def steps(rows: list[list[MicroBatch]]) -> Callable[[Trainer], list[Any]]:
    def work(trainer: Trainer) -> list[Any]:
        figures = [trainer.train_step(step) for step in rows]
        evaluated = trainer.evaluate(rows[0])
        logprobs = trainer.log_probabilities(rows[1])
        trainer.flush()
        found: list[Any] = [(one.loss, one.grad_norm, one.skipped, one.noise_scale_tokens) for one in figures]
        numbers = [values.numpy().tobytes() for values in logprobs]
        return [*found, (evaluated.eval_loss, evaluated.num_correct), numbers]

    return work


@pytest.mark.parametrize("gathers", [False, True], ids=["reads", "gathers"])
@pytest.mark.parametrize("max_grad_norm", [0.5, None], ids=["clip", "no-clip"])
@pytest.mark.parametrize("model_type", ["qwen3", "llama", "gpt2", "mixtral"])
def test_any_number_of_ranks_gives_the_same_bits(
    engine: Engine, model_type: str, max_grad_norm: float | None, gathers: bool
) -> None:
    model, rows = engine.tiny_model(model_type), rows_of(engine, num_steps=3)
    found = {}
    for num_ranks in (1, 2, 3, 4):
        shared = SharedStore(model, grad_dtype=None if max_grad_norm is None else torch.float32)
        results = trained(
            shared,
            steps(rows),
            num_ranks=num_ranks,
            lanes=8,
            gathers=gathers,
            max_grad_norm=max_grad_norm,
            micro_batch_tokens=24,
            tokens_per_step=160,
            weight_decay=0.1,
        )
        found[num_ranks] = (results, shared.bits())
    for num_ranks in (2, 3, 4):
        assert found[num_ranks][0] == found[1][0], num_ranks
        assert found[num_ranks][1] == found[1][1], num_ranks

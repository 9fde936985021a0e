"""The gradient noise scale's two norms against plain autograd, and that measuring them changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from horizon_server.engine import trainer
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.noise_scale import EVERY_STEPS, NoiseScale, Part
from horizon_server.engine.objectives import Documents, StepObjective, WeightedSFT

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine, Run

Pack = Callable[[list[Tensor]], MicroBatch]


def square_of_layers(reference: torch.nn.Module) -> float:
    parts = [p.grad for name, p in reference.named_parameters() if ".layers." in name and p.grad is not None]
    return sum(float(part.double().square().sum()) for part in parts)


def watched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is observed from now on."""
    seen: list[dict[str, Any]] = []

    def observe(self: NoiseScale, **numbers: Any) -> None:
        seen.append(numbers)

    monkeypatch.setattr(NoiseScale, "observe", observe)
    return seen


# Experts: what a micro-batch does not reach has no gradient yet.
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("max_grad_norm", [1.0, None])
def test_both_norms_are_those_of_plain_autograd(
    architecture: str,
    max_grad_norm: float | None,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, seen = engine.tiny_model(architecture), watched(monkeypatch)
    rows = [
        engine.pack(engine.documents(14)),
        engine.pack(engine.documents(25, seed=3)),
        engine.pack(engine.documents(9, seed=4)),
    ]
    store = model.store(grad_dtype=None if max_grad_norm is None else torch.float32)
    run = engine.start(model, store=store, max_grad_norm=max_grad_norm)
    for _ in range(2):
        run.trainer.train_step(rows)

    (numbers,) = seen
    reference = model.reference()
    torch.autograd.backward(engine.plain_loss(reference, rows[0]) / rows[0].num_targets)
    assert numbers["small_square"] == pytest.approx(square_of_layers(reference), rel=1e-5)
    assert (numbers["small"], numbers["big"]) == (Part.of(13), Part.of(13 + 24 + 8))
    reference.zero_grad()
    for row in rows:
        torch.autograd.backward(engine.plain_loss(reference, row) / numbers["big"].num_tokens)
    assert numbers["big_square"] == pytest.approx(square_of_layers(reference), rel=1e-5)


@pytest.mark.parametrize("micro_batch_tokens", [0, 24])
def test_both_norms_of_weighted_means_are_those_of_plain_autograd(
    micro_batch_tokens: int,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, seen = engine.tiny_model("llama"), watched(monkeypatch)
    # Rows of up to 24 tokens are joined: the first two are the first micro-batch then.
    rows = [
        engine.pack(engine.documents(14)),
        engine.pack(engine.documents(9, seed=4)),
        engine.pack(engine.documents(25, seed=3)),
    ]
    weights_S = torch.rand(13 + 8 + 24, generator=torch.Generator().manual_seed(5)) + 0.25
    objective = StepObjective(objective=WeightedSFT(), documents=Documents.of(rows), weights_S=weights_S)
    engine.start(model, micro_batch_tokens=micro_batch_tokens).trainer.train_step(rows, objective)

    (numbers,) = seen
    num_first = 13 + 8 if micro_batch_tokens else 13
    assert (numbers["small"], numbers["big"]) == (Part.of(num_first, weights_S), Part.of(45, weights_S))
    for square, count in (("small_square", num_first), ("big_square", 45)):
        reference, sizes = model.reference(), [13, 8, 24]
        for row, weights in zip(rows, torch.split(weights_S, sizes), strict=True):
            if count <= 0:
                break
            logits = reference(row.input_ids_T[None], position_ids=row.position_ids_T[None]).logits[0, :-1]
            losses = torch.nn.functional.cross_entropy(logits, row.labels_T[:-1], reduction="none")
            torch.autograd.backward(
                (losses * weights).sum() / weights_S[: 45 if square == "big_square" else num_first].sum()
            )
            count -= weights.numel()
        assert numbers[square] == pytest.approx(square_of_layers(reference), rel=1e-5)


def test_it_is_reported_and_continues_and_changes_no_bit(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, num_steps = engine.tiny_model("llama"), 5 * EVERY_STEPS

    def rows(step: int) -> list[MicroBatch]:
        return [engine.pack(engine.documents(14, seed=step)), engine.pack(engine.documents(25, seed=100 + step))]

    def steps(run: Run, numbers: range) -> list[Any]:
        figures = [run.trainer.train_step(rows(step)) for step in numbers]
        run.trainer.flush()
        return figures

    measured, single = engine.start(model, num_steps=num_steps), engine.start(model, num_steps=num_steps)
    figures = steps(measured, range(num_steps))
    assert [step.noise_scale_tokens for step in figures[: 4 * EVERY_STEPS]] == [None] * 4 * EVERY_STEPS
    assert figures[-1].noise_scale_tokens is not None and figures[-1].noise_scale_tokens > 0

    half = engine.start(model, num_steps=num_steps)
    steps(half, range(10))
    resumed = engine.start(model, store=half.store, num_steps=num_steps)
    resumed.trainer.restore(half.trainer.state())
    assert steps(resumed, range(10, num_steps))[-1].noise_scale_tokens == figures[-1].noise_scale_tokens

    monkeypatch.setattr(trainer, "EVERY_STEPS", 10**9)
    single.trainer.step = 1
    # Row by row and one micro-batch a step have no scale.
    assert single.trainer.train_step([engine.pack(engine.documents(14, 25))]).noise_scale_tokens is None
    unmeasured = engine.start(model, num_steps=num_steps)
    assert [step.loss for step in steps(unmeasured, range(num_steps))] == [step.loss for step in figures]
    for plane in ("hi", "lo", "exp_avg", "exp_avg_sq"):
        assert torch.equal(unmeasured.store.plane(plane), measured.store.plane(plane)), plane

"""Steps that are called in parts: the bits of a whole step, and the sum of several calls against plain autograd."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.plans import settings
from torch import Tensor

from horizon_server.engine.called_trainer import CalledTrainer
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.micro_batch import IGNORED_LABEL, MicroBatch
from horizon_server.engine.objectives import SESSION_LOSSES, Documents, StepObjective
from horizon_server.engine.trainer import Trainer
from horizon_server.errors import InvalidData
from horizon_server.store.host_store import HostStore, merge_master

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine, TinyModel

LENGTHS = (7, 5, 11, 4)
ADAM: dict[str, Any] = {"learning_rate": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


class Life:
    """A trainer with its store."""

    def __init__(self, kind: type[Trainer], model: TinyModel, **options: Any) -> None:
        self.store: HostStore = model.store()
        self.device = HostDevice(num_threads=1)
        recipe, execution = settings(optimizer_threads=1, adds_up=kind is CalledTrainer, **options)
        self.trainer = kind(model.template, self.store, self.device, recipe, execution, num_steps=4)

    def weights(self) -> list[Tensor]:
        self.trainer.flush()
        found = []
        for unit in self.store.layout.units:
            out = torch.empty(unit.num_elements)
            merge_master(self.store.unit(unit.index, "hi"), self.store.unit(unit.index, "lo"), out)
            found += [out, self.store.unit(unit.index, "exp_avg").clone()]
        return found


@pytest.fixture
def begin() -> Iterator[Any]:
    with ExitStack() as stack:

        def make(kind: type[Trainer], model: TinyModel, **options: Any) -> Life:
            made = Life(kind, model, **options)
            stack.callback(made.device.close)
            stack.callback(made.trainer.close)
            return made

        yield make


def rows_of(step: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(step)
    rows = []
    for length in LENGTHS:
        ids = torch.randint(3, 90, (length,), generator=generator)
        labels = torch.cat([ids[1:], torch.tensor([IGNORED_LABEL])])
        labels[:2] = IGNORED_LABEL
        rows.append(
            MicroBatch(
                input_ids_T=ids, position_ids_T=torch.arange(length), labels_T=labels, document_lengths=(length,)
            )
        )
    return rows


def objective_of(rows: list[MicroBatch], loss: str = "cross_entropy") -> StepObjective:
    num_targets = sum(row.num_targets for row in rows)
    generator = torch.Generator().manual_seed(num_targets)
    given = torch.randn(3, num_targets, generator=generator)
    known = {} if loss == "cross_entropy" else {"recorded_S": given[0] - 4.5, "advantages_S": given[1]}
    return StepObjective(
        objective=SESSION_LOSSES[loss](),
        documents=Documents.of(rows, **known),
        weights_S=given[2] if loss == "cross_entropy" else None,
    )


def schedule(**options: Any) -> dict[str, Any]:
    """The recipe of a whole step that is as the calls say."""
    return {**ADAM, "lr_schedule": "constant", "warmup_steps": 0, **options}


@pytest.mark.parametrize("loss", sorted(SESSION_LOSSES))
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_a_step_in_two_calls_has_the_bits_of_a_whole_one(
    architecture: str, loss: str, engine: Engine, begin: Any
) -> None:
    model = engine.tiny_model(architecture)
    whole = begin(Trainer, model, **schedule(max_grad_norm=0.5))
    called = begin(CalledTrainer, engine.tiny_model(architecture))
    for step in range(3):
        rows = rows_of(step)
        figures = whole.trainer.train_step(rows, objective_of(rows, loss))
        computed = called.trainer.accumulate(rows, objective_of(rows, loss), key=step)
        applied = called.trainer.apply(**ADAM, max_grad_norm=0.5)
        assert (computed.loss, applied.grad_norm) == (figures.loss, figures.grad_norm)
    assert all(torch.equal(one, other) for one, other in zip(whole.weights(), called.weights(), strict=True))


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gemma2"])
def test_gradients_of_several_calls_are_those_of_plain_autograd(architecture: str, engine: Engine, begin: Any) -> None:
    model = engine.tiny_model(architecture)
    called = begin(CalledTrainer, model)
    reference = model.reference()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01, weight_decay=0.0)
    plain = {**ADAM, "weight_decay": 0.0}
    for step in range(3):
        losses: list[tuple[float, float]] = []
        for rows in (rows_of(10 * step), rows_of(10 * step + 1), rows_of(10 * step + 2)):
            objective = objective_of(rows)
            assert objective.weights_S is not None
            total = torch.zeros(())
            for row, weights in zip(
                rows, torch.split(objective.weights_S, [row.num_targets for row in rows]), strict=True
            ):
                logits_TV = reference(input_ids=row.input_ids_T[None], use_cache=False).logits[0]
                kept = row.labels_T != IGNORED_LABEL
                logprobs_TV = torch.log_softmax(logits_TV.float(), -1)[kept]
                total = total - (logprobs_TV.gather(1, row.labels_T[kept][:, None])[:, 0] * weights).sum()
            torch.autograd.backward(total)
            found = called.trainer.accumulate(rows, objective, key=len(losses))
            losses.append((found.loss, float(total.detach())))
            if len(losses) == 1:
                # In between nothing is changed.
                assert called.trainer.forward(rows, objective).loss == pytest.approx(found.loss, rel=1e-6)
        norm = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters() if p.grad is not None])
        applied = called.trainer.apply(**plain, max_grad_norm=None)
        assert [one for one, _ in losses] == pytest.approx([other for _, other in losses], rel=1e-5)
        assert applied.grad_norm == pytest.approx(float(norm), rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()


def test_the_same_calls_give_the_same_bits(engine: Engine, begin: Any) -> None:
    found = []
    for _ in range(2):
        called = begin(CalledTrainer, engine.tiny_model("qwen3"))
        for key in range(3):
            called.trainer.accumulate(rows_of(key), objective_of(rows_of(key)), key=key)
        called.trainer.apply(**ADAM, max_grad_norm=1.0)
        found.append(called.weights())
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_step_without_gradients_or_with_wild_ones_changes_nothing(engine: Engine, begin: Any) -> None:
    called = begin(CalledTrainer, engine.tiny_model("llama"))
    before = called.weights()
    with pytest.raises(InvalidData, match="has no gradients"):
        called.trainer.apply(**ADAM, max_grad_norm=None)
    rows = rows_of(0)
    wild = StepObjective(
        objective=SESSION_LOSSES["importance_sampling"](),
        documents=Documents.of(
            rows,
            recorded_S=torch.full((sum(row.num_targets for row in rows),), -1e4),
            advantages_S=torch.ones(sum(row.num_targets for row in rows)),
        ),
    )
    called.trainer.accumulate(rows, wild, key=0)
    assert called.trainer.apply(**ADAM, max_grad_norm=None).skipped == "non_finite_gradient"
    assert all(torch.equal(one, other) for one, other in zip(before, called.weights(), strict=True))
    called.trainer.accumulate(rows, objective_of(rows), key=1)
    assert not called.trainer.apply(**ADAM, max_grad_norm=None).skipped


LOW, HIGH = 0.8, 1.2
FORMULAS: dict[str, Any] = {
    "importance_sampling": lambda logprobs, ratios, advantages, recorded: -(ratios * advantages).sum(),
    "ppo": lambda logprobs, ratios, advantages, recorded: (
        -torch.minimum(ratios * advantages, ratios.clamp(LOW, HIGH) * advantages).sum()
    ),
    "cispo": lambda logprobs, ratios, advantages, recorded: (
        -(ratios.clamp(LOW, HIGH).detach() * advantages * logprobs).sum()
    ),
    "dro": lambda logprobs, ratios, advantages, recorded: (
        -(advantages * logprobs - 0.025 * (logprobs - recorded) ** 2).sum()
    ),
}


@pytest.mark.parametrize("loss", sorted(FORMULAS))
def test_losses_of_samples_are_their_formulas(loss: str) -> None:
    generator = torch.Generator().manual_seed(5)
    logprobs, advantages = torch.randn(2, 30, generator=generator, dtype=torch.float64)
    recorded = logprobs + 0.4 * torch.randn(30, generator=generator, dtype=torch.float64)
    leaf = logprobs.clone().requires_grad_()
    wanted = FORMULAS[loss](leaf, torch.exp(leaf - recorded), advantages, recorded)
    torch.autograd.backward(wanted)

    documents = Documents(num_targets_K=torch.tensor([30]), recorded_S=recorded, advantages_S=advantages)
    found, gradient = SESSION_LOSSES[loss]()(logprobs, None, None, documents)

    assert float(found) == pytest.approx(float(wanted.detach()), rel=1e-12)
    assert leaf.grad is not None and torch.allclose(gradient, leaf.grad, rtol=1e-12, atol=0)

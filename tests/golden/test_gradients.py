"""Streamed loss and gradients against plain autograd, architecture by architecture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.double import check_gradients, check_numbers, gradients_of, plain_and_exact
from tests.support.tiny_models import ARCHITECTURES, MIXES_DOCUMENTS
from torch import Tensor

from horizon_server.engine.forward_backward import ForwardBackward
from horizon_server.engine.lanes import StepRows
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.step_pass import StepKey

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine, Run, TinyModel

    from horizon_server.figures import StepFigures

Pack = Callable[[list[Tensor]], MicroBatch]


@dataclass
class Outcome:
    """Loss and gradients of plain autograd."""

    loss: float
    gradients: dict[str, Tensor]


def of_autograd(model: TinyModel, plain_loss: Callable[..., Tensor], rows: list[MicroBatch]) -> tuple[Outcome, Outcome]:
    """Plain autograd of the rows, one after the other, in fp32 and in float64."""
    num_targets = sum(row.num_targets for row in rows)

    def autograd(reference: torch.nn.Module) -> Outcome:
        loss = 0.0
        for row in rows:
            part = plain_loss(reference, row) / num_targets
            torch.autograd.backward(part)
            loss += part.item()
        return Outcome(loss, gradients_of(reference))

    return plain_and_exact(model.reference, autograd)


def check(report: StepFigures, run: Run, wanted: tuple[Outcome, Outcome]) -> None:
    """Check loss and gradients of a step."""
    plain, exact = wanted
    check_numbers(report.loss, plain.loss, exact.loss)
    check_gradients({name: run.gradient(name) for name in exact.gradients}, plain.gradients, exact.gradients)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_documents_give_the_gradients_of_plain_autograd(
    architecture: str,
    engine: Engine,
) -> None:
    model = engine.tiny_model(architecture)
    both = engine.documents(14, 22)
    row = engine.pack(both)
    run = engine.start(model, head_chunk_tokens=16)

    report = run.trainer.train_step([row])

    assert run.trainer.supports_packing
    check(report, run, of_autograd(model, engine.plain_loss, [engine.pack([document]) for document in both]))


@pytest.mark.parametrize("architecture", MIXES_DOCUMENTS)
def test_a_model_that_mixes_packed_documents_is_found_out_and_fed_single_ones(
    architecture: str,
    engine: Engine,
) -> None:
    model = engine.tiny_model(architecture)
    both = engine.documents(14, 22)
    run = engine.start(model)

    row = engine.pack(both)

    report = run.trainer.train_step([row])

    assert not run.trainer.supports_packing
    check(report, run, of_autograd(model, engine.plain_loss, [engine.pack([document]) for document in both]))


@pytest.mark.parametrize("num_rows", [2, 5])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_the_split_into_micro_batches_does_not_matter(
    architecture: str,
    num_rows: int,
    engine: Engine,
) -> None:
    model = engine.tiny_model(architecture)
    five = engine.documents(9, 12, 5, 17, 8)
    split = {2: [five[:2], five[2:]], 5: [[document] for document in five]}[num_rows]
    whole, parts = engine.start(model), engine.start(model)

    in_one = whole.trainer.train_step([engine.pack(five)])
    in_parts = parts.trainer.train_step([engine.pack(row) for row in split])

    assert in_parts.h2d.bytes == in_one.h2d.bytes
    wanted = of_autograd(model, engine.plain_loss, [engine.pack([document]) for document in five])
    for report, run in ((in_one, whole), (in_parts, parts)):
        check(report, run, wanted)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, ...]]]:
    """The documents of every micro-batch, step by step."""
    steps: list[list[tuple[int, ...]]] = []
    gradients = ForwardBackward.gradients

    def noted(self: ForwardBackward, rows: StepRows, key: StepKey, *args: Any, **how: Any) -> float:
        steps.append([micro_batch.document_lengths for micro_batch in rows.micro_batches])
        return gradients(self, rows, key, *args, **how)

    monkeypatch.setattr(ForwardBackward, "gradients", noted)
    return steps


@pytest.mark.parametrize(("architecture", "is_joined"), [("qwen3", True), ("gemma2", True), ("bloom", False)])
def test_rows_are_joined_where_that_changes_nothing(
    architecture: str,
    is_joined: bool,
    engine: Engine,
    computed: list[list[tuple[int, ...]]],
) -> None:
    model = engine.tiny_model(architecture)
    rows = [engine.pack([document]) for document in engine.documents(9, 12, 25, 17, 8)]
    apart, joined = (engine.start(model, learning_rate=0.0, micro_batch_tokens=tokens) for tokens in (0, 26))

    one, other = apart.trainer.train_step(rows), joined.trainer.train_step(rows)

    tokens = [[sum(lengths) for lengths in step] for step in computed]
    assert tokens == [[9, 12, 25, 17, 8], [21, 25, 25] if is_joined else [9, 12, 25, 17, 8]]
    assert (other.num_tokens, other.model_flops) == (one.num_tokens, one.model_flops)
    plain, exact = wanted = of_autograd(model, engine.plain_loss, rows)
    for report, run in ((one, apart), (other, joined)):
        check(report, run, wanted)
        check_numbers(run.trainer.evaluate(rows).eval_loss, plain.loss, exact.loss)


def test_long_rows_of_short_documents_are_divided_between_documents(
    engine: Engine,
    computed: list[list[tuple[int, ...]]],
) -> None:
    model = engine.tiny_model("qwen3")
    rows = [engine.pack(engine.documents(9, 12, 8, 17)), engine.pack(engine.documents(4, 30, seed=1))]
    whole, divided = (engine.start(model, learning_rate=0.0, micro_batch_tokens=tokens) for tokens in (0, 26))
    one = whole.trainer.train_step(rows)
    other = divided.trainer.train_step(rows)

    # Across the rows, and the document that is longer than a micro-batch alone.
    assert computed == [[(9, 12, 8, 17), (4, 30)], [(9, 12), (8, 17), (4,), (30,)]]
    apart = [
        engine.pack([document])
        for seed, lengths in enumerate(([9, 12, 8, 17], [4, 30]))
        for document in engine.documents(*lengths, seed=seed)
    ]
    wanted = of_autograd(model, engine.plain_loss, apart)
    for report, run in ((one, whole), (other, divided)):
        check(report, run, wanted)


def test_untrained_positions_have_no_part_in_the_loss(
    engine: Engine,
) -> None:
    model = engine.tiny_model("llama")
    row = engine.pack(engine.documents(30))
    row.labels_T[:20] = -100
    run = engine.start(model, head_chunk_tokens=4)

    report = run.trainer.train_step([row])

    assert row.num_targets == 9
    check(report, run, of_autograd(model, engine.plain_loss, [row]))


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_the_embedding_of_the_padding_token_gets_the_gradient_of_plain_autograd(
    architecture: str,
    engine: Engine,
) -> None:
    model = engine.tiny_model(architecture)
    rows = [engine.pack([torch.tensor([3, 7, 7, 9, 7, 11])]), engine.pack([torch.tensor([5, 9, 3])])]
    run = engine.start(model)

    report = run.trainer.train_step(rows)

    check(report, run, of_autograd(model, engine.plain_loss, rows))
    # Where the table is not the projection too, nothing else can give the row a gradient.
    row_of_padding = run.gradient("model.embed_tokens.weight")[model.config.pad_token_id]
    assert bool(row_of_padding.any()) == model.template.tied

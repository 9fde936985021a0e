"""Streamed loss and gradients against plain autograd, architecture by architecture."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from tests.support.tiny_models import ARCHITECTURES, MIXES_DOCUMENTS
from torch import Tensor

from horizon_server.engine.forward_backward import ForwardBackward, StepKey
from horizon_server.engine.micro_batch import MicroBatch

if TYPE_CHECKING:
    from tests.support.tiny_models import Run, TinyModel

Pack = Callable[[list[Tensor]], MicroBatch]


def worst_error(run: Run, reference: torch.nn.Module) -> tuple[float, str]:
    """The largest relative error of any parameter's gradient, and whose it is; a gradient that is nothing but rounding counts as 0."""
    errors = []
    for name, parameter in reference.named_parameters():
        got = run.gradient(name)
        wanted = torch.zeros_like(got) if parameter.grad is None else parameter.grad
        norm = float(wanted.norm())
        error = float((got - wanted).norm())
        errors.append((error / norm if norm > 1e-7 else error, name))
    return max(errors)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_documents_give_the_gradients_of_plain_autograd(
    architecture: str,
    tiny_model: Callable[..., TinyModel],
    start: Callable[..., Run],
    documents: Callable[..., list[Tensor]],
    pack: Pack,
    plain_loss: Callable[..., Tensor],
) -> None:
    model = tiny_model(architecture)
    both = documents(14, 22)
    row = pack(both)
    run = start(model, head_chunk_tokens=16)

    report = run.trainer.train_step([row])

    assert run.trainer.supports_packing
    apart = model.reference()
    for document in both:
        torch.autograd.backward(plain_loss(apart, pack([document])) / row.num_targets)
    loss = sum(plain_loss(apart, pack([document])).item() for document in both) / row.num_targets
    assert report.loss == pytest.approx(loss, rel=1e-6)
    error, name = worst_error(run, apart)
    assert error <= 2e-6, f"gradient of {name} is off by {error:.1e} from that of separate documents"


@pytest.mark.parametrize("architecture", MIXES_DOCUMENTS)
def test_a_model_that_mixes_packed_documents_is_found_out_and_fed_single_ones(
    architecture: str,
    tiny_model: Callable[..., TinyModel],
    start: Callable[..., Run],
    documents: Callable[..., list[Tensor]],
    pack: Pack,
    plain_loss: Callable[..., Tensor],
) -> None:
    model = tiny_model(architecture)
    both = documents(14, 22)
    run = start(model)

    row = pack(both)

    report = run.trainer.train_step([row])

    assert not run.trainer.supports_packing
    reference = model.reference()
    losses = [plain_loss(reference, pack([document])) / row.num_targets for document in both]
    torch.autograd.backward(losses)
    assert report.loss == pytest.approx(sum(loss.item() for loss in losses), rel=1e-6)
    error, name = worst_error(run, reference)
    assert error <= 1e-6, f"gradient of {name} is off by {error:.1e}"


@pytest.mark.parametrize("num_rows", [2, 5])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_the_split_into_micro_batches_does_not_matter(
    architecture: str,
    num_rows: int,
    tiny_model: Callable[..., TinyModel],
    start: Callable[..., Run],
    documents: Callable[..., list[Tensor]],
    pack: Pack,
) -> None:
    model = tiny_model(architecture)
    five = documents(9, 12, 5, 17, 8)
    split = {2: [five[:2], five[2:]], 5: [[document] for document in five]}[num_rows]
    whole, parts = start(model), start(model)

    in_one = whole.trainer.train_step([pack(five)])
    in_parts = parts.trainer.train_step([pack(row) for row in split])

    assert in_parts.loss == pytest.approx(in_one.loss, rel=1e-6)
    assert in_parts.grad_norm == pytest.approx(in_one.grad_norm, rel=1e-6)
    assert in_parts.h2d.bytes == in_one.h2d.bytes
    one, other = whole.gradients(), parts.gradients()
    assert float((one - other).norm() / one.norm()) <= 1e-6


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, ...]]]:
    """The documents of every micro-batch, step by step."""
    steps: list[list[tuple[int, ...]]] = []
    gradients = ForwardBackward.gradients

    def noted(self: ForwardBackward, micro_batches: list[MicroBatch], key: StepKey, **how: bool) -> float:
        steps.append([micro_batch.document_lengths for micro_batch in micro_batches])
        return gradients(self, micro_batches, key, **how)

    monkeypatch.setattr(ForwardBackward, "gradients", noted)
    return steps


@pytest.mark.parametrize(("architecture", "is_joined"), [("qwen3", True), ("gemma2", True), ("bloom", False)])
def test_rows_are_joined_where_that_changes_nothing(
    architecture: str,
    is_joined: bool,
    tiny_model: Callable[..., TinyModel],
    start: Callable[..., Run],
    documents: Callable[..., list[Tensor]],
    pack: Pack,
    computed: list[list[tuple[int, ...]]],
) -> None:
    model = tiny_model(architecture)
    rows = [pack([document]) for document in documents(9, 12, 25, 17, 8)]
    apart, joined = (start(model, learning_rate=0.0, micro_batch_tokens=tokens) for tokens in (0, 26))

    one, other = apart.trainer.train_step(rows), joined.trainer.train_step(rows)

    tokens = [[sum(lengths) for lengths in step] for step in computed]
    assert tokens == [[9, 12, 25, 17, 8], [21, 25, 25] if is_joined else [9, 12, 25, 17, 8]]
    assert other.loss == pytest.approx(one.loss, rel=1e-6)
    assert (other.num_tokens, other.model_flops) == (one.num_tokens, one.model_flops)
    first, second = apart.store.plane("grad"), joined.store.plane("grad")
    assert float((first - second).norm() / first.norm()) <= 2e-6
    ours, theirs = joined.trainer.evaluate(rows), apart.trainer.evaluate(rows)
    assert ours.eval_loss == pytest.approx(theirs.eval_loss, rel=1e-6)


def test_long_rows_of_short_documents_are_divided_between_documents(
    tiny_model: Callable[..., TinyModel],
    start: Callable[..., Run],
    documents: Callable[..., list[Tensor]],
    pack: Pack,
    computed: list[list[tuple[int, ...]]],
) -> None:
    model = tiny_model("qwen3")
    rows = [pack(documents(9, 12, 8, 17)), pack(documents(4, 30, seed=1))]
    whole, divided = (start(model, learning_rate=0.0, micro_batch_tokens=tokens) for tokens in (0, 26))
    one = whole.trainer.train_step(rows)
    other = divided.trainer.train_step(rows)

    # Across the rows, and the document that is longer than a micro-batch alone.
    assert computed == [[(9, 12, 8, 17), (4, 30)], [(9, 12), (8, 17), (4,), (30,)]]
    assert other.loss == pytest.approx(one.loss, rel=1e-6)
    first, second = whole.store.plane("grad"), divided.store.plane("grad")
    assert float((first - second).norm() / first.norm()) <= 2e-6


def test_untrained_positions_have_no_part_in_the_loss(
    tiny_model: Callable[..., TinyModel],
    start: Callable[..., Run],
    documents: Callable[..., list[Tensor]],
    pack: Pack,
    plain_loss: Callable[..., Tensor],
) -> None:
    model = tiny_model("llama")
    row = pack(documents(30))
    row.labels_T[:20] = -100
    run = start(model, head_chunk_tokens=4)

    report = run.trainer.train_step([row])

    reference = model.reference()
    loss = plain_loss(reference, row) / 9
    torch.autograd.backward(loss)
    assert row.num_targets == 9
    assert report.loss == pytest.approx(loss.item(), rel=1e-6)
    error, name = worst_error(run, reference)
    assert error <= 1e-6, f"gradient of {name} is off by {error:.1e}"


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_the_embedding_of_the_padding_token_gets_the_gradient_of_plain_autograd(
    architecture: str,
    tiny_model: Callable[..., TinyModel],
    start: Callable[..., Run],
    pack: Pack,
    plain_loss: Callable[..., Tensor],
) -> None:
    model = tiny_model(architecture)
    rows = [pack([torch.tensor([3, 7, 7, 9, 7, 11])]), pack([torch.tensor([5, 9, 3])])]
    run = start(model)

    run.trainer.train_step(rows)

    reference = model.reference()
    num_targets = sum(row.num_targets for row in rows)
    torch.autograd.backward([plain_loss(reference, row) / num_targets for row in rows])
    error, name = worst_error(run, reference)
    assert error <= 1e-6, f"gradient of {name} is off by {error:.1e}"
    # Where the table is not the projection too, nothing else can give the row a gradient.
    row_of_padding = run.gradient("model.embed_tokens.weight")[model.config.pad_token_id]
    assert bool(row_of_padding.any()) == model.template.tied

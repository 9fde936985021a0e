"""Chats whose messages have weights, from their file to the trained weights, against a plain PyTorch loop with the same
weighted mean.

Shapes: T = tokens of a document, S = supervised tokens.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.double import check_gradients, check_numbers, check_weights, gradients_of, plain_and_exact, values_of
from tests.support.worker_attempts import spec_of
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer

from horizon_server.datasets.preparing import prepare
from horizon_server.datasets.reading import StoredFile
from horizon_server.datasets.recipe import PrepareOptions, PrepareRequest
from horizon_server.demo.recipe import write_demo_model
from horizon_server.engine.data import StepPlan
from horizon_server.store.host_store import merge_master
from horizon_server.store.prepared import TOKENS_FILE
from horizon_server.worker.objective import MethodData

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine, TinyModel

Rows = Sequence[dict[str, Any]]
LENGTH = 64
NUM_STEPS = 5
# Of the replies of each chat, in order; None leaves the field out.
WEIGHTS: Sequence[tuple[float | None, ...]] = [
    (0.25,),
    (None,),
    (3, 0),
    (0, 0.5),
    (1, 2.5),
    (100,),
    (None, None),
    (0.001, 1),
    (0.7, 0.7),
    (1,),
    (0, 3),
    (0.1,),
]


def chat(number: int, weights: Sequence[float | None]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for turn, weight in enumerate(weights):
        reply = {"role": "assistant", "content": f"Because of {number}" + " and more" * (turn + number % 4) + "."}
        messages += [
            {"role": "user", "content": f"Why {number}?"},
            reply if weight is None else reply | {"weight": weight},
        ]
    return {"messages": messages}


CHATS = [chat(number, weights) for number, weights in enumerate(WEIGHTS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("model") / "demo")


@pytest.fixture
def prepared(folder: Path, tmp_path: Path) -> Callable[..., MethodData]:
    """Rows of a file as a job reads them."""
    numbers = itertools.count()

    def make(rows: Rows) -> MethodData:
        file = tmp_path / f"rows-{next(numbers)}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        request = PrepareRequest(
            dataset_files=(StoredFile.at(file),),
            model_dir=folder,
            output_dir=file.with_suffix(""),
            options=PrepareOptions(sequence_length=LENGTH),
        )
        prepare(request, on_progress=lambda done: None)
        return MethodData(request.output_dir, spec_of())

    return make


@pytest.fixture
def model(folder: Path, engine: Engine) -> TinyModel:
    return engine.tiny_model("qwen3", vocab_size=json.loads((folder / "config.json").read_text())["vocab_size"])


def plain_documents(folder: Path) -> list[tuple[Tensor, Tensor]]:
    """Each chat's tokens and what each token weighs, by transformers' own template and mask."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    found = []
    for row, given in zip(CHATS, WEIGHTS, strict=True):
        plain = [{key: value for key, value in message.items() if key != "weight"} for message in row["messages"]]
        encoded = tokenizer.apply_chat_template(plain, return_dict=True, return_assistant_tokens_mask=True)
        replies = iter(given)
        weights: list[float] = []
        for is_reply, run in itertools.groupby(encoded["assistant_masks"]):
            own = next(replies) if is_reply else 0.0
            weights += [1.0 if own is None else own for _ in run]
        assert next(replies, "none") == "none", "every reply has a weight"
        found.append((torch.tensor(encoded["input_ids"]), torch.tensor(weights, dtype=torch.float64)))
    return found


def weighted_mean(model: torch.nn.Module, documents: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The weighted mean over the tokens of all these documents, each computed by itself."""
    total, divisor = torch.zeros((), dtype=torch.float64), 0.0
    for ids_T, weights_T in documents:
        logits_TV = model(input_ids=ids_T[None], use_cache=False).logits[0, :-1]
        losses_T = functional.cross_entropy(logits_TV.float(), ids_T[1:], reduction="none")
        total = total + (losses_T.double() * weights_T[1:]).sum()
        divisor += float(weights_T[1:].sum())
    return total / divisor


@pytest.mark.parametrize("packed", [True, False])
def test_steps_follow_a_plain_loop_with_the_same_weighted_mean(
    packed: bool, folder: Path, model: TinyModel, prepared: Callable[..., MethodData], engine: Engine
) -> None:
    data, documents = prepared(CHATS), plain_documents(folder)
    plan = StepPlan(
        data.dataset, sequence_length=LENGTH, tokens_per_step=3 * LENGTH, packing=packed, seed=5, max_steps=NUM_STEPS
    )
    run = engine.start(model, lr_schedule="constant", max_grad_norm=1e9, head_chunk_tokens=16)
    names = [name for name, _ in model.reference().named_parameters()]
    num_rows, losses = set(), []
    gradients: dict[str, Tensor] = {}
    for step in range(NUM_STEPS):
        rows, objective = data.step(plan, step)
        num_rows.add(len(rows))
        losses.append(run.trainer.train_step(rows, objective).loss)
        gradients = gradients or {name: run.gradient(name).clone() for name in names}
    run.trainer.flush()

    def trained(plain: torch.nn.Module) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
        losses: list[float] = []
        gradients: dict[str, Tensor] = {}
        for step in range(NUM_STEPS):
            loss = weighted_mean(plain, [documents[number] for row in plan.documents_of(step) for number in row])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            gradients = gradients or gradients_of(plain)
            optimizer.step()
            losses.append(loss.item())
        return losses, gradients, values_of(plain)

    assert max(num_rows) > 1, "the test is about several micro-batches"
    assert not packed or max(len(row) for step in range(NUM_STEPS) for row in plan.documents_of(step)) > 1
    plain, exact = plain_and_exact(model.reference, trained)
    check_numbers(losses, plain[0], exact[0], "the losses")
    check_gradients(gradients, plain[1], exact[1])
    weights = {}
    for name, parameter in exact[2].items():
        hi, lo = (run.store.tensor(name, plane).reshape(-1) for plane in ("hi", "lo"))
        weights[name] = torch.empty(parameter.shape)
        merge_master(hi, lo, weights[name].view(-1))
    check_weights(weights, plain[2], exact[2])


def test_a_weight_of_0_is_a_message_that_is_masked_bit_for_bit(
    folder: Path, model: TinyModel, prepared: Callable[..., MethodData], engine: Engine
) -> None:
    muted = [chat(number, [weight and None for weight in weights]) for number, weights in enumerate(WEIGHTS)]
    tokens = [
        {
            "input_ids": ids.tolist(),
            "labels": [token if weight else -100 for token, weight in zip(ids.tolist(), weights.tolist(), strict=True)],
        }
        for ids, weights in plain_documents(folder)
    ]
    by_weight, by_labels = prepared(muted), prepared(tokens)

    assert (by_weight.folder / TOKENS_FILE).read_bytes() == (by_labels.folder / TOKENS_FILE).read_bytes()
    assert by_weight.dataset.weights_of([0]) is None
    plan = StepPlan(by_weight.dataset, sequence_length=LENGTH, tokens_per_step=3 * LENGTH, max_steps=1)
    one, other = (engine.start(model) for _ in range(2))
    figures = [run.trainer.train_step(*data.step(plan, 0)) for run, data in ((one, by_weight), (other, by_labels))]
    assert figures[0].loss == figures[1].loss
    assert torch.equal(one.gradients(), other.gradients())


def test_weights_that_are_all_1_change_no_bit(prepared: Callable[..., MethodData]) -> None:
    ones, none = (
        prepared([chat(number, [weight] * len(weights)) for number, weights in enumerate(WEIGHTS)])
        for weight in (1.0, None)
    )

    assert (ones.folder / TOKENS_FILE).read_bytes() == (none.folder / TOKENS_FILE).read_bytes()
    plan = StepPlan(ones.dataset, sequence_length=LENGTH, tokens_per_step=3 * LENGTH, max_steps=1)
    assert ones.step(plan, 0)[1] is None, "it is plain cross-entropy"
    # Of a dataset that has weights elsewhere, those of a step may be equal.
    weighted = prepared([chat(0, [1, 1]), chat(1, [0.5, 0.5]), chat(2, [0.5, 1])])
    by_row = StepPlan(weighted.dataset, sequence_length=LENGTH, tokens_per_step=1, shuffle=False, epochs=1)
    in_order = sorted(range(3), key=by_row.documents_of)
    assert [weighted.step(by_row, step)[1] is None for step in in_order] == [True, True, False]


@pytest.mark.parametrize("packed", [True, False])
def test_label_smoothing_is_weighted_too(
    packed: bool, folder: Path, model: TinyModel, prepared: Callable[..., MethodData], engine: Engine
) -> None:
    data, documents = prepared(CHATS), plain_documents(folder)
    plan = StepPlan(data.dataset, sequence_length=LENGTH, tokens_per_step=3 * LENGTH, packing=packed, max_steps=1)
    run = engine.start(model, label_smoothing=0.1, head_chunk_tokens=16)

    rows, objective = data.step(plan, 0)
    figures = run.trainer.train_step(rows, objective)

    def autograd(reference: torch.nn.Module) -> tuple[float, dict[str, Tensor]]:
        total, divisor = torch.zeros((), dtype=torch.float64), 0.0
        for number in itertools.chain.from_iterable(plan.documents_of(0)):
            ids_T, weights_T = documents[number]
            logits_TV = reference(input_ids=ids_T[None], use_cache=False).logits[0, :-1]
            losses_T = functional.cross_entropy(logits_TV, ids_T[1:], reduction="none", label_smoothing=0.1)
            total = total + (losses_T.double() * weights_T[1:]).sum()
            divisor += float(weights_T[1:].sum())
        loss = total / divisor
        torch.autograd.backward(loss)
        return loss.item(), gradients_of(reference)

    plain, exact = plain_and_exact(model.reference, autograd)
    check_numbers(figures.loss, plain[0], exact[0])
    check_gradients({name: run.gradient(name) for name in exact[1]}, plain[1], exact[1])


def test_an_evaluation_counts_every_target_alike(
    model: TinyModel, prepared: Callable[..., MethodData], engine: Engine
) -> None:
    weighted = prepared(CHATS)
    plain = prepared([chat(number, [weight and None for weight in weights]) for number, weights in enumerate(WEIGHTS)])
    trainer = engine.start(model).trainer
    plan = StepPlan(weighted.dataset, sequence_length=LENGTH, tokens_per_step=10_000, epochs=1, shuffle=False)

    one, other = (data.evaluate(trainer, plan, 0) for data in (weighted, plain))

    assert (one.eval_loss, one.num_targets, one.num_correct) == (other.eval_loss, other.num_targets, other.num_correct)
    assert weighted.step(plan, 0)[1] is not None

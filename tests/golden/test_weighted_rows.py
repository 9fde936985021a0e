"""Answers of rows that have a weight, from their file to loss and gradients: as the same chats, and as a plain PyTorch
loop."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.golden.test_weighted_messages import LENGTH, weighted_mean
from tests.support.double import check_gradients, check_numbers, gradients_of, plain_and_exact
from tests.support.worker_attempts import spec_of
from torch import Tensor
from transformers import AutoTokenizer

from horizon_server.datasets.preparing import prepare
from horizon_server.datasets.reading import StoredFile
from horizon_server.datasets.recipe import PrepareOptions, PrepareRequest
from horizon_server.demo.recipe import write_demo_model
from horizon_server.engine.data import StepPlan
from horizon_server.store.prepared import TOKENS_FILE
from horizon_server.worker.objective import MethodData

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine

WEIGHTS: Sequence[float | None] = [0.25, None, 3, 1, 100, 0.001, 0.7, 2.0]
NUM_STEPS = 5


def relative_error(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    got, wanted = (torch.cat([pair[side].reshape(-1).double() for pair in pairs]) for side in (0, 1))
    return float((got - wanted).norm() / wanted.norm())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("model") / "demo")


@pytest.fixture(scope="module")
def bare(folder: Path) -> Path:
    """The same model without a chat template."""
    model = write_demo_model(folder.with_name("bare"))
    (model / "chat_template.jinja").unlink()
    return model


def data_of(file: Path, model: Path, rows: Sequence[dict[str, Any]], **options: Any) -> MethodData:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    request = PrepareRequest(
        dataset_files=(StoredFile.at(file),),
        model_dir=model,
        output_dir=file.with_suffix(""),
        options=PrepareOptions(sequence_length=LENGTH, **options),
    )
    prepare(request, on_progress=lambda done: None)
    return MethodData(request.output_dir, spec_of())


def texts_of(number: int) -> tuple[str, str]:
    return f"Why {number}? ", f"Because of {number}" + " and more" * (number % 4) + "."


def weighted(row: dict[str, Any], weight: float | None) -> dict[str, Any]:
    return row if weight is None else row | {"weight": weight}


def pair(number: int, weight: float | None) -> dict[str, Any]:
    prompt, completion = texts_of(number)
    return weighted({"prompt": prompt, "completion": completion}, weight)


def instruction(number: int, weight: float | None) -> dict[str, Any]:
    prompt, completion = texts_of(number)
    return weighted({"instruction": prompt, "output": completion, "history": [["Hm?", "Hm."]]}, weight)


def chat(number: int, weight: float | None, *, history: bool) -> dict[str, Any]:
    prompt, completion = texts_of(number)
    before = [{"role": "user", "content": "Hm?"}, {"role": "assistant", "content": "Hm."}] if history else []
    reply = weighted({"role": "assistant", "content": completion}, weight)
    return {"messages": [*before, {"role": "user", "content": prompt}, reply]}


@pytest.mark.parametrize("options", [{}, {"train_on": "all"}, {"train_on": "last-assistant"}, {"method": "pretrain"}])
@pytest.mark.parametrize("form", [pair, instruction])
def test_a_weighted_row_is_the_same_chat_with_a_weighted_message(
    form: Callable[..., dict[str, Any]], options: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    history = form is instruction
    # A turn that counts 0 is left out, where there is another to learn from.
    weights = [*WEIGHTS, 0] if history and options.get("train_on") != "last-assistant" else WEIGHTS
    rows = data_of(tmp_path / "rows.jsonl", folder, [form(n, w) for n, w in enumerate(weights)], **options)
    chats = [chat(number, weight, history=history) for number, weight in enumerate(weights)]
    as_chats = data_of(tmp_path / "chats.jsonl", folder, chats, **options)
    assert rows.dataset.is_weighted
    assert (rows.folder / TOKENS_FILE).read_bytes() == (as_chats.folder / TOKENS_FILE).read_bytes()


def test_without_a_template_the_completion_and_its_end_count_so(bare: Path, tmp_path: Path, engine: Engine) -> None:
    data = data_of(tmp_path / "rows.jsonl", bare, [pair(number, weight) for number, weight in enumerate(WEIGHTS)])
    tokenizer: Any = AutoTokenizer.from_pretrained(bare)
    documents: list[tuple[Tensor, Tensor]] = []
    for number, weight in enumerate(WEIGHTS):
        prompt, completion = (tokenizer(text)["input_ids"] for text in texts_of(number))
        own = [1.0 if weight is None else float(weight)] * (len(completion) + 1)
        ids = [*prompt, *completion, tokenizer.eos_token_id]
        documents.append((torch.tensor(ids), torch.tensor([0.0] * len(prompt) + own, dtype=torch.float64)))
    for number, (ids_T, _) in enumerate(documents):
        assert data.dataset.micro_batch([number]).input_ids_T.tolist() == ids_T.tolist()

    model = engine.tiny_model("qwen3", vocab_size=json.loads((bare / "config.json").read_text())["vocab_size"])
    plan = StepPlan(data.dataset, sequence_length=LENGTH, tokens_per_step=2 * LENGTH, seed=5, max_steps=NUM_STEPS)
    run = engine.start(model, lr_schedule="constant", max_grad_norm=1e9, head_chunk_tokens=16)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for step in range(NUM_STEPS):
        losses.append(run.trainer.train_step(*data.step(plan, step)).loss)
        gradients = gradients or {name: run.gradient(name).clone() for name, _ in model.reference().named_parameters()}

    def trained(plain: torch.nn.Module) -> tuple[list[float], dict[str, Tensor]]:
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
        return losses, gradients

    (plain_losses, plain_gradients), (exact_losses, exact_gradients) = plain_and_exact(model.reference, trained)
    check_numbers(losses, plain_losses, exact_losses)
    check_gradients(gradients, plain_gradients, exact_gradients)


def test_rows_without_a_weight_have_the_bytes_of_rows_of_weight_1(folder: Path, bare: Path, tmp_path: Path) -> None:
    for name, model in (("chats", folder), ("texts", bare)):
        files = [
            data_of(tmp_path / f"{name}-{weight}.jsonl", model, [pair(n, weight) for n in range(4)], eval_fraction=0.5)
            for weight in (None, 1, 1.0)
        ]
        assert len({(data.folder / TOKENS_FILE).read_bytes() for data in files}) == 1, "the same rows are held out, too"


@pytest.mark.parametrize("row", [pair(1, 0.25), {"instruction": "1?", "output": "One.", "weight": 0.25}])
def test_a_preview_shows_the_weight(row: dict[str, Any], folder: Path, bare: Path) -> None:
    from horizon_formats.files import Row
    from horizon_formats.formats import detect_format
    from horizon_server.datasets.tokens.codec import TextCodec
    from horizon_server.datasets.tokens.tokenization import RowTokenizer

    found = detect_format(row.keys(), {}, "row")
    read = Row(file="a.jsonl", unit="line", number=1, columns=row, num_bytes=1)
    for model in (folder, bare) if "prompt" in row else (folder,):
        [shown] = RowTokenizer(TextCodec.from_folder(model), PrepareOptions(format=found), found).show(read)
        [span] = [span for span in shown.spans if span.trained]
        assert span.weight == 0.25 and span.text.startswith(("Because", "One."))

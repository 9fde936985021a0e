"""Preferences and labelled answers, prepared: the tokens and masks that TRL's trainers and collators make of the same
rows."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl.trainer.dpo_trainer import DataCollatorForPreference, DPOTrainer
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference, KTOTrainer

from horizon_server.datasets.preparing import prepare
from horizon_server.datasets.reading import StoredFile
from horizon_server.datasets.recipe import PrepareOptions, PrepareReport, PrepareRequest
from horizon_server.demo.recipe import write_demo_model
from horizon_server.engine.data import PreparedDataset
from horizon_server.engine.micro_batch import IGNORED_LABEL

SHARED = Path(__file__).parents[3] / "shared"
TINY_BASE, QUESTIONS = SHARED / "models" / "tiny-base", SHARED / "data" / "gsm8k_train.jsonl"
PAD = 0

# The ids of a document, and which of them are targets.
Documents = list[tuple[list[int], list[bool]]]


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def questions(count: int) -> list[tuple[str, str]]:
    """Questions and answers: of gsm8k where it is there, else made up."""
    if not QUESTIONS.is_file():
        return [
            (f"What is {n} + {n}?\n{'Think. ' * n}", f"{n} + {n} = {n + n}\n{'Sure. ' * n}\n#### {n + n}")
            for n in range(count)
        ]
    with QUESTIONS.open(encoding="utf-8") as lines:
        rows = list(map(json.loads, itertools.islice(lines, count)))
    return [(row["question"], row["answer"]) for row in rows]


def compared_chats() -> list[dict[str, Any]]:
    """Prompts of one message and of several, answers of one turn and of several, and lengths that are cut and left
    out."""
    found = questions(24)
    rows: list[dict[str, Any]] = []
    for (asked, answer), (_, other) in itertools.pairwise(found):
        prompt = [turn("system", "Be exact."), turn("user", asked)] if len(rows) % 2 else [turn("user", asked)]
        if len(rows) % 5 == 0:
            prompt = [turn("user", "Hi"), turn("assistant", "\n\nHello!"), *prompt[-1:]]
        replies = [[turn("assistant", text)] for text in (answer, other)]
        if len(rows) % 7 == 0:
            replies[0] += [turn("user", "Sure?"), turn("assistant", " Yes.")]
        rows.append({"prompt": prompt, "chosen": replies[0], "rejected": replies[1]})
    return rows


@pytest.fixture(scope="module", params=["tiny-base", "demo"])
def chat_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "demo":
        return write_demo_model(tmp_path_factory.mktemp("model") / "demo")
    if not TINY_BASE.is_dir():
        pytest.skip(f"needs the model {TINY_BASE}, which is not part of the repository")
    return TINY_BASE


@pytest.fixture(scope="module")
def bare_model(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tokenizer without a chat template."""
    folder = tmp_path_factory.mktemp("model") / "bare"
    shutil.copytree(
        chat_model, folder, ignore=shutil.ignore_patterns("chat_template.jinja"), copy_function=shutil.copyfile
    )
    return folder


def prepared(
    model: Path, folder: Path, rows: Sequence[dict[str, Any]], length: int
) -> tuple[PreparedDataset, PrepareReport]:
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    request = PrepareRequest(
        dataset_files=(StoredFile.at(folder / "rows.jsonl"),),
        model_dir=model,
        output_dir=folder / f"prepared-{length}",
        options=PrepareOptions(sequence_length=length),
    )
    report = prepare(request, on_progress=lambda done: None)
    return PreparedDataset.open(request.output_dir), report


def documents_of(dataset: PreparedDataset) -> Documents:
    documents = []
    for number in range(dataset.num_documents):
        row = dataset.micro_batch([number])
        # A label is the next token; here each token says for itself whether it is a target.
        documents.append((row.input_ids_T.tolist(), [False, *(row.labels_T != IGNORED_LABEL).tolist()[:-1]]))
    return documents


def collated(batch: dict[str, torch.Tensor], prefix: str = "") -> Documents:
    """The documents of a batch, without padding. TRL shifts labels too, so its loss takes nothing of a first token
    either."""
    names = (f"{prefix}input_ids", f"{prefix}attention_mask", f"{prefix}completion_mask")
    found = []
    for ids, present, completion in zip(*(batch[name] for name in names), strict=True):
        num_tokens = int(present.sum())
        found.append((ids[:num_tokens].tolist(), [False, *completion[1:num_tokens].bool().tolist()]))
    return found


def trl_preferences(model: Path, rows: Sequence[dict[str, Any]], length: int) -> Documents:
    """Chosen and rejected of each row that DPO's trainer keeps."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    args: Any = SimpleNamespace(dataset_num_proc=None, max_length=length, truncation_mode="keep_start")
    trainer: Any = SimpleNamespace(_tokenizer=tokenizer)
    tokenized = DPOTrainer._prepare_dataset(trainer, Dataset.from_list(list(rows)), tokenizer, args, "train")
    found = collated(DataCollatorForPreference(pad_token_id=PAD, max_length=length)(list(tokenized)))
    # A batch holds all that are chosen before all that are rejected.
    pairs = zip(found[: len(tokenized)], found[len(tokenized) :], strict=True)
    return [document for pair in pairs for document in pair]


def trl_answers(model: Path, rows: Sequence[dict[str, Any]], length: int) -> tuple[Documents, Documents, list[int]]:
    """The rows that KTO's trainer keeps, each with the completion of the next, and their labels."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    # It gives each row the completion of the one before, in a batch, which is here the whole dataset backwards.
    args: Any = SimpleNamespace(dataset_num_proc=None, max_length=length, per_device_train_batch_size=len(rows))
    trainer: Any = SimpleNamespace(
        _tokenizer=tokenizer, calculate_KL=True, desirable_weight=1.0, undesirable_weight=1.0
    )
    backwards = Dataset.from_list(list(rows)[::-1])
    tokenized = KTOTrainer._prepare_dataset(trainer, backwards, tokenizer, args, "train")
    batch = DataCollatorForUnpairedPreference(pad_token_id=PAD, max_length=length)(list(tokenized))
    return collated(batch)[::-1], collated(batch, "KL_")[::-1], batch["label"].int().tolist()[::-1]


@pytest.mark.parametrize("length", [4096, 160, 96])
def test_chats_that_are_compared(chat_model: Path, tmp_path: Path, length: int) -> None:
    rows = compared_chats()
    expected = trl_preferences(chat_model, rows, length)

    dataset, report = prepared(chat_model, tmp_path, rows, length)

    assert dataset.kind == "preference"
    assert documents_of(dataset) == expected
    assert report.documents == 2 * (report.rows - report.error_rows) == len(expected)
    assert (report.truncated_rows > 0) == (length < 4096)
    # Whole conversations that share their prompt are the same rows.
    whole = [{side: row["prompt"] + row[side] for side in ("chosen", "rejected")} for row in rows]
    assert trl_preferences(chat_model, whole, length) == expected
    assert documents_of(prepared(chat_model, tmp_path / "whole", whole, length)[0]) == expected


@pytest.mark.parametrize("length", [4096, 96])
def test_texts_that_are_compared(bare_model: Path, tmp_path: Path, length: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bare_model)
    texts = questions(24)
    rows = [
        {"prompt": f"{asked}\nThe answ", "chosen": f"er: {answer}", "rejected": f"ering is {texts[index - 1][1]}"}
        for index, (asked, answer) in enumerate(texts)
    ]
    rows[1]["chosen"] += tokenizer.eos_token
    rows[2] = {"prompt": f"{texts[2][0]}\n", "chosen": texts[2][1], "rejected": texts[3][1]}
    # A token joins the end of the prompt with the answer: both answers begin with it.
    prompt_ids, whole_ids = (
        tokenizer(text)["input_ids"] for text in (rows[0]["prompt"], rows[0]["prompt"] + rows[0]["chosen"])
    )
    assert whole_ids[: len(prompt_ids)] != prompt_ids
    expected = trl_preferences(bare_model, rows, length)

    dataset, report = prepared(bare_model, tmp_path, rows, length)

    assert documents_of(dataset) == expected
    assert report.documents == 2 * (report.rows - report.error_rows) == len(expected)


@pytest.mark.parametrize(("with_template", "length"), [(True, 4096), (True, 160), (False, 4096), (False, 96)])
def test_answers_that_are_labelled(
    chat_model: Path, bare_model: Path, tmp_path: Path, with_template: bool, length: int
) -> None:
    model = chat_model if with_template else bare_model
    rows: list[dict[str, Any]] = [
        {"prompt": asked, "completion": answer, "label": index % 3 == 0}
        for index, (asked, answer) in enumerate(questions(16))
    ]
    chats = [
        row | {"prompt": [turn("user", row["prompt"])], "completion": [turn("assistant", row["completion"])]}
        for row in rows
    ]
    matched, mismatched, labels = trl_answers(model, chats if with_template else rows, length)

    dataset, report = prepared(model, tmp_path, rows, length)

    assert dataset.kind == "kto"
    documents = documents_of(dataset)
    assert documents[::2] == matched
    assert documents[1::2] == mismatched
    assert dataset.labels_of(range(0, dataset.num_documents, 2)).tolist() == labels
    assert set(dataset.labels_of(range(1, dataset.num_documents, 2)).tolist()) == {-1}
    assert report.rows - report.error_rows == len(matched)
    if with_template:
        # Texts are turns for a model with a template.
        assert documents_of(prepared(model, tmp_path / "chats", chats, length)[0]) == documents

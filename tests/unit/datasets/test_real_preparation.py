"""gsm8k and shakespeare prepared for a real model, and counted by transformers alone; memory that does not follow the
file's size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from horizon_server.codec import to_plain
from horizon_server.datasets.preparing import prepare
from horizon_server.datasets.reading import StoredFile
from horizon_server.datasets.recipe import PrepareOptions, PrepareReport, PrepareRequest
from horizon_server.demo.recipe import demo_chats
from horizon_server.engine.data import PreparedDataset, StepPlan

DATA = Path(__file__).parents[4] / "shared" / "data"
SEQUENCE_LENGTH = 1024


def data_file(name: str) -> Path:
    if not (DATA / name).is_file():
        pytest.skip(f"needs {DATA / name}, which is not part of the repository")
    return DATA / name


def prepared(file: Path, model: Path, folder: Path, **options: Any) -> tuple[PrepareReport, PreparedDataset]:
    request = PrepareRequest(
        dataset_files=(StoredFile.at(file),),
        model_dir=model,
        output_dir=folder / "out",
        options=PrepareOptions(**({"sequence_length": SEQUENCE_LENGTH} | options)),
    )
    report = prepare(request, on_progress=lambda done: None)
    return report, PreparedDataset.open(folder / "out")


def test_gsm8k_has_the_tokens_and_targets_that_transformers_counts(tiny_base: Path, tmp_path: Path) -> None:
    file = data_file("gsm8k_train.jsonl")
    report, dataset = prepared(file, tiny_base, tmp_path, field_map={"prompt": "question", "completion": "answer"})
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_base)
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    chats = [[("user", row["question"]), ("assistant", row["answer"])] for row in rows]
    counted = tokenizer.apply_chat_template(
        [[{"role": role, "content": content} for role, content in chat] for chat in chats],
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    lengths = [len(ids) for ids in counted["input_ids"]]
    assert max(lengths) <= SEQUENCE_LENGTH
    assert (report.rows, report.documents, report.tokens) == (len(rows), len(rows), sum(lengths))
    assert (report.truncated_rows, report.truncated_tokens, report.error_rows) == (0, 0, 0)
    assert report.trained_tokens == sum(sum(mask) for mask in counted["assistant_masks"])
    assert dataset.document_lengths.tolist() == lengths

    plan = StepPlan(dataset, sequence_length=SEQUENCE_LENGTH, tokens_per_step=16384, epochs=1)
    assert plan.packing_efficiency >= 0.97
    steps = [plan.step(i) for i in range(plan.num_steps)]
    assert sum(row.num_tokens for step in steps for row in step) == report.tokens
    assert sum(row.num_targets for step in steps for row in step) == report.trained_tokens
    assert min(sum(row.num_targets for row in step) for step in steps) > 0


def test_gsm8k_cut_short_loses_what_the_report_says(tiny_base: Path, tmp_path: Path) -> None:
    file = data_file("gsm8k_train.jsonl")
    options = {"field_map": {"prompt": "question", "completion": "answer"}, "sequence_length": 96}
    report, dataset = prepared(file, tiny_base, tmp_path, **options)
    whole, _ = prepared(file, tiny_base, tmp_path / "whole", field_map=options["field_map"])
    assert report.documents + report.error_rows == whole.rows
    assert report.truncated_rows > 100 < report.error_rows
    assert len(report.errors) == 100
    assert dataset.document_lengths.max() == 96
    left_out = {int(error.split()[0].removeprefix("gsm8k_train.jsonl:")) for error in report.errors}
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_base)
    for number, line in enumerate(file.read_text("utf-8").splitlines()[: max(left_out)], start=1):
        question = [{"role": "user", "content": json.loads(line)["question"]}]
        cue = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert (number in left_out) == (len(cue) >= 96)


def test_shakespeare_has_the_tokens_that_transformers_counts(tiny_base: Path, tmp_path: Path) -> None:
    file = data_file("shakespeare.txt")
    report, dataset = prepared(file, tiny_base, tmp_path, method="pretrain")
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_base)
    ids = [*tokenizer(file.read_text("utf-8"))["input_ids"], tokenizer.eos_token_id]
    assert report.tokens == len(ids)
    assert report.trained_tokens == report.tokens - report.documents
    assert [
        token for n in range(dataset.num_documents) for token in dataset.micro_batch([n]).input_ids_T.tolist()
    ] == ids
    held, _ = prepared(file, tiny_base, tmp_path / "held", method="pretrain", eval_fraction=0.1)
    assert held.tokens + held.eval_tokens == len(ids)
    assert 0.03 * report.documents < held.eval_documents < 0.2 * report.documents


# The peak of a process that was started by a larger one would count that one's, so the kernel's own mark is read.
MEASURED = """
import json, resource, sys
from horizon_server.children.entry import serve
from horizon_server.datasets.preparing import work
code = serve(work, who="the data preparation")
(mark,) = (int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
peaks = [mark // 1024, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024]
print(json.dumps({"code": code, "peaks_mb": peaks}), file=sys.stderr)
"""


def peaks_mb(model: Path, folder: Path, num_bytes: int) -> list[int]:
    """Return the peaks of the child and of the largest process that it started."""
    folder.mkdir()
    block = "".join(json.dumps({"messages": chat}) + "\n" for chat in demo_chats())
    (folder / "rows.jsonl").write_text(block * (num_bytes // len(block) + 1))
    request = PrepareRequest(
        dataset_files=(StoredFile.at(folder / "rows.jsonl"),),
        model_dir=model,
        output_dir=folder / "out",
        options=PrepareOptions(),
    )
    (folder / "request.json").write_text(json.dumps(to_plain(request) | {"num_processes": 2}))
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, folder / "request.json"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
        timeout=300,
    )
    measured = json.loads(done.stderr)
    assert measured["code"] == 0, done.stdout
    peaks: list[int] = measured["peaks_mb"]
    return peaks


def test_memory_does_not_follow_the_size_of_the_file(demo_model: Path, tmp_path: Path) -> None:
    small, large = (peaks_mb(demo_model, tmp_path / str(size), size) for size in (2_000_000, 12_000_000))
    assert sum(large) + large[1] < 400
    assert max(now - before for now, before in zip(large, small, strict=True)) < 25

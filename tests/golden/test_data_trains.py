"""From files to steps: whatever the rows, no step is without a trained token, which the trainer would refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from horizon_server.datasets.preparing import prepare
from horizon_server.datasets.reading import StoredFile
from horizon_server.datasets.recipe import PrepareOptions, PrepareRequest
from horizon_server.demo.recipe import write_demo_model
from horizon_server.engine.data import PreparedDataset, StepPlan

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("model") / "demo")


@pytest.fixture
def prepared(model: Path, tmp_path: Path) -> Callable[..., PreparedDataset]:
    """Rows as a prepared dataset."""

    def run(rows: Rows, **options: Any) -> PreparedDataset:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        request = PrepareRequest(
            dataset_files=(StoredFile.at(file),),
            model_dir=model,
            output_dir=tmp_path / "prepared",
            options=PrepareOptions(**options),
        )
        prepare(request, on_progress=lambda rows: None)
        return PreparedDataset.open(tmp_path / "prepared")

    return run


def chat(question: str, answer: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **fields}]}


CHATS: Rows = [chat("One?", "Yes, " + "one " * n) for n in range(12)] + [chat("w " * 40, "late"), chat("x", "y")]
TEXTS: Rows = [
    {"text": "a"},
    {"text": "ab"},
    {"text": "word " * 33},
    {"text": "x y"},
    {"text": "A sentence of a few words."},
]


def steps_of(dataset: PreparedDataset, *, sequence_length: int, tokens_per_step: int, packing: bool) -> list[int]:
    """Targets of every step of two epochs."""
    plan = StepPlan(
        dataset, sequence_length=sequence_length, tokens_per_step=tokens_per_step, packing=packing, seed=3, epochs=2
    )
    return [sum(row.num_targets for row in plan.step(i)) for i in range(plan.num_steps)]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(
    ("rows", "sequence_length", "options"),
    [
        (CHATS, 24, {}),
        (CHATS, 64, {}),
        (CHATS, 8, {"train_on": "all"}),
        (TEXTS, 8, {"method": "pretrain"}),
        (TEXTS, 9, {"method": "pretrain"}),
        (TEXTS, 64, {"method": "pretrain"}),
    ],
)
def test_every_step_has_something_to_learn(
    rows: Rows,
    sequence_length: int,
    options: dict[str, Any],
    packing: bool,
    prepared: Callable[..., PreparedDataset],
) -> None:
    dataset = prepared(rows, sequence_length=sequence_length, **options)

    for document in range(dataset.num_documents):
        assert dataset.micro_batch([document]).num_targets > 0
    # With one token a step, every row is a step of its own.
    for tokens_per_step in (1, 2, 16, 1000):
        targets = steps_of(dataset, sequence_length=sequence_length, tokens_per_step=tokens_per_step, packing=packing)
        assert min(targets) > 0

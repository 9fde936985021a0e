"""What the engine waits for its data: a step's micro-batches against the step itself, and the plan of ten million
documents.

Batches are made on the thread that trains, between two steps, so every second of it is exposed. Chats are those of
`bench.tokenisation`.

python -m bench.loader
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.models import qwen3_config, random_store
from bench.tokenisation import SHARED, write_chats
from horizon_server.datasets.preparing import prepare
from horizon_server.datasets.reading import StoredFile
from horizon_server.datasets.recipe import PrepareOptions, PrepareRequest
from horizon_server.demo.recipe import write_demo_model
from horizon_server.engine.data import PreparedDataset, StepPlan
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.template import Template
from horizon_server.engine.trainer import Trainer
from horizon_server.recipe import Recipe
from horizon_server.records.execution import Execution

DATA_BYTES = 5 * 10**6
NUM_DOCUMENTS = 10_000_000
SHAPE, STEP_TOKENS, NUM_STEPS = "6m", 2048, 4
LARGE_STEP_TOKENS = 65536


def prepared(folder: Path) -> PreparedDataset:
    """Prepare chats for tiny-base, or for the demo's model where that is not there."""
    write_chats(folder / "chats.jsonl", DATA_BYTES)
    tiny_base = SHARED / "models" / "tiny-base"
    request = PrepareRequest(
        dataset_files=(StoredFile.at(folder / "chats.jsonl"),),
        model_dir=tiny_base if tiny_base.is_dir() else write_demo_model(folder / "model"),
        output_dir=folder / "prepared",
        options=PrepareOptions(),
    )
    prepare(request, on_progress=lambda _: None)
    return PreparedDataset.open(folder / "prepared")


def plan_of(dataset: PreparedDataset, tokens_per_step: int) -> StepPlan:
    """Return an epoch of packed rows of 1024 tokens."""
    return StepPlan(dataset, sequence_length=1024, tokens_per_step=tokens_per_step, epochs=1)


def share_of_a_step(dataset: PreparedDataset) -> None:
    """Print what a small model's training waits for its batches."""
    template = Template.from_config(qwen3_config(SHAPE))
    store, device = random_store(template), HostDevice()
    trainer = Trainer(template, store, device, Recipe(learning_rate=1e-5), Execution(), num_steps=1000)
    plan = plan_of(dataset, STEP_TOKENS)
    waited: list[float] = []
    shares: list[float] = []
    for i in range(NUM_STEPS + 1):
        started_s = time.perf_counter()
        rows = plan.step(i)
        made_s = time.perf_counter()
        trainer.train_step(rows)
        waited.append(made_s - started_s)
        shares.append(waited[-1] / (time.perf_counter() - started_s))
    for resource in (trainer, device, store):
        resource.close()
    print("| step | batch, ms | share of the step |")
    print("| --- | --- | --- |")
    print(
        f"| {SHAPE}, {STEP_TOKENS} tokens | {1e3 * statistics.median(waited[1:]):.2f} | "
        f"{statistics.median(shares[1:]):.3%} |"
    )
    large = plan_of(dataset, LARGE_STEP_TOKENS)
    made = []
    for i in range(large.num_steps):
        started_s = time.perf_counter()
        large.step(i)
        made.append(time.perf_counter() - started_s)
    batch_s = statistics.median(made)
    print(f"| {LARGE_STEP_TOKENS} tokens alone | {1e3 * batch_s:.2f} | 1 % of a step of {100 * batch_s:.2f} s |\n")
    print(f"packing efficiency of the chats at 1024: {large.packing_efficiency:.4f}\n")


class _Lengths:
    """A dataset of which only the lengths are known: all that a plan looks at."""

    def __init__(self, lengths: NDArray[np.int64]) -> None:
        self.document_lengths = lengths
        self.num_tokens = int(lengths.sum())


def plan_of_ten_million() -> None:
    """Print how long a plan of many documents takes, and how full its rows are."""
    lengths = np.random.default_rng(0).lognormal(5.2, 0.6, NUM_DOCUMENTS).clip(4, 1024).astype(np.int64)
    print(
        f"| {NUM_DOCUMENTS:,} documents of {lengths.mean():.0f} tokens | plan, s | steps | rows full | a step's rows, "
        "ms |"
    )
    print("| --- | --- | --- | --- | --- |")
    for packing in (True, False):
        started_s = time.perf_counter()
        plan = StepPlan(
            _Lengths(lengths),  # type: ignore[arg-type]
            sequence_length=1024,
            tokens_per_step=16384,
            packing=packing,
            epochs=1,
        )
        planned_s = time.perf_counter() - started_s
        started_s = time.perf_counter()
        for i in range(0, plan.num_steps, plan.num_steps // 100):
            plan.documents_of(i)
        asked_s = (time.perf_counter() - started_s) / 100
        name = "packed" if packing else "one a row"
        print(
            f"| {name} | {planned_s:.2f} | {plan.num_steps:,} | {plan.packing_efficiency:.3f} | {1e3 * asked_s:.2f} |"
        )


def main() -> None:
    """Print both tables."""
    with tempfile.TemporaryDirectory() as folder:
        share_of_a_step(prepared(Path(folder)))
    plan_of_ten_million()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()

"""What a step of DPO costs over a step of supervised fine-tuning on the same tokens, and the pass over the data that
comes before it.

Both trainers have the same weights and rows, one thread each, and take turns. Ratios are of processor seconds, which
other work on the machine changes little. A step of DPO runs the head twice: for the log-probabilities, and for the
gradients once the loss is known. The reference log-probabilities are one forward over all data before the first step; a
job of one epoch pays it once for each step, one of three epochs a third of it.

python -m bench.preference            # prints a table for bench/RESULTS.md
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch

from bench.models import qwen3_config, random_rows, random_store
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.objectives import DPO, Documents, StepObjective
from horizon_server.engine.template import Template
from horizon_server.engine.trainer import Trainer
from horizon_server.planning.ledger import micro_batch_tokens
from horizon_server.recipe import Recipe
from horizon_server.records.execution import Execution

WANTED = 1.35


def measure(shape: str, *, num_rows: int, row_tokens: int, num_turns: int, num_threads: int) -> dict[str, float]:
    """Return the medians of processor seconds of a step of each kind and of the forward, and of their ratios turn by
    turn."""
    config = qwen3_config(shape)
    template = Template.from_config(config)
    stores, devices, trainers = [], [], []
    for _ in range(2):
        stores.append(random_store(template))
        devices.append(HostDevice(num_threads=num_threads))
        recipe = Recipe(learning_rate=1e-5, lr_schedule="constant", tokens_per_step=num_rows * row_tokens)
        execution = Execution(
            optimizer_threads=num_threads, micro_batch_tokens=micro_batch_tokens(template.hidden_size, "host")
        )
        trainers.append(Trainer(template, stores[-1], devices[-1], recipe, execution, num_steps=10_000))
    plain, preferring = trainers

    def timed(work: Callable[[], object]) -> float:
        start_s = time.process_time()
        work()
        return time.process_time() - start_s

    def step(trainer: Trainer, rows: list[MicroBatch], objective: StepObjective | None) -> None:
        trainer.train_step(rows, objective)
        trainer.flush()

    turns = []
    for i in range(num_turns + 1):
        rows = random_rows(config.vocab_size, num_rows=num_rows, row_tokens=row_tokens, seed=i)
        found: list[torch.Tensor] = []
        forward_s = timed(lambda rows=rows, found=found: found.extend(preferring.log_probabilities(rows)))  # type: ignore[misc]
        documents = Documents.of(rows, pairs_P2=torch.arange(num_rows).view(-1, 2))
        objective = StepObjective(objective=DPO(), documents=documents, references_S=torch.cat(found))
        both = [(plain, None), (preferring, objective)]
        # Who goes first changes, so that nobody always finds the caches of the same other one.
        seconds = {
            trainer: timed(lambda trainer=trainer, own=own, rows=rows: step(trainer, rows, own))  # type: ignore[misc]
            for trainer, own in (both if i % 2 else reversed(both))
        }
        # The first turn allocates.
        if i:
            sft_s, dpo_s = seconds[plain], seconds[preferring]
            turns.append((sft_s, dpo_s, forward_s, dpo_s / sft_s, (dpo_s + forward_s) / sft_s))
    for trainer, device, store in zip(trainers, devices, stores, strict=True):
        trainer.close()
        device.close()
        store.close()
    names = ("sft_s", "dpo_s", "forward_s", "ratio", "ratio_with_references")
    return dict(zip(names, map(statistics.median, zip(*turns, strict=True)), strict=True))


def main() -> int:
    """Measure and print; 1 where the figure is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--shapes", nargs="*", default=["36m", "40m"])
    options = parser.parse_args()
    print(f"Wanted: at most {WANTED} x a step of supervised fine-tuning.\n")
    print("| model | SFT step s | DPO step s | reference forward s | DPO / SFT | DPO with the forward / SFT |")
    print("| --- | --- | --- | --- | --- | --- |")
    worst = 0.0
    for shape in options.shapes:
        found = measure(shape, num_rows=4, row_tokens=256, num_turns=options.turns, num_threads=1)
        worst = max(worst, found["ratio"])
        print(
            f"| {shape} | {found['sft_s']:.2f} | {found['dpo_s']:.2f} | {found['forward_s']:.2f} | "
            f"{found['ratio']:.2f} | {found['ratio_with_references']:.2f} |",
            flush=True,
        )
    return int(worst > WANTED)


if __name__ == "__main__":
    sys.exit(main())

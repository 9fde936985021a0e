"""Tokens per second of the streaming engine against a plain PyTorch loop: same model, batch and threads, steps in turn.

The plain loop is what one would write for a model that fits: gradient checkpointing, clip 1.0, fused AdamW. Both run a few steps at a
time; the engine's last update of each turn is flushed and counted, although a longer run would hide it in the next step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional

from bench.models import plain_model, qwen3_config, random_rows, random_store
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.template import Template
from horizon_server.engine.trainer import TrainConfig, Trainer
from horizon_server.store.cpus import available_cpus


def plain_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: list[MicroBatch]) -> float:
    """One step of the plain loop, row by row, the loss scaled by the step's targets; returns the loss."""
    num_targets = sum(row.num_targets for row in rows)
    total = 0.0
    for row in rows:
        logits = model(input_ids=row.input_ids_T[None], use_cache=False).logits[0]
        loss = functional.cross_entropy(logits, row.labels_T, reduction="sum", ignore_index=-100) / num_targets
        torch.autograd.backward(loss)
        total += float(loss.detach())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


def measure(
    shape: str, *, num_rows: int, row_tokens: int, num_pairs: int, num_steps: int, num_threads: int
) -> dict[str, float]:
    """Return tokens per second of both, the median ratio of pairs, and the largest relative difference of losses."""
    config = qwen3_config(shape)
    template = Template.from_config(config)
    store = random_store(template)
    model = plain_model(template, store, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    device = HostDevice(num_threads=num_threads)
    settings = TrainConfig(
        num_steps=10_000, learning_rate=1e-4, lr_schedule="constant", max_grad_norm=1.0, optimizer_threads=num_threads
    )
    trainer = Trainer(template, store, device, settings)
    batches = [
        random_rows(config.vocab_size, num_rows=num_rows, row_tokens=row_tokens, seed=i) for i in range(num_pairs + 1)
    ]

    def ours(rows: list[MicroBatch]) -> float:
        losses = [trainer.train_step(rows).loss for _ in range(num_steps)]
        trainer.flush()
        return losses[-1]

    def theirs(rows: list[MicroBatch]) -> float:
        torch.set_num_threads(num_threads)
        return [plain_step(model, optimizer, rows) for _ in range(num_steps)][-1]

    pairs, worst = [], 0.0
    for i, rows in enumerate(batches):
        # Who goes first alternates, so that neither always finds the caches of the other.
        order = (ours, theirs) if i % 2 else (theirs, ours)
        timed = {step: _timed(step, rows) for step in order}
        worst = max(worst, abs(timed[ours][1] - timed[theirs][1]) / timed[theirs][1])
        if i:
            pairs.append((timed[ours][0], timed[theirs][0]))
    tokens = num_steps * num_rows * row_tokens
    result = {
        "ours_tokens_per_s": tokens / statistics.median(a for a, _ in pairs),
        "plain_tokens_per_s": tokens / statistics.median(b for _, b in pairs),
        "ratio": statistics.median(b / a for a, b in pairs),
        "loss_difference": worst,
    }
    trainer.close()
    device.close()
    store.close()
    return result


def _timed(step: Callable[[list[MicroBatch]], float], rows: list[MicroBatch]) -> tuple[float, float]:
    started_s = time.perf_counter()
    loss = step(rows)
    return time.perf_counter() - started_s, loss


def main() -> None:
    """Print one line per shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["6m", "40m", "0.6b"], nargs="*", default=["6m", "40m"])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--row-tokens", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=5, help="turns of each")
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn")
    parser.add_argument("--threads", type=int, default=available_cpus())
    arguments = parser.parse_args()
    print(
        "| shape | rows x tokens | threads | engine tokens/s | plain PyTorch tokens/s | ratio (median of pairs) | loss differs by |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for shape in arguments.shape:
        found = measure(
            shape,
            num_rows=arguments.rows,
            row_tokens=arguments.row_tokens,
            num_pairs=arguments.pairs,
            num_steps=arguments.steps,
            num_threads=arguments.threads,
        )
        print(
            f"| {shape} | {arguments.rows} x {arguments.row_tokens} | {arguments.threads} | {found['ours_tokens_per_s']:,.0f} "
            f"| {found['plain_tokens_per_s']:,.0f} | {found['ratio']:.2f} | {found['loss_difference']:.1e} |",
            flush=True,
        )


if __name__ == "__main__":
    main()

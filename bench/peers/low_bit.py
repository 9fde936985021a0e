"""torchao's optimizers with states in 8 bits, offloaded to host memory, on a GPU that holds weights and gradients.

    python -m bench.peers.low_bit adamw8bit TASK.json

Weights are in bf16 without masters, which is what these optimizers are for: rounding is stochastic. Gradients leave the
GPU during backward, before their norm could be known, so nothing is clipped.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from bench.peers.plain import held_out_loss, load_model, parts_of, sum_of_losses, synchronize
from bench.peers.protocol import Line, Rows, Task


def main() -> None:
    """Serve the bench."""
    task = Task.read(Path(sys.argv[2]))
    line, rows = Line(), Rows(task)
    torch.set_num_threads(task.num_threads)
    from torchao.optim import AdamW8bit, CPUOffloadOptimizer

    dtype = getattr(torch, task.dtype)
    model = load_model(task, dtype)
    optimizer = CPUOffloadOptimizer(
        model.parameters(),
        AdamW8bit,
        lr=task.learning_rate,
        weight_decay=0.0,
        bf16_stochastic_round=dtype is torch.bfloat16,
    )

    def step(number: int) -> None:
        parts = parts_of(task, rows, number)
        num_targets = sum(part.numel() - len(part) for part in parts)
        for part in parts:
            (sum_of_losses(model, part) / num_targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    line.serve(step, lambda: synchronize(task.device), lambda: held_out_loss(model, rows, task.device))


if __name__ == "__main__":
    main()

"""DeepSpeed's ZeRO-3 with parameters and optimizer offloaded to host memory, and ZeRO-Infinity, which keeps them on a
disk.

    python -m bench.peers.deepspeed build
    python -m bench.peers.deepspeed zero3|infinity TASK.json

Without a GPU on DeepSpeed's CPU accelerator, which compiles its optimizer and its collectives at the first run.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from bench.peers.plain import held_out_loss, load_model, parts_of, sum_of_losses, synchronize
from bench.peers.protocol import Line, Rows, Task


def config_of(task: Task, name: str) -> dict[str, Any]:
    """What DeepSpeed is configured with."""
    where: dict[str, Any] = {"device": "cpu", "pin_memory": task.device == "cuda"}
    if name == "infinity":
        where = {"device": "nvme", "nvme_path": task.scratch, "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": task.rows_at_once,
        "gradient_accumulation_steps": task.rows_per_step // task.rows_at_once,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": task.dtype == "bfloat16"},
        "optimizer": {"type": "AdamW", "params": {"lr": task.learning_rate, "weight_decay": 0.0}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": where,
            "offload_param": where,
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
    }


def build() -> None:
    """Compile DeepSpeed's operations, which it keeps in TORCH_EXTENSIONS_DIR."""
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.ops.op_builder import CPUAdamBuilder

    CPUAdamBuilder().load()
    if not torch.cuda.is_available():
        from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder

        ShareMemCommBuilder().load()


def main() -> None:
    """Build, or serve the bench."""
    if sys.argv[1] == "build":
        build()
        return
    name, task = sys.argv[1], Task.read(Path(sys.argv[2]))
    line, rows = Line(), Rows(task)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port), "LOCAL_SIZE": "1"}
    if task.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.init_distributed(dist_backend="nccl" if task.device == "cuda" else "gloo")
    model = load_model(task, torch.float32)
    engine: Any = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config_of(task, name))[
        0
    ]
    # DeepSpeed sets its own.
    torch.set_num_threads(task.num_threads)

    def step(number: int) -> None:
        parts = parts_of(task, rows, number)
        for part in parts:
            # The engine divides by the number of parts, which are of one size.
            engine.backward(sum_of_losses(engine, part) / (part.numel() - len(part)))
            engine.step()

    line.serve(step, lambda: synchronize(task.device), lambda: held_out_loss(engine, rows, task.device))


if __name__ == "__main__":
    main()

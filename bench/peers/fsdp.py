"""PyTorch's FSDP2 with `CPUOffloadPolicy`: one rank, masters, gradients and moments in host memory.

    python -m bench.peers.fsdp fsdp2 TASK.json

In bf16 layers are computed in bf16 and gradients are reduced in fp32.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from bench.peers.plain import held_out_loss, load_model, parts_of, sum_of_losses, synchronize
from bench.peers.protocol import Line, Rows, Task


def main() -> None:
    """Serve the bench."""
    task = Task.read(Path(sys.argv[2]))
    line, rows, on_gpu = Line(), Rows(task), task.device == "cuda"
    torch.set_num_threads(task.num_threads)
    with tempfile.TemporaryDirectory() as folder:
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/ranks", rank=0, world_size=1)
        mesh = init_device_mesh(task.device, (1,))
        # Offloaded parameters start on the host.
        model = load_model(task, torch.float32).cpu()
        precision = MixedPrecisionPolicy(param_dtype=getattr(torch, task.dtype), reduce_dtype=torch.float32)
        offload = CPUOffloadPolicy(pin_memory=on_gpu)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=offload)
        fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload)
        optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate, weight_decay=0.0, fused=True)

        def step(number: int) -> None:
            parts = parts_of(task, rows, number)
            num_targets = sum(part.numel() - len(part) for part in parts)
            for i, part in enumerate(parts, 1):
                # Gradients are reduced once a step.
                model.set_requires_gradient_sync(i == len(parts))
                (sum_of_losses(model, part) / num_targets).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        line.serve(step, lambda: synchronize(task.device), lambda: held_out_loss(model, rows, task.device))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Two ranks of one thread against the same step by PyTorch's FSDP2: its plain form, which holds the shards on the
devices, and the one that keeps them on the host (CPUOffloadPolicy). All in fp32 on the host's processors, joined by
gloo, with activation checkpointing in each layer and clipping.

    python -m bench.fsdp
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.multiprocessing.spawn import spawn
from transformers import AutoModelForCausalLM

from bench.models import qwen3_config, random_rows
from bench.ranks import REAL, steps_of

_NUM_RANKS = 2


def steps_of_fsdp(num_steps: int, *, offloads: bool) -> list[float]:
    """Seconds of each step but the first."""
    results: SimpleQueue[list[float]] = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        spawn(_train, (f"{folder}/ranks", num_steps, offloads, results), nprocs=_NUM_RANKS)  # type: ignore[no-untyped-call]
    return results.get()[1:]


def _train(rank: int, meeting: str, num_steps: int, offloads: bool, results: SimpleQueue[list[float]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=_NUM_RANKS)
    config = qwen3_config(REAL["shape"])
    config.use_cache = False
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")  # type: ignore[no-untyped-call]
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    mesh = init_device_mesh("cpu", (_NUM_RANKS,))
    policy = CPUOffloadPolicy(pin_memory=False) if offloads else OffloadPolicy()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    rows = random_rows(config.vocab_size, num_rows=REAL["rows"], row_tokens=REAL["row_tokens"])
    own = torch.stack([row.input_ids_T for row in rows[rank::_NUM_RANKS]])
    parts = torch.split(own, REAL["micro_batch_tokens"] // REAL["row_tokens"])
    seconds = []
    for _ in range(num_steps + 1):
        dist.barrier()
        started_s = time.perf_counter()
        for number, input_ids in enumerate(parts, 1):
            # Gradients are reduced once a step.
            model.set_requires_gradient_sync(number == len(parts))
            (model(input_ids=input_ids, labels=input_ids).loss / len(parts)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        seconds.append(time.perf_counter() - started_s)
    if rank == 0:
        results.put(seconds)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    print("| 2 ranks of 1 thread | s a step | times as fast as it |\n| --- | --- | --- |")
    (found,) = steps_of([{**REAL, "num_ranks": _NUM_RANKS}], arguments.steps)
    ours = statistics.median(found)
    print(f"| this engine, by rows | {ours:.2f} | 1.00 |", flush=True)
    for name, offloads in (("FSDP2", False), ("FSDP2 with CPUOffloadPolicy", True)):
        theirs = statistics.median(steps_of_fsdp(arguments.steps, offloads=offloads))
        print(f"| {name} | {theirs:.2f} | {theirs / ours:.2f} |", flush=True)


if __name__ == "__main__":
    main()

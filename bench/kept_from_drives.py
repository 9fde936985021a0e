"""What a GPU's memory saves of the traffic of drives, by the planner itself: for a dense model of 70 B parameters with
exact states on the machine of `bench.giant`, with less host memory.

A forecast, not a measurement. docs/drives.md shows what this prints, after about half a minute on one core.
"""

from __future__ import annotations

from pathlib import Path

from bench.giant import DENSE, DRIVES, GPU, HOST_GBPS, ROW_TOKENS, outline
from horizon_server.planning.gpus import estimated_rates, gpu_named
from horizon_server.planning.machine import Accelerator, HostMemory
from horizon_server.planning.model_folder import open_model_folder
from horizon_server.planning.planner import Planner
from horizon_server.planning.residency import state_units
from horizon_server.records.plan import Plan
from horizon_server.settings import load_settings
from horizon_server.spec import parse_job_spec

NUM_TOKENS, NUM_LAYERS = 8_192, 80
CASES: tuple[tuple[int, float | None], ...] = ((950, 1.0), (600, 1.0), (600, None))
"""Host memory in GB, and what a step's gradients are clipped to."""
_GIGA = 10**9


def plan_of(folder: Path, host_gb: int, max_grad_norm: float | None) -> Plan:
    """Of a job next to that much host memory."""
    memory, gpu = HostMemory(limit_bytes=host_gb * _GIGA, available_bytes=host_gb * _GIGA), gpu_named(GPU)
    planner = Planner(
        load_settings(),
        memory=lambda: memory,
        num_threads=32,
        accelerators=(Accelerator(index=0, name=gpu.device_name, memory_bytes=gpu.memory_bytes),),
        rates=lambda: {"cuda": estimated_rates(GPU, host_bytes_per_s=HOST_GBPS * _GIGA)},
        drives=DRIVES,
    )
    train = {"max_steps": 1000, "tokens_per_step": NUM_TOKENS, "sequence_length": ROW_TOKENS}
    spec = {
        "name": "kept",
        "model": "kept",
        "dataset": "rows",
        "device": "cuda",
        "train": {**train, "max_grad_norm": max_grad_norm},
        "memory": {"tier": "drive", "accept_wear": True},
    }
    return planner.plan(parse_job_spec(spec), folder)


def table() -> list[str]:
    """A row for each case, as lines of Markdown."""
    lines = [
        "| host memory, clipping | layers on drives | of them kept on the GPU | GB a step | s a step | saved |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    config = {**DENSE, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
    with outline({**config, "vocab_size": 128256, "num_hidden_layers": NUM_LAYERS}) as folder:
        layout = open_model_folder(folder).layout
        for host_gb, max_grad_norm in CASES:
            plan = plan_of(folder, host_gb, max_grad_norm)
            drives, residency = plan.execution.drives, plan.execution.residency
            kept = {unit.index for unit in state_units(layout, residency)} & set(drives.units)
            assert plan.drives is not None and plan.prediction is not None
            lines.append(
                f"| {host_gb} GB, {'off' if max_grad_norm is None else 'on'} | {len(drives.units)} of {NUM_LAYERS} | "
                f"{len(kept)} | {plan.drives.num_bytes / _GIGA:.0f} | {plan.prediction.step_s:.1f} | "
                f"{residency.saved_share:.0%} |"
            )
    return lines


if __name__ == "__main__":
    print("\n".join(table()))

"""What is predicted for adapters on a model of 7 B parameters in 4 bits, by what stays on the device.

A forecast, not a measurement: rates are estimated from data sheets (`planning/gpus.py`). docs/performance.md shows the
table, and a test keeps it equal to what `python -m bench.residents` prints.
"""

from __future__ import annotations

import dataclasses

from bench.forecast import model_7b
from bench.gpu.steps import with_base
from horizon_server.planning.gpus import estimated_rates
from horizon_server.planning.residency import possible_ends
from horizon_server.planning.step_parts import TODAY
from horizon_server.planning.step_time import predict_step
from horizon_server.planning.step_work import work_of_step
from horizon_server.recipe import Recipe
from horizon_server.records.execution import NOTHING_STAYS, Execution

HOST_GBPS = {"h100": 200.0, "l40s": 120.0, "rtx-4090": 60.0}
"""GPU -> what the host's memory gives the optimizer, which has little to do for adapters."""
TOKENS = (1024, 2048, 8192)

_COMPILED = dataclasses.replace(TODAY, fused=True)
_JOB = Execution(device_kind="cuda", compute_dtype="bfloat16", grad_bytes=2, micro_batch_tokens=16384)


def table() -> list[str]:
    """Seconds of a step of rows of 1,024 tokens, as lines of Markdown."""
    folder = model_7b()
    folder = dataclasses.replace(folder, layout=with_base(folder.layout, "nf4"))
    num_layers, (*_, ends) = folder.shape.num_hidden_layers, possible_ends(folder.layout)
    choices = {
        "nothing stays": NOTHING_STAYS,
        "packed weights, head and table": dataclasses.replace(ends, packed_layers=num_layers),
        "all weights in bf16": dataclasses.replace(ends, resident_layers=num_layers),
    }
    lines = ["| GPU, tokens of a step | " + " | ".join(choices) + " |", "| --- |" + " --- |" * len(choices)]
    for gpu, host_gbps in HOST_GBPS.items():
        rates = estimated_rates(gpu, host_bytes_per_s=host_gbps * 1e9)
        for tokens in TOKENS:
            recipe = Recipe(learning_rate=1e-5, tokens_per_step=tokens, sequence_length=1024)
            cells: list[str] = []
            for kept in choices.values():
                work = work_of_step(folder, recipe, dataclasses.replace(_JOB, residency=kept), facts=_COMPILED)
                cells.append(f"{predict_step(work, rates, shares_processors=False).step_s:.3f}")
            lines.append(f"| {gpu}, {tokens:,} | " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))

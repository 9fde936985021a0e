"""What several GPUs are expected to bring with a 7B model, by the step-time model: the part of N times the speed of
one, by rows and by layers.

A forecast, not a measurement: the rates are estimated from data sheets (`planning/gpus.py`). Where GPUs have a way
between them, it is taken to bring a good half of what NVLink is sold as; else what one gets of another goes down its
link, through the host's memory, and up again. docs/performance.md shows the table, and a test keeps it equal to what
this prints.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from bench.forecast import model_7b
from horizon_server.planning.gpus import estimated_rates
from horizon_server.planning.model_folder import ModelFolder
from horizon_server.planning.rates import DeviceRates, PeerRates
from horizon_server.planning.step_parts import TODAY
from horizon_server.planning.step_time import predict_step
from horizon_server.planning.step_work import work_of_step
from horizon_server.recipe import Recipe
from horizon_server.records.execution import Execution, Parallel

NUM_GPUS = (2, 4, 8)
_NVLINK_BYTES_PER_S = 250e9
_ROW_TOKENS = 4096
_FACTS = replace(TODAY, fused=True)


@dataclass(frozen=True, kw_only=True)
class Box:
    """One machine, and the tokens of a step for each of its GPUs."""

    title: str
    gpu: str
    host_gbps: float
    has_peers: bool
    tokens_per_gpu: int


BOXES = tuple(
    replace(box, title=f"{box.title}, {tokens // 1024}k tokens per GPU", tokens_per_gpu=tokens)
    for box in (
        Box(title="H100, NVLink", gpu="h100", host_gbps=400, has_peers=True, tokens_per_gpu=0),
        Box(title="H100, no way between them", gpu="h100", host_gbps=400, has_peers=False, tokens_per_gpu=0),
        Box(title="RTX 4090", gpu="rtx-4090", host_gbps=200, has_peers=False, tokens_per_gpu=0),
    )
    for tokens in (8192, 65536)
)


def rates_of(box: Box) -> DeviceRates:
    """Of one of its GPUs, and of all at once."""
    rates = estimated_rates(box.gpu, host_bytes_per_s=box.host_gbps * 1e9)
    between = _NVLINK_BYTES_PER_S if box.has_peers else rates.h2d_bytes_per_s / 2
    return replace(
        rates,
        peers=PeerRates(
            num_devices=max(NUM_GPUS),
            together_bytes_per_s=rates.h2d_bytes_per_s,
            gather_bytes_per_s=between,
            exchange_bytes_per_s=between,
        ),
    )


def tokens_per_s(box: Box, parallel: Parallel, num_gpus: int, folder: ModelFolder) -> float:
    """Of a job with exact clipping, in bf16, in 8 lanes where it has several GPUs."""
    recipe = Recipe(learning_rate=1e-5, tokens_per_step=num_gpus * box.tokens_per_gpu, sequence_length=_ROW_TOKENS)
    execution = Execution(
        device_kind="cuda",
        compute_dtype="bfloat16",
        grad_bytes=2,
        micro_batch_tokens=16384,
        num_ranks=num_gpus,
        lanes=1 if num_gpus == 1 else 8,
        parallel=parallel,
    )
    work = work_of_step(folder, recipe, execution, facts=_FACTS)
    return predict_step(work, rates_of(box), shares_processors=False).tokens_per_second


def table() -> list[str]:
    """Parts of N times one GPU, by rows and by layers, as lines of Markdown."""
    folder = model_7b()
    lines = [
        "| machine | " + " | ".join(f"{num_gpus} GPUs: rows; layers" for num_gpus in NUM_GPUS) + " |",
        "| --- |" + " --- |" * len(NUM_GPUS),
    ]
    for box in BOXES:
        one = tokens_per_s(box, "rows", 1, folder)
        cells = []
        for num_gpus in NUM_GPUS:
            rows, layers = (
                tokens_per_s(box, parallel, num_gpus, folder) / (num_gpus * one) for parallel in ("rows", "layers")
            )
            cells.append(f"{rows:.2f}; {layers:.2f}")
        lines.append(f"| {box.title} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("\n".join(table()))


if __name__ == "__main__":
    main()

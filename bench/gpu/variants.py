"""The rows of the table that a run is compared with: what is predicted for each, and which points of the curve measure
it.

They are those of an independent review of the engine before its first run on a GPU: the engine as it is and with less
of it, adapters, and changes that it does not have yet, which are predicted alone. `python -m bench.gpu.variants` prints
what is predicted; docs/performance.md shows it, and a test keeps it equal.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from bench.forecast import TOKENS, model_7b, spare_memory
from bench.gpu.predicted import with_attention, with_streamed_states
from bench.gpu.shapes import Base, Engine
from bench.gpu.steps import with_base
from horizon_server.planning.gpus import estimated_rates
from horizon_server.planning.model_folder import ModelFolder
from horizon_server.planning.residency import possible_ends
from horizon_server.planning.step_parts import TODAY, EngineFacts
from horizon_server.planning.step_time import predict_step
from horizon_server.planning.step_work import work_of_step
from horizon_server.recipe import Recipe
from horizon_server.records.execution import NOTHING_STAYS, Execution, Residency
from horizon_server.records.plan import StepPrediction

PREDICTED_FOR, HOST_GBPS = "h100", 200.0
"""The machine of predictions; its rates are those of `planning/gpus.py`."""
ROW_TOKENS, MICRO_BATCH_TOKENS = 4096, 16384
NOT_IN_THE_ENGINE = "the engine does not have it"

_ROW_BY_ROW = Execution(device_kind="cuda", compute_dtype="bfloat16", grad_bytes=2)
_JOINED = dataclasses.replace(_ROW_BY_ROW, micro_batch_tokens=MICRO_BATCH_TOKENS)
_JOB = dataclasses.replace(TODAY, fused=True)
_NO_TABLE = dataclasses.replace(_JOB, keeps_embedding=True)
# What FlashAttention 4 is expected to reach on an H100, forward and backward.
HOPPER_ATTENTION = (480e12, 400e12)


@dataclass(frozen=True, kw_only=True)
class Measures:
    """Which points measure a row."""

    engine: Engine = "job"
    base: Base = ""
    host_gbps: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A row. `measured_by` is None where the engine has no such thing; of a job's points those with attention
    `for_hopper` count, or those without. In the memory that is left, `products` keeps products, `residents` weights and
    `states` optimizer states with their layers' weights;
    `all_resident` keeps those of all layers, `packed_resident` as they are packed, and head and table."""

    title: str
    measured_by: Measures | None = None
    facts: EngineFacts = _JOB
    execution: Execution = _JOINED
    base: Base = ""
    host_gbps: float = HOST_GBPS
    products: bool = False
    residents: bool = False
    all_resident: bool = False
    packed_resident: bool = False
    states: bool = False
    streamed_states: bool = False
    for_hopper: bool = False
    matmul: str = "bf16"


VARIANTS: tuple[Variant, ...] = (
    Variant(
        title="row by row, eager layers", facts=TODAY, execution=_ROW_BY_ROW, measured_by=Measures(engine="row by row")
    ),
    Variant(title="joined rows, eager layers", facts=TODAY, measured_by=Measures(engine="eager")),
    Variant(title="a job: joined rows, compiled layers", measured_by=Measures()),
    Variant(title="a job, host memory 120 GB/s", host_gbps=120, measured_by=Measures(host_gbps=120)),
    Variant(title="a job, host memory 350 GB/s", host_gbps=350, measured_by=Measures(host_gbps=350)),
    Variant(
        title="compiled, weights of all layers resident", all_resident=True, measured_by=Measures(engine="resident")
    ),
    Variant(title="a job that keeps products", products=True, measured_by=Measures(engine="products")),
    Variant(title="a job + attention for Hopper", for_hopper=True, measured_by=Measures()),
    Variant(
        title="+ products kept by compiled layers",
        products=True,
        for_hopper=True,
        measured_by=Measures(engine="products"),
    ),
    Variant(title="+ embedding table resident", facts=_NO_TABLE, products=True, for_hopper=True),
    Variant(
        title="a job that keeps optimizer states and products",
        states=True,
        products=True,
        measured_by=Measures(engine="states"),
    ),
    Variant(
        title="the same + attention for Hopper",
        states=True,
        products=True,
        for_hopper=True,
        measured_by=Measures(engine="states"),
    ),
    Variant(title="a job, states of all layers streamed to the GPU for their update", streamed_states=True),
    Variant(title="train.matmul: fp8, eager layers", facts=TODAY, matmul="fp8", measured_by=Measures(engine="fp8")),
    Variant(title="fp8 in compiled layers, weight gradients in bf16", matmul="fp8", for_hopper=True),
    Variant(title="the same, weight gradients too, products kept", matmul="fp8_full", products=True, for_hopper=True),
    Variant(
        title="the same, weight gradients too, products kept, table resident",
        facts=_NO_TABLE,
        matmul="fp8_full",
        products=True,
        for_hopper=True,
    ),
    Variant(
        title="LoRA, bf16 base, nothing resident",
        base="bf16",
        measured_by=Measures(base="bf16", engine="streamed"),
    ),
    Variant(title="LoRA, bf16 base, a job", base="bf16", residents=True, measured_by=Measures(base="bf16")),
    Variant(
        title="LoRA, base and table resident, attention for Hopper",
        base="bf16",
        facts=_NO_TABLE,
        all_resident=True,
        for_hopper=True,
    ),
    Variant(
        title="LoRA, nf4 base, nothing resident",
        base="nf4",
        measured_by=Measures(base="nf4", engine="streamed"),
    ),
    Variant(title="LoRA, nf4 base, a job", base="nf4", residents=True, measured_by=Measures(base="nf4")),
    Variant(
        title="LoRA, nf4 base, packed weights, head and table resident",
        base="nf4",
        packed_resident=True,
        measured_by=Measures(base="nf4", engine="packed resident"),
    ),
    Variant(
        title="LoRA, nf4 base, packed resident, the rest as above",
        base="nf4",
        facts=_NO_TABLE,
        all_resident=True,
        for_hopper=True,
    ),
)


def forecast(variant: Variant, num_tokens: int, folder: ModelFolder) -> StepPrediction:
    """A step of rows of 4,096 tokens with exact clipping, in bf16, on one H100."""
    rates = estimated_rates(PREDICTED_FOR, host_bytes_per_s=variant.host_gbps * 1e9)
    if variant.for_hopper:
        rates = with_attention(rates, *HOPPER_ATTENTION)
    num_layers = folder.shape.num_hidden_layers
    options: dict[str, Any] = {"matmul": variant.matmul}
    recipe = Recipe(learning_rate=1e-5, tokens_per_step=num_tokens, sequence_length=ROW_TOKENS, **options)

    def step(kept: Residency) -> StepPrediction:
        execution = dataclasses.replace(variant.execution, residency=kept)
        work = work_of_step(folder, recipe, execution, facts=variant.facts)
        if variant.streamed_states:
            work = with_streamed_states(work, folder.layout)
        return predict_step(work, rates, shares_processors=False)

    if variant.all_resident:
        return step(Residency(resident_layers=num_layers))
    if variant.packed_resident:
        return step(dataclasses.replace(possible_ends(folder.layout)[-1], packed_layers=num_layers))
    if not (variant.products or variant.residents or variant.states):
        return step(NOTHING_STAYS)
    keeps = {"keeps_products": variant.products, "keeps_states": variant.states}
    return step(spare_memory(folder, recipe, variant.execution, step, **keeps))


def table() -> list[str]:
    """What is predicted for a 7B model in useful TFLOP/s, as lines of Markdown."""
    folder = model_7b()
    lines = [
        "| variant | " + " | ".join(f"{tokens // 1024}k tokens" for tokens in TOKENS) + " |",
        "| --- |" + " --- |" * len(TOKENS),
    ]
    for variant in VARIANTS:
        layout = with_base(folder.layout, variant.base) if variant.base else folder.layout
        found = [forecast(variant, tokens, dataclasses.replace(folder, layout=layout)) for tokens in TOKENS]
        cells = [f"{one.model_flops_per_s / 1e12:.0f}" for one in found]
        lines.append(f"| {variant.title} | " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))

"""The rows of the table that a run is compared with: what is predicted for each, and which points of the curve measure
it.

They are those of an independent review of the engine before its first run on a GPU: the engine as it is and with less
of it, adapters, and changes that it does not have yet, which are predicted alone.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from bench.forecast import spare_memory
from bench.gpu.predicted import (
    Fp8,
    with_attention,
    with_elementwise,
    with_fp8,
    with_resident_states,
)
from bench.gpu.shapes import Base, Engine
from horizon_server.planning.gpus import estimated_rates
from horizon_server.planning.model_folder import ModelFolder
from horizon_server.planning.residency import possible_ends
from horizon_server.planning.step_time import predict_step
from horizon_server.planning.step_work import TODAY, EngineFacts, work_of_step
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
# Of 217 hidden-sizes of bytes, 35 are copies that attention and the sums of gradients could do without.
_FEWER_COPIES = 1 - 35 / 217
_STATE_LAYERS_OF_28 = 17
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
    """A row. `measured_by` is None where the engine has no such thing. In the memory that is left, `products` keeps
    products and `residents` weights; `all_resident` keeps those of all layers, `packed_resident` as they are packed,
    and head and table."""

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
    resident_states: bool = False
    for_hopper: bool = False
    fewer_copies: bool = False
    fp8: Fp8 | None = None


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
    Variant(title="eager, products kept", facts=TODAY, products=True, measured_by=Measures(engine="products")),
    Variant(title="a job + attention for Hopper", for_hopper=True),
    Variant(title="+ fewer copies", for_hopper=True, fewer_copies=True),
    Variant(title="+ products kept by compiled layers", products=True, for_hopper=True, fewer_copies=True),
    Variant(title="+ embedding table resident", facts=_NO_TABLE, products=True, for_hopper=True, fewer_copies=True),
    Variant(
        title="optimizer states of 17 of 28 layers resident instead",
        resident_states=True,
        for_hopper=True,
        fewer_copies=True,
    ),
    Variant(title="train.matmul: fp8, eager layers", facts=TODAY, fp8="eager", measured_by=Measures(engine="fp8")),
    Variant(title="fp8 in compiled layers, weight gradients in bf16", fp8="traced", for_hopper=True, fewer_copies=True),
    Variant(
        title="the same, weight gradients too, products kept, table resident",
        facts=_NO_TABLE,
        fp8="with weight gradients",
        products=True,
        for_hopper=True,
        fewer_copies=True,
    ),
    Variant(
        title="LoRA, bf16 base, nothing resident",
        base="bf16",
        measured_by=Measures(base="bf16", engine="streamed"),
    ),
    Variant(title="LoRA, bf16 base, a job", base="bf16", residents=True, measured_by=Measures(base="bf16")),
    Variant(
        title="LoRA, base and table resident, attention for Hopper, fewer copies",
        base="bf16",
        facts=_NO_TABLE,
        all_resident=True,
        for_hopper=True,
        fewer_copies=True,
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
        fewer_copies=True,
    ),
)


def forecast(variant: Variant, num_tokens: int, folder: ModelFolder) -> StepPrediction:
    """A step of rows of 4,096 tokens with exact clipping, in bf16, on one H100."""
    rates = estimated_rates(PREDICTED_FOR, host_bytes_per_s=variant.host_gbps * 1e9)
    if variant.for_hopper:
        rates = with_attention(rates, *HOPPER_ATTENTION)
    num_layers = folder.shape.num_hidden_layers
    recipe = Recipe(learning_rate=1e-5, tokens_per_step=num_tokens, sequence_length=ROW_TOKENS)

    def step(kept: Residency) -> StepPrediction:
        execution = dataclasses.replace(variant.execution, residency=kept)
        work = work_of_step(folder, recipe, execution, facts=variant.facts)
        if variant.fewer_copies:
            work = with_elementwise(work, _FEWER_COPIES)
        if variant.fp8:
            work = with_fp8(work, variant.fp8)
        if variant.resident_states:
            work = with_resident_states(work, folder.layout, num_layers * _STATE_LAYERS_OF_28 // 28)
        return predict_step(work, rates, shares_processors=False)

    if variant.all_resident:
        return step(Residency(resident_layers=num_layers))
    if variant.packed_resident:
        return step(dataclasses.replace(possible_ends(folder.layout)[-1], packed_layers=num_layers))
    if not (variant.products or variant.residents):
        return step(NOTHING_STAYS)
    return step(spare_memory(folder, recipe, variant.execution, step, keeps_products=variant.products))

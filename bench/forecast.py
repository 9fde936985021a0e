"""What an H100 is expected to reach with a 7B model, by the step-time model: the plain schedule, and with each planned
change.

A forecast, not a measurement: the rates are estimated from data sheets (`planning/gpus.py`). docs/performance.md shows
the table, and a test keeps it equal to what this prints.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from horizon_server.planning.gpus import FP8_TIMES_AS_FAST, estimated_rates, gpu_named, usable_device_bytes
from horizon_server.planning.ledger import plan_memory
from horizon_server.planning.model_folder import ModelFolder, ModelShape
from horizon_server.planning.residency import SPARE_USABLE, choose_residency, possible_ends, product_bytes
from horizon_server.planning.step_parts import TODAY, EngineFacts
from horizon_server.planning.step_time import predict_step
from horizon_server.planning.step_work import work_of_step
from horizon_server.recipe import Recipe
from horizon_server.records.execution import NOTHING_STAYS, Execution, Residency
from horizon_server.records.plan import StepPrediction
from horizon_server.store.layout import build_layout

HIDDEN, INNER, LAYERS, HEADS, KEY_HEADS, VOCABULARY = 3584, 18944, 28, 28, 4, 152064
GPU = "h100"
TOKENS = (8192, 32768, 65536, 131072, 262144)

# Before the numbered changes: chunks of the head were 1 GiB of logits in fp32.
_PLAIN = EngineFacts()
_ROW_BY_ROW = Execution(
    device_kind="cuda", compute_dtype="bfloat16", grad_bytes=2, head_chunk_tokens=(1 << 30) // (4 * VOCABULARY)
)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One row of the table."""

    title: str
    facts: EngineFacts = _PLAIN
    execution: Execution = _ROW_BY_ROW
    row_tokens: int = 4096
    host_gbps: float = 200
    gemm_factor: float = 1.0
    uses_spare_memory: bool = False


_FUSED = replace(_PLAIN, fused=True)
_FUSED_HEAD = replace(_FUSED, fused_head=True)
_IN_GEMM = replace(_FUSED_HEAD, accumulates_in_gemm=True)
_NO_ENDS = replace(_IN_GEMM, sends_rows=True, keeps_embedding=True)
_JOINED = replace(_ROW_BY_ROW, micro_batch_tokens=16384)
_LARGE_CHUNKS = replace(_JOINED, head_chunk_tokens=8192)
_TODAY = replace(_ROW_BY_ROW, head_chunk_tokens=None)
_TODAY_JOINED = replace(_JOINED, head_chunk_tokens=None)
VARIANTS: Mapping[str, Variant] = {
    "now-120": Variant(title="row by row, rows of 4,096 tokens, host memory 120 GB/s", host_gbps=120),
    "now": Variant(title="row by row, rows of 4,096 tokens, host memory 200 GB/s"),
    "now-350": Variant(title="row by row, rows of 4,096 tokens, host memory 350 GB/s", host_gbps=350),
    "short-rows": Variant(title="row by row, rows of 1,024 tokens", row_tokens=1024),
    "1": Variant(title="1: micro-batches of 16k tokens", execution=_JOINED),
    "2": Variant(title="2: 1 and fused layers", facts=_FUSED, execution=_JOINED),
    "3": Variant(title="3: 2 and a fused head, chunks of 8,192 tokens", facts=_FUSED_HEAD, execution=_LARGE_CHUNKS),
    "4": Variant(title="4: 3 and weight gradients summed in the product", facts=_IN_GEMM, execution=_LARGE_CHUNKS),
    "5": Variant(title="5: 4 and the embedding kept on the device", facts=_NO_ENDS, execution=_LARGE_CHUNKS),
    "6": Variant(
        title="6: 5 and spare memory keeps products", facts=_NO_ENDS, execution=_LARGE_CHUNKS, uses_spare_memory=True
    ),
    "rows-today": Variant(title="the engine today, row by row, eager layers", facts=TODAY, execution=_TODAY),
    "eager-today": Variant(title="a job today, joined rows, eager layers", facts=TODAY, execution=_TODAY_JOINED),
    "measured": Variant(
        title="a job as it was measured, joined rows, compiled layers",
        facts=replace(TODAY, fused=True, fewer_copies=False),
        execution=_TODAY_JOINED,
    ),
    "job": Variant(
        title="a job today: the same with fewer copies", facts=replace(TODAY, fused=True), execution=_TODAY_JOINED
    ),
    "fp8": Variant(
        title=f"5 with FP8 products ({FP8_TIMES_AS_FAST} times as fast)",
        facts=_NO_ENDS,
        execution=_LARGE_CHUNKS,
        gemm_factor=FP8_TIMES_AS_FAST,
    ),
}


def model_7b() -> ModelFolder:
    """The shape of Qwen2.5-7B, without weights."""
    return model_of(hidden=HIDDEN, inner=INNER, layers=LAYERS, heads=HEADS, key_heads=KEY_HEADS, vocabulary=VOCABULARY)


def model_of(*, hidden: int, inner: int, layers: int, heads: int, key_heads: int, vocabulary: int) -> ModelFolder:
    """A model of Qwen2's form and these sizes, without weights."""
    config: dict[str, Any] = {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    }
    keys = key_heads * hidden // heads
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.q_proj.bias": (hidden,),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.k_proj.bias": (keys,),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.v_proj.bias": (keys,),
        "self_attn.o_proj.weight": (hidden, hidden),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
        **{f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in layer.items()},
    }
    layout = build_layout(shapes, num_layers=layers, tied=False)
    return ModelFolder(path=Path(), config=config, shape=ModelShape.from_config(config), headers={}, layout=layout)


def forecast(variant: Variant, num_tokens: int, folder: ModelFolder) -> StepPrediction:
    """One cell: a step of that many tokens with exact clipping, in bf16, its gradients kept in bf16."""
    rates = estimated_rates(GPU, host_bytes_per_s=variant.host_gbps * 1e9)
    (width,) = rates.widths
    faster = tuple((tokens, variant.gemm_factor * rate) for tokens, rate in width.gemm_flops_per_s)
    rates = replace(rates, widths=(replace(width, gemm_flops_per_s=faster),))
    recipe = Recipe(learning_rate=1e-5, tokens_per_step=num_tokens, sequence_length=variant.row_tokens)

    def step(kept: Residency) -> StepPrediction:
        work = work_of_step(folder, recipe, replace(variant.execution, residency=kept), facts=variant.facts)
        return predict_step(work, rates, shares_processors=False)

    uses_room = variant.uses_spare_memory
    return step(spare_memory(folder, recipe, variant.execution, step) if uses_room else NOTHING_STAYS)


def spare_memory(
    folder: ModelFolder,
    recipe: Recipe,
    execution: Execution,
    step: Callable[[Residency], StepPrediction],
    *,
    keeps_products: bool = True,
    keeps_states: bool = False,
) -> Residency:
    """What a plan would keep in the memory that the job leaves, of products and states as far as it may."""

    def device_bytes(kept: Residency) -> int:
        return plan_memory(folder, recipe, replace(execution, residency=kept)).device_total_bytes

    needed = device_bytes(NOTHING_STAYS)
    return choose_residency(
        lambda kept: step(kept).step_s,
        room_bytes=int(SPARE_USABLE * usable_device_bytes(gpu_named(GPU).memory_bytes)) - needed,
        num_layers=folder.shape.num_hidden_layers,
        weight_bytes=lambda kept: device_bytes(kept) - needed,
        layer_product_bytes=product_bytes(folder, recipe, execution) if keeps_products else 0,
        is_packed=any(unit.packed_bytes for unit in folder.layout.units),
        keeps_states=keeps_states,
        ends=possible_ends(folder.layout),
    )


def table() -> list[str]:
    """Useful TFLOP/s and seconds of a step, as lines of Markdown."""
    folder = model_7b()
    lines = [
        "| variant | " + " | ".join(f"{tokens // 1024}k tokens" for tokens in TOKENS) + " |",
        "| --- |" + " --- |" * len(TOKENS),
    ]
    for variant in VARIANTS.values():
        found = [forecast(variant, tokens, folder) for tokens in TOKENS]
        cells = [f"{one.model_flops_per_s / 1e12:.0f} ({one.step_s:.2f} s)" for one in found]
        lines.append(f"| {variant.title} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("\n".join(table()))


if __name__ == "__main__":
    main()

"""What stays on a device that has memory to spare: weights of some layers from step to step, and products of some
layers' forward.

A resident layer has a slot of its own, so its weights go up once after each update and not once for each pass. A
compiled layer whose products are kept takes them in backward, and computes only the cheap operations between them
again. Neither changes a bit.

Units: bytes, unless a name says elements. Torch-free.
Source: 10Cache (arXiv 2511.14124), Deep Optimizer States (arXiv 2410.21316): spare memory of a GPU, used by plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from horizon_server.planning.model_folder import ModelFolder, ModelShape
from horizon_server.recipe import Recipe
from horizon_server.records.execution import NOTHING_STAYS, Execution, Residency
from horizon_server.store.adapters import LORA_B
from horizon_server.store.layout import StoreLayout, UnitLayout

_FP32 = 4
# A saving below this is within the error of the prediction, and memory that stays free absorbs the error of the plan.
_LEAST_SAVED_SHARE = 0.005
_TRIED_PARTS = 4

SPARE_USABLE = 0.95
"""Share of the device's limit up to which something is kept: the plan may be off by some percent."""


def resident_units(layout: StoreLayout, num_layers: int) -> list[UnitLayout]:
    """The layers whose weights stay, evenly spread: while one of them computes, the next one that does not stay is on
    its way."""
    layers = [unit for unit in layout.units if unit.kind == "layer"]
    total = len(layers)
    return [unit for i, unit in enumerate(layers) if (i + 1) * num_layers // total > i * num_layers // total]


def product_bytes(folder: ModelFolder, recipe: Recipe, execution: Execution) -> int:
    """What the products that a compiled layer keeps take for all tokens of a step: projections, but for one that
    backward skips, and attention.

    With adapters, both products of each. 0 for layers whose products are not counted, experts and attention that is
    not ours, and for adapters with dropout, whose layers are not compiled.
    """
    layout, model = folder.layout, folder.shape
    if model.experts is not None or model.needs_masks or model.latent_size or recipe.adapter_dropout:
        return 0
    layers = [unit for unit in layout.units if unit.kind == "layer"]
    names = [tensor.name for tensor in layers[0].tensors]
    # GPT-2 stores its projections transposed.
    if not any("mlp.gate_" in name for name in names):
        return 0
    outputs = sum(tensor.shape[0] for tensor in layers[0].tensors if len(tensor.shape) == 2)
    if skips_projection(folder):
        # The map's own product, and that of its adapter.
        outputs -= model.hidden_size * (2 if _adapts_last(layers[0], model) else 1)
    attended = model.num_attention_heads * model.head_dim
    per_token = (outputs + attended) * execution.element_bytes + _FP32 * model.num_attention_heads
    return recipe.tokens_per_step * per_token


def _adapts_last(layer: UnitLayout, model: ModelShape) -> bool:
    """Whether the projection of `skips_projection` has an adapter."""
    weights = {tensor.name: tensor.num_elements for tensor in layer.tensors}
    last_form = (model.hidden_size, model.hidden_size * model.intermediate_size)
    return any(
        (tensor.shape[0], weights[tensor.adapts]) == last_form and "attn" not in tensor.name
        for tensor in layer.tensors
        if tensor.adapts and tensor.name.endswith(LORA_B)
    )


def skips_projection(folder: ModelFolder) -> bool:
    """Whether backward leaves out a layer's last projection, as `find_skipped_projection` finds by running one: its
    output is only added to the residual, unless a norm comes in between, or it has a magnitude (DoRA), whose gradient
    is made of it. Only a dense layer's."""
    model = folder.shape
    layer = next(unit for unit in folder.layout.units if unit.kind == "layer")
    names = [tensor.name for tensor in layer.tensors]
    has_norm = any("post_feedforward" in name or "post_mlp" in name for name in names)
    weights = {tensor.name: tensor.num_elements for tensor in layer.tensors}
    last_form = (model.hidden_size, model.hidden_size * model.intermediate_size)
    is_scaled = any(
        (tensor.num_elements, weights[tensor.adapts]) == last_form and "attn" not in tensor.name
        for tensor in layer.tensors
        if tensor.norm_dim is not None
    )
    return model.experts is None and not has_norm and not is_scaled


def choose_residency(
    step_s: Callable[[Residency], float],
    *,
    room_bytes: int,
    num_layers: int,
    resident_bytes: Callable[[int], int],
    layer_product_bytes: int,
) -> Residency:
    """What to keep in `room_bytes`, by the predicted seconds of a step. Weights or products that save too little are
    not kept.

    Products save most where compute is what takes long, weights where the link is: each share of the room is tried for
    weights, with the rest for products. `resident_bytes` is what the weights of a number of layers take.
    """

    def of(num_resident: int, num_products: int) -> Residency:
        return Residency(
            resident_layers=num_resident,
            resident_bytes=resident_bytes(num_resident),
            product_layers=num_products,
            product_bytes=num_products * layer_product_bytes,
        )

    def products_in(left_bytes: int) -> int:
        return min(num_layers, left_bytes // layer_product_bytes) if layer_product_bytes else 0

    step_s = cache(step_s)
    most = max((n for n in range(num_layers + 1) if resident_bytes(n) <= room_bytes), default=0)
    choices = [
        of(n, products_in(room_bytes - resident_bytes(n)))
        for n in sorted({most * part // _TRIED_PARTS for part in range(_TRIED_PARTS + 1)})
    ]
    best = min(choices, key=step_s)
    for less in (of(0, best.product_layers), of(best.resident_layers, 0), NOTHING_STAYS):
        if step_s(less) <= step_s(best) * (1 + _LEAST_SAVED_SHARE):
            best = less
    return replace(best, saved_share=max(0.0, 1 - step_s(best) / step_s(NOTHING_STAYS)))

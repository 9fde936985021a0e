"""What stays on a device that has memory to spare: weights of some layers from step to step, as they are computed with
or as they are packed; the optimizer states of some of these; weights of head and embedding; and products of some
layers' forward.

A resident layer has a slot of its own, so its weights go up once after each update and not once for each pass. A layer
whose packed weights stay is unpacked from there into the slot that it passes through: a quarter of the memory or less,
and its copy takes the time of the device's memory and not that of the link. A compiled layer whose products are kept
takes them in backward, and computes only the cheap operations between them again. A layer whose optimizer states stay
is updated by the device: its weights do not go up, its gradient does not come down, and the host's memory has nothing
to do with it. None of it changes a bit.

Units: bytes, unless a name says elements. Torch-free.
Source: 10Cache (arXiv 2511.14124), Deep Optimizer States (arXiv 2410.21316): spare memory of a GPU, used by plan.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

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


def _parts(least: int, most: int) -> list[int]:
    """Equally many numbers apart, from the least to the most."""
    return sorted({least + (most - least) * part // _TRIED_PARTS for part in range(_TRIED_PARTS + 1)})


def resident_units(layout: StoreLayout, num_layers: int) -> list[UnitLayout]:
    """The layers whose weights stay, evenly spread: while one of them computes, the next one that does not stay is on
    its way."""
    return _spread([unit for unit in layout.units if unit.kind == "layer"], num_layers)


def packed_units(layout: StoreLayout, residency: Residency) -> list[UnitLayout]:
    """The layers whose packed weights stay, evenly spread over those that are not resident as a whole."""
    resident = {unit.index for unit in resident_units(layout, residency.resident_layers)}
    others = [unit for unit in layout.units if unit.kind == "layer" and unit.index not in resident]
    assert residency.packed_layers <= len(others), "a resident layer needs no packed weights"
    return _spread(others, residency.packed_layers)


def state_units(layout: StoreLayout, residency: Residency) -> list[UnitLayout]:
    """The layers whose optimizer states stay, evenly spread over those whose weights do."""
    resident = resident_units(layout, residency.resident_layers)
    assert residency.state_layers <= len(resident), "the device updates the weights that it has"
    return _spread(resident, residency.state_layers)


def moving_units(layout: StoreLayout, execution: Execution) -> tuple[int, ...]:
    """Those with states on drives that each step reads there and writes: all but those whose states stay on the
    device."""
    kept = {unit.index for unit in state_units(layout, execution.residency)}
    return tuple(unit for unit in execution.drives.units if unit not in kept)


def _spread(units: Sequence[UnitLayout], number: int) -> list[UnitLayout]:
    total = len(units)
    return [unit for i, unit in enumerate(units) if (i + 1) * number // total > i * number // total]


def has_frozen_table(layout: StoreLayout) -> bool:
    """Whether the embedding is a table alone that nothing updates and that is not the head's too: then it may stay on
    the device by itself."""
    embedding = layout.units[0]
    return not layout.tied and len(embedding.tensors) == 1 and not embedding.trained_elements


def possible_ends(layout: StoreLayout) -> list[Residency]:
    """What may stay of head and embedding so that less crosses the link in a step, the less memory the earlier.

    An untied head that is trained goes up once in each step in any case, and rows of a table that is trained change.
    """
    head = layout.units[-1]
    if not layout.tied and head.trained_elements == head.num_elements:
        return []
    ends = [Residency(resident_head=True)]
    if has_frozen_table(layout):
        ends.append(Residency(resident_head=True, resident_table=True))
    return ends


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


@dataclass(frozen=True, kw_only=True)
class _Wish:
    """What to keep as far as there is room: this many whole layers, some of them with their states, the packed weights
    of all others, one of the choices of ends, and with all memory that is left, products."""

    num_resident: int
    num_states: int
    packs: bool
    end: Residency
    products: bool = True


def choose_residency(
    step_s: Callable[[Residency], float],
    *,
    room_bytes: int,
    num_layers: int,
    weight_bytes: Callable[[Residency], int],
    layer_product_bytes: int,
    is_packed: bool = False,
    keeps_states: bool = False,
    ends: Sequence[Residency] = (),
) -> Residency:
    """What to keep in `room_bytes`, by the predicted seconds of a step. What saves too little is not kept.

    Products save most where compute is what takes long, weights where the link is: each share of the room is tried for
    weights, with the rest for products. Where layers are packed (`is_packed`), the same is tried with the packed
    weights of all other layers, or of as many as there is room for; and all of that with each of `ends`. Where states
    may be kept (`keeps_states`), each of these is tried with the states of as many layers as there is room for, and
    of shares of them. `weight_bytes` is what the weights and states of a residency take.
    """
    step_s, weight_bytes = cache(step_s), cache(weight_bytes)

    def most(limit: int, weights_of: Callable[[int], Residency]) -> int:
        """The largest number up to a limit whose weights there is room for."""
        # Where no layer passes through the ring, it is not there, and all take less than all but one.
        if weight_bytes(weights_of(limit)) <= room_bytes:
            return limit
        return bisect_right(range(1, limit), room_bytes, key=lambda number: weight_bytes(weights_of(number)))

    @cache
    def kept(wish: _Wish) -> Residency:
        resident = replace(wish.end, resident_layers=wish.num_resident)
        with_states = replace(resident, state_layers=wish.num_states)
        num_packed = 0
        if wish.packs:
            num_packed = most(num_layers - wish.num_resident, lambda n: replace(with_states, packed_layers=n))
        weights = replace(with_states, packed_layers=num_packed)
        left_bytes, num_products = room_bytes - weight_bytes(weights), 0
        if wish.products and layer_product_bytes:
            num_products = min(num_layers, left_bytes // layer_product_bytes)
        return replace(
            weights,
            end_bytes=weight_bytes(wish.end),
            resident_bytes=weight_bytes(resident) - weight_bytes(wish.end),
            state_bytes=weight_bytes(with_states) - weight_bytes(resident),
            packed_bytes=weight_bytes(weights) - weight_bytes(with_states),
            product_layers=num_products,
            product_bytes=num_products * layer_product_bytes,
        )

    wishes: list[_Wish] = []
    for end in (NOTHING_STAYS, *(end for end in ends if weight_bytes(end) <= room_bytes)):
        for packs in (False, True)[: 1 + is_packed]:

            def whole(number: int, states: int = 0, end: Residency = end, packs: bool = packs) -> Residency:
                """The layers with states are among those that are whole."""
                number = max(number, states)
                packed = (num_layers - number) * packs
                return replace(end, resident_layers=number, state_layers=states, packed_layers=packed)

            most_states = most(num_layers, lambda number: whole(number, number)) if keeps_states else 0
            for states in _parts(0, most_states):
                fill = max(states, most(num_layers, partial(whole, states=states)))
                wishes += [
                    _Wish(num_resident=number, num_states=states, packs=packs, end=end)
                    for number in _parts(states, fill)
                ]
    best = min(wishes, key=lambda wish: step_s(kept(wish)))
    enough_s = step_s(kept(best)) * (1 + _LEAST_SAVED_SHARE)
    changes: list[dict[str, Any]] = [
        # First what takes most, and has to go home before a checkpoint.
        {"num_states": 0},
        # Packed weights that save as much take a quarter of the memory.
        {"num_resident": best.num_states, "packs": is_packed},
        {"num_resident": 0, "num_states": 0, "packs": is_packed},
        {"end": NOTHING_STAYS},
        {"products": False},
        {"packs": False},
    ]
    for change in changes:
        less = replace(best, **change)
        if step_s(kept(less)) <= enough_s:
            best = less
    found = kept(best)
    return replace(found, saved_share=max(0.0, 1 - step_s(found) / step_s(NOTHING_STAYS)))

"""Adapters of low rank in a layout: two small trained tensors in the unit of each weight that they adapt. Torch-free.

For a weight `X.weight` of a map from I to O numbers they are `X.lora_A.weight` [rank, I] and `X.lora_B.weight` [O, rank], the names and
orientation of PEFT.

Source: LoRA (arXiv 2106.09685).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from horizon_server.store.layout import DecayRule, Packing, StoreLayout, TensorLayout, decays, with_trained

LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
_WEIGHT = ".weight"


def adapter_names(base: str) -> tuple[str, str]:
    """The stored names of A and B of a weight's adapter."""
    name = base.removesuffix(_WEIGHT)
    return name + LORA_A, name + LORA_B


def with_adapters(
    layout: StoreLayout,
    maps: Mapping[str, tuple[int, int]],
    *,
    rank: int,
    decay: DecayRule,
    is_bfloat16: Callable[[str], bool],
    packing_of: Callable[[str], Packing] = lambda _: "none",
) -> StoreLayout:
    """The layout with an adapter for each of `maps`, names of weights with the (inputs, outputs) of their maps, and all else frozen.

    `is_bfloat16` tells which of the model's own tensors bfloat16 holds exactly, and `packing_of` how they are packed; `decay` says whether
    weight decay applies to adapters.

    Raises:
        ValueError: there are no maps.
    """
    units = []
    for unit in layout.units:
        tensors: list[TensorLayout] = []
        for tensor in unit.tensors:
            tensors.append(tensor)
            if (found := maps.get(tensor.name)) is not None:
                num_inputs, num_outputs = found
                shapes = (rank, num_inputs), (num_outputs, rank)
                tensors += [
                    TensorLayout(
                        name=name,
                        shape=shape,
                        # Both are given their places below.
                        offset=0,
                        num_elements=math.prod(shape),
                        decay=decays(name, shape, unit.kind, decay),
                        adapts=tensor.name,
                    )
                    for name, shape in zip(adapter_names(tensor.name), shapes, strict=True)
                ]
        units.append(replace(unit, tensors=tuple(tensors)))
    added = {tensor.name for unit in units for tensor in unit.tensors if tensor.adapts}
    return with_trained(
        replace(layout, units=tuple(units)), added.__contains__, is_bfloat16=is_bfloat16, packing_of=packing_of
    )


def adapter_elements(layout: StoreLayout, *, drops: bool) -> int:
    """What the adapters of a layer keep of one token for their backward, in the layer with the most, and the widest of their outputs.

    The low-rank products before and after scaling; where inputs are dropped, those and their masks too.
    """
    most = 0
    for unit in layout.units:
        found = [tensor for tensor in unit.tensors if tensor.name.endswith(LORA_A) and tensor.adapts]
        outputs = [tensor.shape[0] for tensor in unit.tensors if tensor.name.endswith(LORA_B) and tensor.adapts]
        kept = sum(2 * tensor.shape[0] + 2 * tensor.shape[1] * drops for tensor in found)
        most = max(most, kept + 2 * max(outputs, default=0))
    return most

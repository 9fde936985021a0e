"""Adapters of low rank in a layout: small trained tensors in the unit of each weight that they adapt. Torch-free.

For a weight `X.weight` of a map from I to O numbers they are `X.lora_A.weight` [rank, I] and `X.lora_B.weight` [O,
rank], with DoRA `X.lora_magnitude_vector` [O] too: the names and orientation of PEFT.

Sources: LoRA (arXiv 2106.09685), DoRA (arXiv 2402.09353).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from horizon_server.store.layout import DecayRule, Packing, StoreLayout, TensorLayout, decays, with_trained

LORA_A, LORA_B, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
_WEIGHT = ".weight"

TRANSPOSED = frozenset({"gpt2", "openai-gpt"})
"""Model types whose layers multiply with weights of shape [inputs, outputs], of class Conv1D (a test compares)."""

NORM_PIECE_ELEMENTS = 1 << 22
"""Of a weight, in fp32 at once while its norms are computed; a longer row is taken whole."""


def with_adapters(
    layout: StoreLayout,
    maps: Mapping[str, tuple[int, int]],
    *,
    rank: int,
    decay: DecayRule,
    is_bfloat16: Callable[[str], bool],
    packing_of: Callable[[str], Packing] = lambda _: "none",
    dora: bool = False,
    transposed: bool = False,
) -> StoreLayout:
    """The layout with an adapter for each of `maps`, names of weights with the (inputs, outputs) of their maps, and all
    else frozen.

    With `dora` each has magnitudes too; `transposed` says that weights are [inputs, outputs]. `is_bfloat16` tells which
    of the model's own tensors bfloat16 holds exactly, and `packing_of` how they are packed; `decay` says whether weight
    decay applies to adapters.

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
                shapes: dict[str, tuple[int, ...]] = {LORA_A: (rank, num_inputs), LORA_B: (num_outputs, rank)}
                if dora:
                    shapes[MAGNITUDE] = (num_outputs,)
                for end, shape in shapes.items():
                    name = tensor.name.removesuffix(_WEIGHT) + end
                    tensors.append(
                        TensorLayout(
                            name=name,
                            shape=shape,
                            # They are given their places below.
                            offset=0,
                            num_elements=math.prod(shape),
                            decay=decays(name, shape, unit.kind, decay),
                            adapts=tensor.name,
                            norm_dim=int(not transposed) if end == MAGNITUDE else None,
                        )
                    )
        units.append(replace(unit, tensors=tuple(tensors)))
    added = {tensor.name for unit in units for tensor in unit.tensors if tensor.adapts}
    return with_trained(
        replace(layout, units=tuple(units)), added.__contains__, is_bfloat16=is_bfloat16, packing_of=packing_of
    )


def adapter_elements(layout: StoreLayout, *, drops: bool) -> int:
    """What the adapters of a layer keep of one token for their backward, in the layer with the most, and the widest of
    their outputs.

    The low-rank products before and after scaling; where inputs are dropped, those and their masks too; with
    magnitudes, what they multiply: the outputs of map and adapter.
    """
    most = 0
    for unit in layout.units:
        found = [tensor for tensor in unit.tensors if tensor.name.endswith(LORA_A) and tensor.adapts]
        outputs = [tensor.shape[0] for tensor in unit.tensors if tensor.name.endswith(LORA_B) and tensor.adapts]
        scaled = [tensor.num_elements for tensor in unit.tensors if tensor.norm_dim is not None]
        kept = sum(2 * tensor.shape[0] + 2 * tensor.shape[1] * drops for tensor in found)
        kept += 2 * sum(scaled) + 2 * max(scaled, default=0)
        most = max(most, kept + 2 * max(outputs, default=0))
    return most


def norm_bytes(layout: StoreLayout) -> int:
    """What the norms of a layer's adapted weights take, in the layer with the most: each of them, and a piece of a
    weight in fp32."""
    num_norms, piece = 0, 0
    for unit in layout.units:
        magnitudes = [tensor for tensor in unit.tensors if tensor.norm_dim is not None]
        num_norms = max(num_norms, sum(tensor.num_elements for tensor in magnitudes))
        sizes = [layout.find(tensor.adapts)[1].num_elements for tensor in magnitudes]
        piece = max([piece, *(min(size, NORM_PIECE_ELEMENTS) for size in sizes)])
    return 4 * (num_norms + piece)


def first_norm_bytes(layout: StoreLayout) -> int:
    """What the first norms of a packed weight take in host memory while the model is loaded: the largest weight as a
    whole, in fp32."""
    adapted = [layout.find(tensor.adapts)[1] for _, tensor in layout.tensors() if tensor.norm_dim is not None]
    return 4 * max((weight.num_elements for weight in adapted if weight.packing != "none"), default=0)


def scaled_sizes(layout: StoreLayout) -> tuple[int, int]:
    """Of all adapted weights with magnitudes together: their elements, and their outputs."""
    magnitudes = [tensor for _, tensor in layout.tensors() if tensor.norm_dim is not None]
    weights = [layout.find(tensor.adapts)[1] for tensor in magnitudes]
    return sum(weight.num_elements for weight in weights), sum(tensor.num_elements for tensor in magnitudes)


def adapted_sizes(layout: StoreLayout) -> tuple[int, int]:
    """Of all adapted weights without magnitudes together: their outputs, and their inputs."""
    scaled = {tensor.adapts for _, tensor in layout.tensors() if tensor.norm_dim is not None}
    plain = [tensor for _, tensor in layout.tensors() if tensor.adapts and tensor.adapts not in scaled]
    outputs = sum(tensor.shape[0] for tensor in plain if tensor.name.endswith(LORA_B))
    return outputs, sum(tensor.shape[1] for tensor in plain if tensor.name.endswith(LORA_A))

"""Which weights of a model get adapters (`train.lora`), by names and shapes. Torch-free.

The weights of a linear map look like other matrices by their shapes. So what all-linear leaves out is known by name:
experts, which model classes keep in one tensor of three dimensions, routers, and a few matrices that are used in
another way. The worker tries every layer before it trains, and refuses by name what is not used as a linear map after
all.
"""

from __future__ import annotations

import re

from horizon_server.errors import InvalidSpec
from horizon_server.expressions import NOT, chosen_names
from horizon_server.planning.model_folder import ModelFolder
from horizon_server.spec import ALL_LINEAR, BaseFormat, LoraSpec, TrainSpec
from horizon_server.store.adapters import TRANSPOSED, with_adapters
from horizon_server.store.layout import Packing, StoreLayout, TensorLayout
from horizon_server.store.model_files import text_config
from horizon_server.store.pages import EXPERT_NAME

_FIELD = "train.lora.targets"
_TRAIN_EXPERTS = ", or train the experts themselves, without adapters (train.trainable: [experts])"

_NOT_LINEAR = re.compile(
    # Routers: a choice, not a map of what the layer computes.
    r"(?:^|\.)(?:gate|router|router\.(?:classifier|gate|layer|proj))\.weight$"
    # The time steps of a state space, whose weight Mamba's code multiplies with by itself.
    r"|(?:^|\.)dt_proj\.weight$"
)

_FEWEST_ROW_ELEMENTS = 16
# A row is packed at once (see store.model_load).
_MOST_ROW_ELEMENTS = 1 << 20


def with_lora(found: ModelFolder, layout: StoreLayout, train: TrainSpec) -> StoreLayout:
    """The layout of a job that trains adapters: those of `train.lora`, and the model frozen.

    Raises:
        InvalidSpec: an expression of the targets fits no tensor, or one that no adapter can be made for.
    """
    transposed = text_config(found.config).get("model_type") in TRANSPOSED
    maps = linear_maps(layout, train.lora, transposed=transposed)
    packed = packed_base(found, train.lora.base)
    return with_adapters(
        layout,
        maps,
        rank=train.lora.rank,
        decay=train.decay,
        is_bfloat16=found.is_bfloat16,
        packing_of=lambda name: packed.get(name, "none"),
        dora=train.lora.dora,
        transposed=transposed,
    )


def packed_base(found: ModelFolder, base: BaseFormat) -> dict[str, Packing]:
    """How `train.lora.base` keeps the weights of a model that are not kept as they are, by name."""
    if base == "source":
        return {}
    return {tensor.name: base for tensor in _matrices(found.layout) if _can_be_packed(found, tensor)}


def linear_maps(layout: StoreLayout, spec: LoraSpec, *, transposed: bool = False) -> dict[str, tuple[int, int]]:
    """The weights that have adapters by the spec, with the (inputs, outputs) of their maps; raises as `with_lora`.

    `transposed` says that weights are [inputs, outputs], not [outputs, inputs].
    """
    maps: dict[str, tuple[int, int]] = {}
    for tensor in _targets(layout, spec):
        num_outputs, num_inputs = reversed(tensor.shape) if transposed else tensor.shape
        maps[tensor.name] = (num_inputs, num_outputs)
    return maps


def left_out(layout: StoreLayout, spec: LoraSpec) -> str:
    """What all-linear makes no adapters for although it is most of a model: its experts, as a message; empty where
    there are none."""
    if spec.targets != ALL_LINEAR:
        return ""
    experts = [tensor for tensor in _matrices(layout) if EXPERT_NAME.search(tensor.name)]
    if not experts:
        return ""
    share = sum(tensor.num_elements for tensor in experts) / layout.num_parameters
    return (
        f"train.lora.targets is all-linear, which leaves out the experts ({experts[0].name} and {len(experts) - 1} "
        f"more tensors, {share:.0%} of the parameters): they stay as they are; train.trainable: [experts] trains them, "
        "without adapters"
    )


def _targets(layout: StoreLayout, spec: LoraSpec) -> list[TensorLayout]:
    matrices = {tensor.name: tensor for tensor in _matrices(layout)}
    if spec.targets == ALL_LINEAR:
        targets = [
            t
            for t in matrices.values()
            if _is_weight(t) and not EXPERT_NAME.search(t.name) and not _NOT_LINEAR.search(t.name)
        ]
        if not targets:
            raise InvalidSpec.of(
                _FIELD, f"{_FIELD}: all-linear finds no linear map in this model; name the weights in {_FIELD}"
            )
        return targets
    left = chosen_names(_FIELD, spec.targets, list(matrices), to="adapt")
    # In the layout's order, so that the message names the same tensor every time.
    chosen = [name for name in matrices if name in left]
    for name in chosen:
        if not _is_weight(matrices[name]):
            raise InvalidSpec.of(
                _FIELD,
                f"{_FIELD}: {name} has shape {list(matrices[name].shape)} and is not the weight of a linear map, so it "
                f"gets no adapter; take it out with an expression after a {NOT}, such as {NOT}{name.split('.')[-2]}"
                + (_TRAIN_EXPERTS if EXPERT_NAME.search(name) else ""),
            )
    return [matrices[name] for name in chosen]


def _can_be_packed(found: ModelFolder, tensor: TensorLayout) -> bool:
    """Whether `base: int8` and `nf4` keep a matrix in fewer bits: experts and all that all-linear adapts."""
    if _NOT_LINEAR.search(tensor.name) or any(re.search(kept, tensor.name) for kept in found.shape.kept_in_fp32):
        return False
    # Kernels of convolutions have a few elements in a row: a scale for each would take as much as they do.
    return _MOST_ROW_ELEMENTS >= tensor.shape[-1] >= _FEWEST_ROW_ELEMENTS


def _matrices(layout: StoreLayout) -> list[TensorLayout]:
    """What of the layers has two dimensions or more."""
    layers = [unit for unit in layout.units if unit.kind == "layer"]
    return [tensor for unit in layers for tensor in unit.tensors if len(tensor.shape) > 1]


def _is_weight(tensor: TensorLayout) -> bool:
    return len(tensor.shape) == 2 and tensor.name.endswith(".weight")

"""Adapters of low rank on the linear maps of a layer, whatever its code looks like.

`LinearMaps` computes them. It knows a weight by identity, so every use of it that is not a linear map would miss the
adapter: `check_uses` runs a layer and refuses the weight by name.

Thread: a mode belongs to the thread that enters it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from horizon_server.engine.binding import Place, Strided
from horizon_server.engine.layer_stubs import NUM_TRIAL_TOKENS, RUN_ERRORS, LayerCall
from horizon_server.engine.linear import TRANSPOSE, Adapter, Transposes, map_of
from horizon_server.errors import InvalidModel
from horizon_server.store.adapters import LORA_A, LORA_B, MAGNITUDE
from horizon_server.store.layout import StoreLayout

_WEIGHT = ".weight"
_ENDS = (LORA_A, LORA_B, MAGNITUDE)
_NORMS = ".lora_norms"


@dataclass(frozen=True, kw_only=True)
class AdapterNames:
    """The parameters of one adapted map, by their names in the layer. `magnitude` and `norms` are empty in plain LoRA;
    the norms, along `norm_dim` of the weight, are no parameter: they are computed of the others.
    """

    weight: str
    a: str
    b: str
    magnitude: str = ""
    norms: str = ""
    norm_dim: int = 1


def adapter_places(layout: StoreLayout, bound: Sequence[Place]) -> list[Place]:
    """The places of all adapters, each named after its weight's; `bound` are those of the model itself.

    Raises:
        InvalidModel: the model computes with an adapted weight as a part of another parameter, or in another form.
    """
    by_stored_name: dict[str, list[Place]] = {}
    for place in bound:
        for name in place.stored_names:
            by_stored_name.setdefault(name, []).append(place)
    places = []
    for unit, tensor in layout.tensors():
        if not tensor.adapts:
            continue
        base = layout.find(tensor.adapts)[1]
        found = by_stored_name[tensor.adapts]
        place, is_shared = found[0], len(found) > 1
        if is_shared or place.piece != Strided.contiguous(base.offset, base.shape) or not place.name.endswith(_WEIGHT):
            what = f"as {place.name} of shape {list(place.piece.shape)}, which is not one tensor of its own"
            raise _refused(tensor.adapts, f"the model computes with it {what}")
        end = next(end for end in _ENDS if tensor.name.endswith(end))
        places.append(
            Place(
                name=place.name.removesuffix(_WEIGHT) + end,
                unit_index=unit.index,
                piece=Strided.contiguous(tensor.offset, tensor.shape),
                stored_names=(tensor.name,),
                is_parameter=True,
                has_gradient=tensor.trained,
                adapts=tensor.adapts,
            )
        )
    return places


def adapters_among(places: Sequence[Place], layout: StoreLayout) -> list[AdapterNames]:
    """The adapters among the parameters of a unit."""
    found = []
    for place in places:
        if not place.adapts or not place.name.endswith(LORA_A):
            continue
        base = place.name.removesuffix(LORA_A)
        magnitude = next((other for other in places if other.name == base + MAGNITUDE), None)
        norm_dim = None if magnitude is None else layout.find(magnitude.stored_names[0])[1].norm_dim
        names = AdapterNames(weight=base + _WEIGHT, a=place.name, b=base + LORA_B)
        if magnitude is not None and norm_dim is not None:
            names = replace(names, magnitude=magnitude.name, norms=base + _NORMS, norm_dim=norm_dim)
        found.append(names)
    return found


def take_adapters(
    names: Sequence[AdapterNames], parameters: dict[str, Tensor], *, scale: float, dropout: float
) -> list[tuple[Tensor, Adapter]]:
    """The adapters of a layer, each beside its weight; their parameters are taken out of the layer's."""
    return [
        (
            parameters[found.weight],
            Adapter(
                a=parameters.pop(found.a),
                b=parameters.pop(found.b),
                magnitude=parameters.pop(found.magnitude, None),
                norms=parameters.pop(found.norms, None),
                scale=scale,
                dropout=dropout,
            ),
        )
        for found in names
    ]


class _WatchedUses(TorchFunctionMode):
    """Notes which of some weights are used as linear maps, and which in any other way."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = {id(weight): name for name, weight in weights.items()}
        self._transposes = Transposes()
        self.mapped: set[str] = set()
        self.others: dict[str, str] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func == TRANSPOSE and id(args[0]) in self._names:
            return self._transposes.made_of(args[0])
        output = func(*args, **kwargs)
        weight = used[1] if (used := map_of(func, args, kwargs, self._transposes)) is not None else None
        if (name := self._names.get(id(weight))) is not None:
            self.mapped.add(name)
        for given in _tensors((*args, *kwargs.values())):
            value = self._transposes.weight_of(given)
            # Asking for its dtype or its size is no use, and neither is a conversion to what it is.
            is_use = value is not weight and output is not value and any(True for _ in _tensors((output,)))
            if is_use and (name := self._names.get(id(value))) is not None:
                self.others.setdefault(name, str(getattr(func, "__name__", "")).strip("_"))
        return output


def check_uses(
    layer: nn.Module,
    places: Sequence[Place],
    adapted: Collection[str],
    call: LayerCall,
    *,
    hidden_size: int,
    dtype: torch.dtype,
) -> None:
    """Run a layer without its adapters, and refuse the `adapted` weights that it does not use as linear maps alone.

    Raises:
        InvalidModel: a weight has another use, or none; it is named.
    """
    own = [place for place in places if not place.adapts]
    stored_names = {place.name: place.stored_names[0] for place in own if place.name in adapted}

    def run(parameters: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _WatchedUses:
        watched = _WatchedUses({name: parameters[name] for name in stored_names})
        # On a copy: some layers move what they hold to where they find the hidden state.
        trial = copy.deepcopy(layer)
        for module in trial.modules():
            config: Any = getattr(module, "config", None)
            if hasattr(config, "_experts_implementation"):
                # Grouped products want weights with storage; the loop over experts does not.
                config._experts_implementation = "eager"
        with torch.no_grad(), watched:
            functional_call(trial, dict(parameters), args, kwargs)
        return watched

    empty = {p.name: torch.empty(p.piece.shape, dtype=p.dtype_in(dtype), device="meta") for p in own}
    try:
        watched = run(empty, *call.without_storage(hidden_size=hidden_size, dtype=dtype))
    except RUN_ERRORS:
        # Experts are chosen by values. One element that is seen in every shape takes no memory.
        zeros = {name: torch.zeros((), dtype=tensor.dtype).expand(tensor.shape) for name, tensor in empty.items()}
        watched = run(zeros, *call.with_hidden(torch.zeros(1, NUM_TRIAL_TOKENS, hidden_size, dtype=dtype)))
    for name, how in watched.others.items():
        # A user does not know the names that Python has for reading an attribute.
        what = f"gives it to {how}, which" if how not in ("", "get") else "uses it in a way that"
        raise _refused(stored_names[name], f"the model's code {what} is not a linear map")
    for name, stored_name in stored_names.items():
        # An expert that no token of the trial visits is used as its class says.
        is_linear = isinstance(layer.get_submodule(name.removesuffix(_WEIGHT)), nn.Linear)
        if name not in watched.mapped and not is_linear:
            raise _refused(stored_name, "the model's code does not use it as a linear map")


def _refused(name: str, why: str) -> InvalidModel:
    last = name.removesuffix(_WEIGHT).rpartition(".")[2]
    return InvalidModel(
        f"{name} cannot have an adapter: {why}; name the weights to adapt in train.lora.targets, without it (such as "
        f"!{last})"
        + (
            ", or train the experts themselves, without adapters (train.trainable: [experts])"
            if "experts" in name
            else ""
        )
    )


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)

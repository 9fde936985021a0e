"""The compiled layers of a running template: which calls they serve, and how they are called.

Shapes: T = tokens of a micro-batch, D = hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from horizon_server.engine.binding import Place
from horizon_server.engine.compiled.call_pattern import CallPattern, NotCompilable
from horizon_server.engine.compiled.library import CodeLibrary, Entry, Target, layer_key, products_key
from horizon_server.engine.compiled.package import LayerCode
from horizon_server.engine.fp8 import Fp8Weight, columns_of, rows_of
from horizon_server.engine.layer_stubs import LayerCall
from horizon_server.engine.template import Template
from horizon_server.engine.unit_gradients import UnitGradients

# Two rows that differ in their tokens and in their documents; the sizes are no layer's.
_PROBES = ((17, 20), (11, 13, 19))


def call_patterns(template: Template, dtype: torch.dtype) -> dict[int, CallPattern | NotCompilable]:
    """The pattern of every kind of layer (`Template.layer_kinds`), or why it has none."""
    one, other = (template.probe_calls(lengths, dtype) for lengths in _PROBES)
    found: dict[int, CallPattern | NotCompilable] = {}
    for kind in sorted(set(template.layer_kinds)):
        try:
            if template.draws_random_numbers:
                raise NotCompilable(
                    "its config or its adapters ask for dropout, whose random numbers a compiled layer would draw "
                    "differently"
                )
            found[kind] = CallPattern.through(one[kind], other[kind])
        except NotCompilable as error:
            found[kind] = error
    return found


def keeping_kinds(template: Template, product_layers: int) -> set[int]:
    """The kinds of the last layers, which keep their products."""
    return set(template.layer_kinds[template.num_layers - product_layers :])


def is_complete(template: Template, library: CodeLibrary, target: Target, *, product_layers: int = 0) -> bool:
    """Whether the library knows all `known_keys`."""
    return known_keys(template, library, target, product_layers=product_layers) is not None


def known_keys(
    template: Template, library: CodeLibrary, target: Target, *, product_layers: int = 0
) -> list[str] | None:
    """The keys of every kind of layer that can be compiled, and of the pair that keeps products of each that is among
    the last `product_layers`; None where the library does not know one."""
    keeping, keys = keeping_kinds(template, product_layers), list[str]()
    for kind, pattern in call_patterns(template, target.dtype).items():
        if isinstance(pattern, NotCompilable):
            continue
        keys.append(layer_key(template, kind, target))
        entry = library.find(keys[-1])
        if entry is None:
            return None
        if kind in keeping and not entry.refusal:
            keys.append(products_key(keys[-1]))
            if library.find(keys[-1]) is None:
                return None
    return keys


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Forward and backward, and what is known of them."""

    code: LayerCode
    entry: Entry

    def takes(self, num_tokens: int) -> bool:
        """Whether it is right for that many tokens."""
        return self.entry.min_tokens <= num_tokens <= self.entry.max_tokens


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The code of a kind of layer. `keeping` is the pair that keeps products, where there is one."""

    key: str
    pattern: CallPattern
    pair: Pair
    keeping: Pair | None


@dataclass(frozen=True, kw_only=True)
class CompiledCall:
    """One layer's work on one micro-batch. Thread: compute's."""

    kind: Kind
    tensors: list[Tensor]
    places: list[Place]
    norms: list[str]

    def forward(
        self,
        parameters: Mapping[str, Tensor],
        hidden_1TD: Tensor,
        casts: Mapping[str, Fp8Weight],
        *,
        keeps: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:
        """The layer's output, [1, T, D], and the products that `backward` may take; none where the layer has no code
        that `keeps` them. Both compute the same. `casts` are those of its `Fp8Visit`."""
        keeping = self.kind.keeping
        pair = keeping if keeps and keeping is not None and keeping.takes(hidden_1TD.shape[1]) else self.kind.pair
        with torch.no_grad():
            output_1TD, *products = pair.code.forward([*self._read(parameters, casts), hidden_1TD, *self.tensors])
        return output_1TD, products

    def backward(
        self,
        parameters: Mapping[str, Tensor],
        hidden_1TD: Tensor,
        gradient_1TD: Tensor,
        gradients: UnitGradients | None,
        casts: Mapping[str, Fp8Weight],
        products: list[Tensor] | None = None,
    ) -> Tensor:
        """The gradient of the layer's input, [1, T, D]; those of its trained parameters are added to `gradients`, if it
        has any. `products` of `forward` are not computed again; the list is emptied, so that each is free after its
        last use."""
        pair = self.kind.pair
        if products:
            assert self.kind.keeping is not None, "forward kept them"
            pair = self.kind.keeping
        accumulators = {} if gradients is None else gradients.accumulators
        targets = [(found.out, found.first) for found in accumulators.values()]
        with torch.no_grad():
            inputs = [*self._read(parameters, casts), hidden_1TD, *self.tensors, *columns_of(casts), gradient_1TD]
            inputs += [*(part for target in targets for part in target), *(products or ())]
            if products:
                products.clear()
            hidden_gradient_1TD, *others = pair.code.backward(inputs)
            returned = dict(zip(pair.entry.returned, others, strict=True))
            for place in self.places:
                if gradients is not None and place.name in returned:
                    gradients.add(place, returned[place.name])
        return hidden_gradient_1TD

    def _read(self, parameters: Mapping[str, Tensor], casts: Mapping[str, Fp8Weight]) -> list[Tensor]:
        found = [parameters[name] for name in (*(place.name for place in self.places), *self.norms)]
        return found + rows_of(casts)


class CompiledLayers:
    """The kinds of layers of a template that run compiled; empty: all run eagerly."""

    def __init__(
        self, template: Template, kinds: Mapping[int, Kind] = MappingProxyType({}), *, product_layers: int = 0
    ) -> None:
        """`kinds` by their number (`Template.layer_kinds`); the last `product_layers` are to keep their products."""
        self._template, self._kinds = template, kinds
        self._layers = {layer: kinds[kind] for layer, kind in enumerate(template.layer_kinds) if kind in kinds}
        self.refusals: list[str] = []
        """Why the layers of some kinds run eagerly."""
        self.refusals_to_keep: list[str] = []
        """Why the compiled layers of some kinds keep no products."""
        last = [self._layers.get(layer) for layer in range(template.num_layers - product_layers, template.num_layers)]
        self.num_keeping = sum(kind is not None and kind.keeping is not None for kind in last)
        """How many layers keep their products."""

    @classmethod
    def load(
        cls,
        template: Template,
        library: CodeLibrary,
        target: Target,
        *,
        only_faster: bool = False,
        keys: Sequence[str] | None = None,
        product_layers: int = 0,
    ) -> CompiledLayers:
        """Take what the library has; with `only_faster`, of that what the trial found faster than the eager layers;
        with `keys`, those. The last `product_layers` are to keep their products."""
        kinds, keeping, refusals, refusals_to_keep = dict[int, Kind](), keeping_kinds(template, product_layers), [], []
        for kind, pattern in call_patterns(template, target.dtype).items():
            try:
                kinds[kind] = _load(template, kind, pattern, library, target, only_faster=only_faster, keys=keys)
            except NotCompilable as error:
                refusals.append(str(error))
                continue
            if kind in keeping:
                try:
                    pair = _load_pair(
                        library, products_key(kinds[kind].key), only_faster=only_faster, other="one that keeps none"
                    )
                    kinds[kind] = replace(kinds[kind], keeping=pair)
                except NotCompilable as error:
                    refusals_to_keep.append(str(error))
        layers = cls(template, kinds, product_layers=product_layers)
        layers.refusals, layers.refusals_to_keep = refusals, refusals_to_keep
        return layers

    @property
    def keys(self) -> list[str]:
        """The keys of the code in use, which a checkpoint records."""
        return sorted(kind.key for kind in self._kinds.values())

    @property
    def num_layers(self) -> int:
        """How many layers run compiled."""
        return len(self._layers)

    def serve(self, layer: int, call: LayerCall, num_tokens: int) -> CompiledCall | None:
        """The compiled form of a call, or None where the eager layer has to run."""
        kind = self._layers.get(layer)
        if kind is None or not kind.pair.takes(num_tokens):
            return None
        tensors = kind.pattern.tensors_of(call)
        if tensors is None:
            return None
        places, norms = self._template.places[layer + 1], list(self._template.norm_sizes(layer))
        return CompiledCall(kind=kind, tensors=tensors, places=places, norms=norms)


def _load(
    template: Template,
    kind: int,
    pattern: CallPattern | NotCompilable,
    library: CodeLibrary,
    target: Target,
    *,
    only_faster: bool,
    keys: Sequence[str] | None,
) -> Kind:
    if isinstance(pattern, NotCompilable):
        raise pattern
    key = layer_key(template, kind, target)
    if keys is not None and key not in keys:
        raise NotCompilable("the job began with eager layers of this kind")
    pair = _load_pair(library, key, only_faster=only_faster, other="eager one")
    return Kind(key=key, pattern=pattern, pair=pair, keeping=None)


def _load_pair(library: CodeLibrary, key: str, *, only_faster: bool, other: str) -> Pair:
    """The code of a key. Raises NotCompilable where there is none, or it is not faster than the `other`."""
    entry = library.find(key)
    if entry is None or entry.refusal:
        raise NotCompilable(entry.refusal if entry else "there is no compiled code of it")
    if only_faster and entry.speedup <= 1:
        raise NotCompilable(f"the compiled layer is not faster than the {other} ({entry.speedup:.2f} times as fast)")
    return Pair(code=LayerCode(library.code(key)), entry=entry)

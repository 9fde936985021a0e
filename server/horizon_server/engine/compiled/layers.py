"""The compiled layers of a running template: which calls they serve, and how they are called.

Shapes: T = tokens of a micro-batch, D = hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from horizon_server.engine.binding import Place
from horizon_server.engine.compiled.call_pattern import CallPattern, NotCompilable
from horizon_server.engine.compiled.library import CodeLibrary, Entry, Target, layer_key
from horizon_server.engine.compiled.package import LayerCode
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


def is_complete(template: Template, library: CodeLibrary, target: Target) -> bool:
    """Whether the library knows every kind of layer that can be compiled."""
    return known_keys(template, library, target) is not None


def known_keys(template: Template, library: CodeLibrary, target: Target) -> list[str] | None:
    """The keys of every kind of layer that can be compiled; None where the library does not know one."""
    patterns = call_patterns(template, target.dtype)
    kinds = [kind for kind, pattern in patterns.items() if not isinstance(pattern, NotCompilable)]
    keys = [layer_key(template, kind, target) for kind in kinds]
    return keys if all(library.find(key) is not None for key in keys) else None


@dataclass(frozen=True, kw_only=True)
class _Kind:
    key: str
    pattern: CallPattern
    code: LayerCode
    entry: Entry


@dataclass(frozen=True, kw_only=True)
class CompiledCall:
    """One layer's work on one micro-batch. Thread: compute's."""

    kind: _Kind
    tensors: list[Tensor]
    places: list[Place]
    norms: list[str]

    def forward(self, parameters: Mapping[str, Tensor], hidden_1TD: Tensor) -> Tensor:
        """The layer's output. Shapes: [1, T, D]."""
        with torch.no_grad():
            return self.kind.code.forward([*self._read(parameters), hidden_1TD, *self.tensors])

    def backward(
        self,
        parameters: Mapping[str, Tensor],
        hidden_1TD: Tensor,
        gradient_1TD: Tensor,
        gradients: UnitGradients | None,
    ) -> Tensor:
        """The gradient of the layer's input, [1, T, D]; those of its trained parameters are added to `gradients`, if it
        has any."""
        accumulators = {} if gradients is None else gradients.accumulators
        targets = [(found.out, found.first) for found in accumulators.values()]
        with torch.no_grad():
            inputs = [*self._read(parameters), hidden_1TD, *self.tensors, gradient_1TD]
            hidden_gradient_1TD, *others = self.kind.code.backward(
                [*inputs, *(part for pair in targets for part in pair)]
            )
            returned = dict(zip(self.kind.entry.returned, others, strict=True))
            for place in self.places:
                if gradients is not None and place.name in returned:
                    gradients.add(place, returned[place.name])
        return hidden_gradient_1TD

    def _read(self, parameters: Mapping[str, Tensor]) -> list[Tensor]:
        return [parameters[name] for name in (*(place.name for place in self.places), *self.norms)]


class CompiledLayers:
    """The kinds of layers of a template that run compiled; empty: all run eagerly."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._kinds: dict[int, _Kind] = {}
        self._layers: dict[int, _Kind] = {}
        self.refusals: list[str] = []
        """Why the layers of some kinds run eagerly."""

    @classmethod
    def load(
        cls,
        template: Template,
        library: CodeLibrary,
        target: Target,
        *,
        only_faster: bool = False,
        keys: Sequence[str] | None = None,
    ) -> CompiledLayers:
        """Take what the library has; with `only_faster`, of that what the trial found faster than the eager layers;
        with `keys`, those."""
        layers = cls(template)
        for kind, pattern in call_patterns(template, target.dtype).items():
            try:
                layers._kinds[kind] = _load(
                    template, kind, pattern, library, target, only_faster=only_faster, keys=keys
                )
            except NotCompilable as error:
                layers.refusals.append(str(error))
        for layer, kind in enumerate(template.layer_kinds):
            if kind in layers._kinds:
                layers._layers[layer] = layers._kinds[kind]
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
        if kind is None or not kind.entry.min_tokens <= num_tokens <= kind.entry.max_tokens:
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
) -> _Kind:
    if isinstance(pattern, NotCompilable):
        raise pattern
    key = layer_key(template, kind, target)
    if keys is not None and key not in keys:
        raise NotCompilable("the job began with eager layers of this kind")
    entry = library.find(key)
    if entry is None or entry.refusal:
        raise NotCompilable(entry.refusal if entry else "there is no compiled code of it")
    if only_faster and entry.speedup <= 1:
        raise NotCompilable(f"the compiled layer is not faster than the eager one ({entry.speedup:.2f} times as fast)")
    return _Kind(key=key, pattern=pattern, code=LayerCode(library.code(key)), entry=entry)

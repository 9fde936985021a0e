"""For which models attention without masks computes what the model means: found by trial, never by a list of names.

The model makes masks as it always does, but under the name of an implementation whose masks are marks that remember how
they were asked for. A layer run on tensors without storage then shows which mark reaches its attention, and with which
arguments. The model is served where three things hold for every layer: the mask lets each query see what our function
lets it see, on every pair of a short packed row and at the borders of windows far out; the function computes the
numbers of the model's own one on random tensors; and nothing else touches a mark. Everything else keeps the
implementation that transformers chose.

Shapes: T = tokens of a trial, E = size of a head.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel

from horizon_server.engine.attention.chunked import ChunkedRow, KeySizes
from horizon_server.engine.attention.function import NAME, horizon_attention
from horizon_server.engine.attention.kept import KeptRow
from horizon_server.engine.layer_stubs import RUN_ERRORS, LayerCall

Slot = int | str
"""Where a layer gets its mask: the place of a positional argument, or the name of another."""

CallsOf = Callable[[Tensor], list[LayerCall]]
"""Computes the calls of all layers for a row of these positions."""

_TRIAL = f"{NAME}_trial"
# Longer than the windows of small models, so that their borders are inside; windows of real ones are looked at far out.
_DOCUMENTS = (13, 2, 9)
_FAR = (0, 1, 2, 100, 1000, 4095, 4096, 8191, 8192, 100_003, (1 << 20) - 1, (1 << 22) - 1)
_TOLERANCE = 1e-5


class _NotServed(Exception):
    """The model's attention is not what our function computes; the message says why."""


@dataclass(frozen=True, kw_only=True)
class OwnAttention:
    """The layers of a model are served: `slots` of each take the boundaries of the row's documents in the place of a
    mask. `keys` are the sizes of the keys of each attention call of a layer."""

    slots: tuple[frozenset[Slot], ...]
    keys: tuple[tuple[KeySizes, ...], ...]

    def with_boundaries(self, calls: Sequence[LayerCall], boundaries: Tensor) -> list[LayerCall]:
        """The calls of a row with its boundaries."""
        return [_filled(call, slots, boundaries) for call, slots in zip(calls, self.slots, strict=True)]

    @property
    def is_everywhere(self) -> bool:
        """Whether every layer attends, so that none keeps anything else of a sequence."""
        return all(self.slots)

    def with_kept(self, layer: int, call: LayerCall, kept: KeptRow | ChunkedRow) -> LayerCall:
        """A layer's call with what is kept of the row's sequences, or of its earlier chunks."""
        return _filled(call, self.slots[layer], kept)


def find_own_attention(
    model: PreTrainedModel, layers: Sequence[nn.Module], groups: Sequence[int], calls_of: CallsOf, *, hidden_size: int
) -> OwnAttention | str:
    """Whether all layers can use our attention, or why not. If so, the model is switched to it, and calls come without
    masks from now on.

    `layers` are those of the model, `groups` the first equal one of each. The model must be in training mode, so that
    dropout shows.
    """
    configs = _configs(model, layers)
    before = [config._attn_implementation for config in configs]
    usual = model.config.get_text_config()._attn_implementation
    try:
        _choose(configs, _TRIAL)
        packed_T = torch.cat([torch.arange(length) for length in _DOCUMENTS])
        packed, alone = calls_of(packed_T), calls_of(torch.arange(sum(_DOCUMENTS)))
        tried: dict[object, _Found] = {}
        found_in = []
        for group, packed_call, alone_call in zip(groups, packed, alone, strict=True):
            marks = _marks(packed_call)
            # Equal layers can be given different masks, and the same mask is given to many layers.
            key = (group, tuple((slot, id(mark)) for slot, mark in marks.items()))
            if key not in tried:
                trial = _LayerTrial(packed=marks, alone=_marks(alone_call), usual=str(usual))
                tried[key] = trial.run(layers[group], packed_call, hidden_size=hidden_size)
            found_in.append(tried[key])
        slots = tuple(found.slots for found in found_in)
        if not any(slots):
            raise _NotServed("no layer uses attention that can be replaced")
        _choose(configs, NAME)
        for call, of_layer in zip(calls_of(packed_T), slots, strict=True):
            if any(_argument(call, slot) is not None for slot in of_layer):
                raise _NotServed("a mask is made even where none is asked for")
    except (_NotServed, *RUN_ERRORS) as error:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name
        if isinstance(error, _NotServed):
            return str(error)
        first_line = (str(error).strip().splitlines() or ["no message"])[0]
        return f"it does not run with marks in the place of masks ({type(error).__name__}: {first_line[:200]})"
    return OwnAttention(slots=slots, keys=tuple(found.keys for found in found_in))


class _Mark(Tensor):
    """Takes the place of a mask. It can be passed on; anything else that is done with it ends the trial."""

    sees: Callable[[Tensor, Tensor], Tensor]

    @classmethod
    def __torch_function__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> Any:
        raise _NotServed("something else than attention uses a mask")


def _mark(*, mask_function: Callable[..., Tensor], attention_mask: Tensor | None = None, **_: Any) -> _Mark:
    """The mask function registered for trials."""
    if attention_mask is not None and not attention_mask.all():
        raise _NotServed("the model makes a mask of padding")
    mark = torch.empty(0).as_subclass(_Mark)
    zero = torch.zeros((), dtype=torch.int64)
    mark.sees = lambda query, key: mask_function(zero, zero, query, key)
    return mark


@dataclass(frozen=True, kw_only=True)
class _Found:
    """Of a layer: the slots that take the boundaries, none where it uses no attention, and the keys of each call."""

    slots: frozenset[Slot]
    keys: tuple[KeySizes, ...]


@dataclass(frozen=True, kw_only=True)
class _LayerTrial:
    """The run of one layer: `packed` and `alone` are the marks that it is given in a packed row, and for a single
    document."""

    packed: Mapping[Slot, _Mark]
    alone: Mapping[Slot, _Mark]
    usual: str

    def run(self, layer: nn.Module, call: LayerCall, *, hidden_size: int) -> _Found:
        """What the layer uses of attention.

        Raises:
            _NotServed: the layer's attention is another one.
        """
        # On a copy: some layers move what they hold to where they find the hidden state. Its tables go there at once.
        layer = copy.deepcopy(layer).to("meta")
        hidden_1TD = torch.empty(1, sum(_DOCUMENTS), hidden_size, device="meta")
        used: set[Slot] = set()
        keys: list[KeySizes] = []
        real: dict[int, Tensor] = {}

        def without_storage(tensor: Tensor) -> Tensor:
            if type(tensor) is _Mark:
                return tensor
            meta = tensor.to("meta")
            real[id(meta)] = tensor
            return meta

        args, kwargs = tree_map_only(Tensor, without_storage, (call.args, dict(call.kwargs)))
        args, kwargs = replace(call, args=args, kwargs=kwargs).with_hidden(hidden_1TD)
        unseen = {module for module in layer.modules() if _calls_attention(module)}

        def attention(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **options: Any
        ) -> Any:
            unseen.discard(module)
            slot = next((slot for slot, mark in self.packed.items() if mark is attention_mask), None)
            if slot is None:
                raise _NotServed("attention gets no mask, or one that the layer made")
            # What the model computed for the layer (positions) is passed on to attention too.
            options = tree_map_only(Tensor, lambda tensor: real.get(id(tensor), tensor), options)
            self._compare(module, query, key, value, slot, options)
            used.add(slot)
            sizes = {"heads": key.shape[1], "key": key.shape[-1], "value": value.shape[-1]}
            keys.append(KeySizes(**sizes, query_heads=query.shape[1]))
            return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1]), None

        with _registered(attention):
            try:
                with torch.no_grad():
                    layer(*args, **kwargs)
            except RUN_ERRORS:
                # Without storage, some layers run only so far (experts are chosen by values): far enough, if attention
                # was before that.
                if unseen or (self.packed and not used):
                    raise
        return _Found(slots=frozenset(used), keys=tuple(keys))

    def _compare(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, slot: Slot, options: dict[str, Any]
    ) -> None:
        """Compare masks and numbers of one attention call."""
        num_tokens = sum(_DOCUMENTS)
        if options.get("dropout"):
            raise _NotServed("attention has dropout")
        shapes = [tensor.shape for tensor in (query, key, value)]
        if any(len(s) != 4 or s[0] != 1 or s[2] != num_tokens for s in shapes) or shapes[1][1] != shapes[2][1]:
            raise _NotServed("queries, keys and values are not those of one row")
        window = options.get("sliding_window")
        places_T = torch.arange(num_tokens)
        document_T = torch.arange(len(_DOCUMENTS)).repeat_interleave(torch.tensor(_DOCUMENTS))
        queries, keys = places_T[:, None], places_T[None]
        causal_TT = _causal(queries, keys, window)
        seen_TT = causal_TT & (document_T[:, None] == document_T)
        found_TT = self.packed[slot].sees(queries, keys)
        # Some models do not look for documents when they make their mask. Ours keeps them apart for them.
        if not _equal(found_TT, seen_TT) and not _equal(found_TT, causal_TT):
            raise _NotServed("a packed row has another mask")
        self._compare_far_out(slot, window)
        self._compare_numbers(module, shapes, options, seen_TT)

    def _compare_far_out(self, slot: Slot, window: int | None) -> None:
        if slot not in self.alone:
            raise _NotServed("a single document has no mask")
        borders = {0, 1, *((window - 1, window, window + 1) if window else ())}
        queries = torch.tensor(sorted({far + border for far in _FAR for border in borders}))
        # The keys at the distances of all borders, and the greatest powers of two, which chunks are made of.
        distances = sorted({*borders, -1, *(1 << power for power in range(22)), *(3 << power for power in range(21))})
        keys = queries[:, None] - torch.tensor(distances)
        exists = keys >= 0
        seen = self.alone[slot].sees(queries[:, None].expand_as(keys), keys.clamp(min=0))
        if not _equal(seen & exists, _causal(queries[:, None], keys, window) & exists):
            raise _NotServed("a long document has another mask")

    def _compare_numbers(
        self, module: nn.Module, shapes: Sequence[torch.Size], options: dict[str, Any], seen_TT: Tensor
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
        mask = seen_TT[None, None]
        if self.usual == "sdpa":
            usual: Callable[..., Any] = AttentionInterface()["sdpa"]  # type: ignore[no-untyped-call]
        else:
            usual = inspect.unwrap(type(module).forward).__globals__["eager_attention_forward"]
            mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        boundaries = torch.tensor([0, *torch.tensor(_DOCUMENTS).cumsum(0)])
        with _real_parameters(module, generator) as real:
            options = {name: real.get(id(value), value) for name, value in options.items()}
            if any(isinstance(value, Tensor) and value.is_meta for value in options.values()):
                raise _NotServed("attention gets a tensor that the layer computes")
            expected = usual(module, query, key, value, attention_mask=mask, **options)[0]
            found = horizon_attention(module, query, key, value, attention_mask=boundaries, **options)[0]
        if expected.shape != found.shape or not torch.allclose(expected, found, rtol=_TOLERANCE, atol=_TOLERANCE):
            raise _NotServed("the numbers are others")


@contextmanager
def _registered(attention: Callable[..., Any]) -> Iterator[None]:
    AttentionInterface.register(_TRIAL, attention)
    try:
        yield
    finally:
        AttentionInterface.register(_TRIAL, horizon_attention)


@contextmanager
def _real_parameters(module: nn.Module, generator: torch.Generator) -> Iterator[dict[int, Tensor]]:
    """Gives a module's own parameters (sinks) random values inside the block, by the identity of those without
    storage."""
    own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    real = {name: nn.Parameter(torch.randn(p.shape, generator=generator), False) for name, p in own.items()}
    module._parameters.update(real)
    try:
        yield {id(own[name]): real[name] for name in own}
    finally:
        module._parameters.update(own)


def _calls_attention(module: nn.Module) -> bool:
    """Whether the code of a module asks transformers for an attention function."""
    return "ALL_ATTENTION_FUNCTIONS" in inspect.unwrap(type(module).forward).__code__.co_names


def _causal(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    seen = keys <= queries
    return seen & (keys > queries - window) if window else seen


def _equal(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.broadcast_to(expected.shape), expected)


def _marks(call: LayerCall) -> dict[Slot, _Mark]:
    """The marks among the arguments of a call."""
    arguments: list[tuple[Slot, Any]] = [*enumerate(call.args), *call.kwargs.items()]
    return {slot: value for slot, value in arguments if type(value) is _Mark}


def _argument(call: LayerCall, slot: Slot) -> Any:
    return call.args[slot] if isinstance(slot, int) else call.kwargs[slot]


def _filled(call: LayerCall, slots: frozenset[Slot], value: Tensor | KeptRow | ChunkedRow) -> LayerCall:
    args = tuple(value if index in slots else argument for index, argument in enumerate(call.args))
    return replace(call, args=args, kwargs={**call.kwargs, **{s: value for s in slots if isinstance(s, str)}})


def _configs(model: PreTrainedModel, layers: Sequence[nn.Module]) -> list[PretrainedConfig]:
    """Every config object that the model's code may look at for its attention."""
    modules = [*model.modules(), *(module for layer in layers for module in layer.modules())]
    held = [config for module in modules if isinstance(config := vars(module).get("config"), PretrainedConfig)]
    found = {id(config): config for config in [*held, model.config.get_text_config()]}
    return list(found.values())


def _choose(configs: Sequence[PretrainedConfig], name: str) -> None:
    for config in configs:
        # Not by the property, which would change the configs of other parts as well.
        cast(Any, config)._attn_implementation_internal = name


AttentionInterface.register(_TRIAL, horizon_attention)
AttentionMaskInterface.register(_TRIAL, _mark)

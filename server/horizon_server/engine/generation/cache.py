"""What a sequence keeps from token to token: the cache of transformers, filled and read by the layers' own code, one
layer at a time.

Equal layers run as the first of them (`Template.layer_groups`), whose code asks the cache for its own number. So each
call gets a view of the cache that has the called layer's part in every place.

Units: bytes. Shapes: T = tokens of the sequence.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PretrainedConfig

from horizon_server.engine.layer_stubs import RUN_ERRORS, LayerCall
from horizon_server.errors import InvalidModel

_CACHE_ATTRIBUTES = ("keys", "values", "indexer_keys", "indexer_position_ids", "conv_states", "recurrent_states")


class SequenceCache:
    """The cache of one sequence. Thread: compute's."""

    def __init__(self, config: PretrainedConfig, *, num_layers: int) -> None:
        """
        Raises:
            InvalidModel: transformers makes no cache with a part for each layer of this model.
        """
        try:
            self.cache: Cache = DynamicCache(config=config.get_text_config())
        except RUN_ERRORS as error:
            raise cannot_generate(config, f"transformers cannot make a cache for it ({first_line(error)})") from error
        if len(self.cache.layers) != num_layers:
            what = f"its cache has parts for {len(self.cache.layers)} of {num_layers} layers, so layers share theirs"
            raise cannot_generate(config, what)

    def call(self, index: int, call: LayerCall) -> LayerCall:
        """A layer's call with that layer's part of the cache in the cache's place."""
        view = copy.copy(self.cache)
        view.layers = [self.cache.layers[index]] * len(self.cache.layers)

        def replaced(value: Any) -> Any:
            return view if value is self.cache else value

        return replace(
            call,
            args=tuple(replaced(value) for value in call.args),
            kwargs={name: replaced(value) for name, value in call.kwargs.items()},
        )

    @contextmanager
    def unchanged(self, index: int) -> Iterator[None]:
        """Inside the block a layer writes into a copy of its part, which is gone afterwards."""
        own = self.cache.layers[index]
        self.cache.layers[index] = copy.deepcopy(own)
        try:
            yield
        finally:
            self.cache.layers[index] = own

    def compact(self, index: int) -> None:
        """Drop memory that a layer's part does not use: a window is cut out of all keys of a prompt, which would stay
        otherwise."""

        def compacted(tensor: Tensor) -> Tensor:
            return tensor.clone() if tensor.untyped_storage().nbytes() >= 2 * tensor.nbytes else tensor

        self._map(index, compacted)

    def to(self, index: int, device: torch.device) -> None:
        """Move a layer's part."""
        self._map(index, lambda tensor: tensor.to(device))

    def num_bytes(self, index: int) -> int:
        """What a layer's part takes."""
        return sum(tensor.nbytes for tensor in self._tensors(index))

    def num_elements(self, index: int) -> int:
        """Numbers in a layer's part."""
        return sum(tensor.numel() for tensor in self._tensors(index))

    def share_layers(self, groups: Sequence[int]) -> None:
        """Have all layers of a group use the part of the first, for trials that run only that one."""
        self.cache.layers = [self.cache.layers[group] for group in groups]

    def window(self, index: int) -> int | None:
        """How many tokens a layer's part is cut to, or None where it keeps all."""
        window = getattr(self.cache.layers[index], "sliding_window", None)
        return window if isinstance(window, int) else None

    def _tensors(self, index: int) -> list[Tensor]:
        found: list[Tensor] = []
        for name in _CACHE_ATTRIBUTES:
            value = getattr(self.cache.layers[index], name, None)
            values = value.values() if isinstance(value, dict) else (value,)
            found += [tensor for tensor in values if isinstance(tensor, Tensor)]
        return found

    def _map(self, index: int, change: Any) -> None:
        layer = self.cache.layers[index]
        for name in _CACHE_ATTRIBUTES:
            value = getattr(layer, name, None)
            if isinstance(value, Tensor):
                setattr(layer, name, change(value))
            elif isinstance(value, dict):
                for key, tensor in value.items():
                    if isinstance(tensor, Tensor):
                        value[key] = change(tensor)


@dataclass(frozen=True, kw_only=True)
class LayerCacheSize:
    """What one layer keeps of a sequence, in elements: `fixed` for a state, `per_token` for each token, of the last
    `window` alone."""

    fixed: int
    per_token: int
    window: int | None

    @classmethod
    def measured(cls, tokens: tuple[int, int], elements: tuple[int, int], *, window: int | None) -> LayerCacheSize:
        """From the elements after two numbers of tokens."""
        kept = tuple(num_tokens if window is None else min(num_tokens, window - 1) for num_tokens in tokens)
        if kept[0] == kept[1]:
            per_token = math.ceil(elements[1] / max(1, kept[1]))
        else:
            per_token = math.ceil((elements[1] - elements[0]) / (kept[1] - kept[0]))
        return cls(fixed=max(0, elements[1] - per_token * kept[1]), per_token=per_token, window=window)

    def num_bytes(self, num_tokens: int, *, item_bytes: int) -> int:
        """At most, for a sequence of `num_tokens`. States count in fp32, which most architectures keep them in whatever
        the weights are."""
        # One token more than the window keeps: what it is cut out of.
        kept = num_tokens if self.window is None else min(num_tokens, self.window)
        return self.fixed * torch.float32.itemsize + self.per_token * kept * item_bytes


def cannot_generate(config: PretrainedConfig, why: str) -> InvalidModel:
    """The refusal of a model, by name."""
    return InvalidModel(
        f"model_type {config.model_type!r}: answers cannot be generated, because {why}; it can be trained, and its "
        "checkpoints "
        "can be sampled with other software"
    )


def first_line(error: Exception) -> str:
    """What an error says, short."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]

"""What the layers of a model keep for their backward and take at its widest moment, counted on one layer of each kind
at two lengths.

For models whose layers no formula of the plan covers: state spaces, linear attention, delta rules, and attention that
keeps its scores. Parameters are zeros that are only read, for which the kernel provides one page, and none of them gets
a gradient: a count takes seconds, and little memory even where the model is large.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from horizon_server.engine.layer_stubs import LayerCall
from horizon_server.engine.template import Template
from horizon_server.planning.ledger import LayerMemory

# Recurrent layers work on chunks of up to 256 tokens and pad to them, so a curve through shorter rows is wrong.
_LENGTHS = (512, 1024)
_MAX_SAVED_BYTES = 2 << 30
"""What a layer may keep for its backward to be run as well: beyond it, that takes minutes."""
_NUM_BLOCKS = 32
_SHORT_TOKENS = 64
"""A row so short that what grows with pairs of its tokens is a small part, which is taken off."""


@dataclass(frozen=True, kw_only=True)
class _Count:
    """Bytes of one layer for one row. `peak` is 0 where no backward was run; `blocks` are the largest that were alive
    at it."""

    saved: int
    peak: int
    blocks: tuple[int, ...]
    call: int


def measure_layer_memory(folder: Path, *, lengths: tuple[int, int] = _LENGTHS) -> LayerMemory:
    """Count what the layers of a folder's model keep and take for rows of two lengths, in tokens.

    Raises:
        InvalidModel: the model cannot be trained layer by layer.
    """
    template = Template.from_folder(folder)
    short, long = (_count(template, length) for length in lengths)
    memory = LayerMemory.through(lengths, (short.saved, long.saved))
    call = LayerMemory.through(lengths, (short.call, long.call))
    if not short.peak or not long.peak:
        return memory
    peak = LayerMemory.through(lengths, (short.peak, long.peak))
    return LayerMemory(
        bytes_per_token=memory.bytes_per_token,
        bytes_per_pair=memory.bytes_per_pair,
        peak_per_token=peak.bytes_per_token,
        peak_per_pair=peak.bytes_per_pair,
        small_per_token=_count(template, _SHORT_TOKENS).peak / _SHORT_TOKENS - peak.bytes_per_pair * _SHORT_TOKENS,
        blocks_per_token=tuple(size / lengths[1] for size in long.blocks),
        call_per_token=call.bytes_per_token,
        call_per_pair=call.bytes_per_pair,
    )


def _count(template: Template, num_tokens: int) -> _Count:
    """The most of any kind of layer."""
    ids_T, positions_T = torch.zeros(num_tokens, dtype=torch.int64), torch.arange(num_tokens)
    with torch.no_grad():
        table = {place.name: torch.zeros(place.piece.shape) for place in template.places[0]}
        hidden_1TD, calls = template.embed(table, ids_T, positions_T)
    counts: dict[int, _Count] = {}
    for index, group in enumerate(template.layer_groups):
        # Layers of a group are equal, so one of them counts for all.
        if group not in counts:
            counts[group] = _count_layer(template, index, hidden_1TD, calls[index])
    widest = max(counts.values(), key=lambda count: count.peak)
    return _Count(
        saved=max(count.saved for count in counts.values()),
        # Of no kind where one was left out: that may be the widest.
        peak=widest.peak if all(count.peak for count in counts.values()) else 0,
        blocks=widest.blocks,
        call=_storage_bytes([tensor for call in calls for tensor in call.tensors()]),
    )


def _count_layer(template: Template, index: int, hidden_1TD: Tensor, call: LayerCall) -> _Count:
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        # By storage, because autograd often saves several views of one tensor.
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    parameters = {
        place.name: torch.zeros(place.piece.shape, requires_grad=True) for place in template.places[index + 1]
    }
    # Masks that the layer holds whatever the row's length are planned by themselves.
    held = {buffer.untyped_storage().data_ptr() for buffer in template.groups[template.layer_groups[index]].buffers()}
    own = held | {parameter.untyped_storage().data_ptr() for parameter in parameters.values()}
    inputs_1TD = hidden_1TD.detach().requires_grad_()
    with _Live() as live, torch.enable_grad():
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            # Held until the count is done, so that no address is used twice.
            output_1TD = template.layer(index, parameters, inputs_1TD, call)
        saved = sum(size for address, size in kept.items() if address not in own)
        runs_backward = saved <= _MAX_SAVED_BYTES
        if runs_backward:
            torch.autograd.grad(output_1TD, inputs_1TD, torch.zeros_like(output_1TD), allow_unused=True)
    return _Count(saved=saved, peak=live.peak if runs_backward else 0, blocks=live.blocks, call=0)


def _storage_bytes(tensors: list[Tensor]) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes that operations inside the block hold at once. What a kernel allocates inside itself it does not
    see.

    Backward of the CPU runs in the calling thread, so that it is seen too.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self.blocks: tuple[int, ...] = ()
        self._sizes: dict[int, int] = {}
        self._held = 0

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if not isinstance(leaf, Tensor) or leaf.is_meta:
                continue
            storage = leaf.untyped_storage()
            key = storage._cdata
            if key in given or key in self._sizes:
                continue
            self._sizes[key] = storage.nbytes()
            self._held += storage.nbytes()
            weakref.finalize(storage, self._drop, key)
        if self._held > self.peak:
            self.peak = self._held
            self.blocks = tuple(sorted(self._sizes.values(), reverse=True)[:_NUM_BLOCKS])
        return result

    def _drop(self, key: int) -> None:
        self._held -= self._sizes.pop(key)

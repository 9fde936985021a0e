"""Whether a model's layers compute with a cache what they compute without one: tried on the real weights, never by a
list of names.

One layer of each kind runs on a few tokens at once, and again on the first of them, then on one at a time with the
cache. It computes in fp32, whatever the device does, so that only a cache that is wrong makes a difference. The run
also measures what a layer keeps.

Shapes: T = tokens of the trial, D = hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from horizon_server.engine.binding import Place
from horizon_server.engine.device.protocol import Device
from horizon_server.engine.generation.cache import LayerCacheSize, SequenceCache, cannot_generate, first_line
from horizon_server.engine.layer_stream import LayerStream, UnitRequest
from horizon_server.engine.layer_stubs import RUN_ERRORS, LayerCall
from horizon_server.engine.template import Template

NUM_TOKENS = 9
SPANS = (slice(0, 6), slice(6, 7), slice(7, 8), slice(8, 9))
TOLERANCE = 1e-3


@dataclass
class _Kind:
    """What the trial knows of the layers of one kind."""

    whole_1TD: Tensor | None = None
    parts: list[Tensor] = field(default_factory=list)
    elements: list[int] = field(default_factory=list)


@dataclass
class _Trial:
    kinds: dict[int, _Kind]
    error: Exception | None = None
    calls: list[LayerCall] = field(default_factory=list)


def try_cache(template: Template, device: Device, stream: LayerStream) -> list[LayerCacheSize]:
    """What each layer keeps of a sequence. The device's memory must have room for a layer in fp32.

    Raises:
        InvalidModel: answers with a cache would be wrong for this model; the message names it.
    """
    config, num_layers = template.config, template.num_layers
    cache = SequenceCache(config, num_layers=num_layers)
    groups = template.layer_groups
    windows = [cache.window(layer) for layer in range(num_layers)]
    parts = cache.cache.layers
    if any(windows[i] != windows[g] or type(parts[i]) is not type(parts[g]) for i, g in enumerate(groups)):
        raise cannot_generate(config, "equal layers of it have caches of different kinds")
    # Only the first of equal layers runs; masks are made by what any layer's part holds.
    cache.share_layers(groups)
    trial = _Trial(kinds={group: _Kind() for group in sorted(set(groups))})
    noise = torch.randn(1, NUM_TOKENS, template.hidden_size, generator=torch.Generator().manual_seed(0))
    hidden_1TD = device.place(noise)
    positions_T = device.place(torch.arange(NUM_TOKENS))
    # The rows are not used; they are the unit that a walk begins with.
    rows_R = torch.zeros(1, dtype=torch.int64) if template.embeds_by_rows else None
    first = UnitRequest(unit_index=0, rows_R=rows_R)
    requests = [first, *(UnitRequest(unit_index=group + 1) for group in trial.kinds)]

    def start(span: slice | None) -> None:
        tokens = positions_T if span is None else positions_T[span]
        trial.calls = template.calls_of(tokens, None, cache=None if span is None else cache.cache)

    def run(layer: int, flat: Tensor, span: slice | None) -> None:
        kind = trial.kinds[layer]
        call, given_1TD = trial.calls[layer], hidden_1TD
        if span is not None:
            call, given_1TD = cache.call(layer, call), hidden_1TD[:, span]
        # What experts put out depends on their token alone, whatever is kept.
        paging, unit_index = stream.paging, layer + 1
        places = paging.places(template, unit_index)
        with torch.no_grad(), charged(device, places), paging.without_experts(unit_index):
            parameters = {place.name: place.piece.read(flat).float() for place in places}
            output_1TD = template.layer(layer, parameters, given_1TD, call)
        # The input is in the output: what the layer adds to it is compared.
        added_1TD = output_1TD - given_1TD
        if span is None:
            kind.whole_1TD = added_1TD
        else:
            cache.compact(layer)
            kind.parts.append(added_1TD)
            kind.elements.append(cache.num_elements(layer))

    def guarded(work: partial[None]) -> None:
        # Kept, not raised: a queue that has failed does no other work.
        if trial.error is None:
            try:
                work()
            except RUN_ERRORS as error:
                trial.error = error

    for span in (None, *SPANS):
        for request, flat in stream.walk(requests):
            step = partial(start, span) if request is first else partial(run, request.unit_index - 1, flat, span)
            device.compute.submit(partial(guarded, step), label="trial of the cache")
    device.compute.record().wait()
    device.raise_failure()
    if trial.error is not None:
        what = f"its layers do not run with a cache of transformers ({first_line(trial.error)})"
        raise cannot_generate(config, what) from trial.error
    for layer, kind in trial.kinds.items():
        assert kind.whole_1TD is not None
        difference = torch.cat(kind.parts, dim=1) - kind.whole_1TD
        error = float((difference.norm(dim=-1) / kind.whole_1TD.norm(dim=-1).clamp_min(1e-12)).max())
        # Not `error > tolerance`, which is False where it is not a number.
        if not error <= TOLERANCE:
            what = (
                f"layer {layer} computes something else with a cache than without (they differ by {error:.1e} of "
                "what it adds)"
            )
            raise cannot_generate(config, what)
    sizes = {group: _size(kind, windows[group]) for group, kind in trial.kinds.items()}
    return [sizes[group] for group in groups]


@contextmanager
def charged(device: Device, places: Sequence[Place]) -> Iterator[None]:
    """Account for a layer's weights in fp32, where they are not what is on the device anyway."""
    is_copy = device.compute_dtype is not torch.float32
    num_bytes = sum(math.prod(place.piece.shape) for place in places) * torch.float32.itemsize if is_copy else 0
    device.charge("workspace", num_bytes)
    try:
        yield
    finally:
        device.charge("workspace", -num_bytes)


def _size(kind: _Kind, window: int | None) -> LayerCacheSize:
    tokens, elements = (SPANS[0].stop, NUM_TOKENS), (kind.elements[0], kind.elements[-1])
    return LayerCacheSize.measured(tokens, elements, window=window)

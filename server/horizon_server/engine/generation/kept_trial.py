"""Whether a model's layers compute token by token, with what is kept of a sequence, what they compute at once: tried on
the real weights, one layer of each kind, in fp32.

Shapes: T = tokens of the trial, D = hidden size.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from horizon_server.engine.attention.kept import Growing, KeptKeys, KeptPass
from horizon_server.engine.device.protocol import Device
from horizon_server.engine.generation.cache import LayerCacheSize, cannot_generate, first_line
from horizon_server.engine.generation.trial import NUM_TOKENS, SPANS, TOLERANCE, charged
from horizon_server.engine.layer_stream import LayerStream, UnitRequest
from horizon_server.engine.layer_stubs import RUN_ERRORS, LayerCall
from horizon_server.engine.template import Template


def try_kept(template: Template, device: Device, stream: LayerStream) -> list[LayerCacheSize]:
    """What each layer keeps of a sequence. The device's memory must have room for a layer in fp32.

    Raises:
        InvalidModel: answers would be wrong for this model; the message names it.
    """
    kinds = sorted(set(template.layer_groups))
    kept = KeptKeys(template.num_layers)
    (place,) = kept.take(1, capacity=NUM_TOKENS)
    noise = torch.randn(1, NUM_TOKENS, template.hidden_size, generator=torch.Generator().manual_seed(0))
    hidden_1TD, positions_T = device.place(noise), device.place(torch.arange(NUM_TOKENS))
    whole: dict[int, Tensor] = {}
    parts: dict[int, list[Tensor]] = {kind: [] for kind in kinds}
    calls: list[LayerCall] = []
    errors: list[Exception] = []

    def start(span: slice) -> None:
        calls[:] = template.calls_of(positions_T[span], torch.tensor([0, span.stop - span.start]))

    def run(layer: int, flat: Tensor, span: slice, *, is_whole: bool) -> None:
        given_1TD, call = hidden_1TD[:, span], calls[layer]
        if not is_whole:
            growing = Growing(place=place, num_kept=span.start, span=slice(0, span.stop - span.start))
            assert template.own_attention is not None, "sequences of one row"
            call = template.own_attention.with_kept(layer, call, KeptPass(kept, [growing]).row(layer))
        # What experts put out depends on their token alone, whatever is kept.
        paging, unit_index = stream.paging, layer + 1
        places = paging.places(template, unit_index)
        with torch.no_grad(), charged(device, places), paging.without_experts(unit_index):
            parameters = {place.name: place.piece.read(flat).float() for place in places}
            # The input is in the output: what the layer adds to it is compared.
            added_1TD = template.layer(layer, parameters, given_1TD, call) - given_1TD
        if is_whole:
            whole[layer] = added_1TD
        else:
            parts[layer].append(added_1TD)

    def guarded(work: partial[None]) -> None:
        # Kept, not raised: a queue that has failed does no other work.
        if not errors:
            try:
                work()
            except RUN_ERRORS as error:
                errors.append(error)

    # The rows are not used; they are the unit that a walk begins with.
    rows_R = torch.zeros(1, dtype=torch.int64) if template.embeds_by_rows else None
    first = UnitRequest(unit_index=0, rows_R=rows_R)
    requests = [first, *(UnitRequest(unit_index=kind + 1) for kind in kinds)]
    for span in (slice(0, NUM_TOKENS), *SPANS):
        is_whole = span.stop - span.start == NUM_TOKENS
        for request, flat in stream.walk(requests):
            step = (
                partial(start, span)
                if request is first
                else partial(run, request.unit_index - 1, flat, span, is_whole=is_whole)
            )
            device.compute.submit(partial(guarded, step), label="trial of what is kept")
    device.compute.record().wait()
    device.raise_failure()
    if errors:
        what = f"its layers do not run token by token ({first_line(errors[0])})"
        raise cannot_generate(template.config, what) from errors[0]
    sizes = {}
    for kind in kinds:
        difference = torch.cat(parts[kind], dim=1) - whole[kind]
        error = float((difference.norm(dim=-1) / whole[kind].norm(dim=-1).clamp_min(1e-12)).max())
        # Not `error > TOLERANCE`, which is False where it is not a number.
        if not error <= TOLERANCE:
            what = f"layer {kind} computes something else token by token (they differ by {error:.1e} of what it adds)"
            raise cannot_generate(template.config, what)
        sizes[kind] = LayerCacheSize(fixed=0, per_token=kept.num_elements(kind), window=None)
    return [sizes[group] for group in template.layer_groups]

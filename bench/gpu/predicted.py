"""What the step-time model says of changes that the engine does not have. None was measured on a GPU."""

from __future__ import annotations

import dataclasses

from horizon_server.planning.rates import DeviceRates
from horizon_server.planning.step_parts import StepWork
from horizon_server.store.layout import StoreLayout

# Of a parameter: both halves of its master and its moments.
_STATE_BYTES = 12


def with_attention(rates: DeviceRates, forward: float, backward: float) -> DeviceRates:
    """Attention at these operations per second, whatever the length of a document."""
    return dataclasses.replace(
        rates,
        attention_forward_flops_per_s=((1, forward),),
        attention_backward_flops_per_s=((1, backward),),
    )


def with_streamed_states(work: StepWork, layout: StoreLayout) -> StepWork:
    """The states of every layer go up to be updated on the device, and come home again: low half and moments both ways,
    the new high half down in the gradient's place. The host's memory gives and takes the same bytes."""
    elements = [unit.trained_elements for unit in layout.units if unit.kind == "layer"]
    layers = tuple(
        dataclasses.replace(
            unit,
            # Half of what goes up counts in each of a layer's two visits.
            upload_bytes=unit.upload_bytes + (_STATE_BYTES - 2) / 2 * size,
            download_bytes=_STATE_BYTES * size,
            update_bytes=(2 * _STATE_BYTES - 2) * size,
        )
        for unit, size in zip(work.layers, elements, strict=True)
    )
    return dataclasses.replace(work, layers=layers)

"""What the step-time model says of parts of the engine that it does not count by itself, and of changes that the engine
does not have.

Each function changes the counted work of a step. The figures are those of an independent review, which counted bytes on
the traced graphs of a 7B layer; none was measured on a GPU.
"""

from __future__ import annotations

import dataclasses

from horizon_server.planning.rates import DeviceRates
from horizon_server.planning.step_work import StepWork
from horizon_server.store.layout import StoreLayout

# AdamW on a device reads and writes master and moments, and reads a gradient in fp32.
_STATE_BYTES = 26


def with_resident_states(work: StepWork, layout: StoreLayout, num_layers: int) -> StepWork:
    """Master, moments and gradient of some layers, evenly spread, stay on the device, which updates them itself."""
    elements = [unit.trained_elements for unit in layout.units if unit.kind == "layer"]
    total = len(elements)
    layers = tuple(
        dataclasses.replace(
            unit,
            upload_bytes=0.0,
            download_bytes=0.0,
            update_bytes=0.0,
            resident=True,
            # The update's traffic is of device memory, like what clears a gradient.
            clear_bytes=unit.clear_bytes + _STATE_BYTES * elements[i],
        )
        if (i + 1) * num_layers // total > i * num_layers // total
        else unit
        for i, unit in enumerate(work.layers)
    )
    return dataclasses.replace(work, layers=layers)


def with_attention(rates: DeviceRates, forward: float, backward: float) -> DeviceRates:
    """Attention at these operations per second, whatever the length of a document."""
    return dataclasses.replace(
        rates,
        attention_forward_flops_per_s=((1, forward),),
        attention_backward_flops_per_s=((1, backward),),
    )

"""What the step-time model says of parts of the engine that it does not count by itself, and of changes that the engine
does not have.

Each function changes the counted work of a step. The figures are those of an independent review, which counted bytes on
the traced graphs of a 7B layer; none was measured on a GPU.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from horizon_server.planning.rates import DeviceRates
from horizon_server.planning.step_work import StepWork
from horizon_server.store.layout import StoreLayout

Fp8 = Literal["eager", "traced", "with weight gradients"]
"""Products of layers in FP8: cast by operations of their own as the engine does it; cast inside compiled layers; and
weight gradients in FP8 too, which the engine keeps in the compute dtype."""

FP8_TIMES_AS_FAST = 1.55
# Of a token and layer, in bytes per hidden element: five passes for each cast, and the same input cast for each of its
# maps.
_CAST_BYTES = 654
# AdamW on a device reads and writes master and moments, and reads a gradient in fp32.
_STATE_BYTES = 26


def with_fp8(work: StepWork, kind: Fp8) -> StepWork:
    """The layers' products in FP8; the head's stay as they are."""
    layer, faster = work.layer, 1 / FP8_TIMES_AS_FAST
    # Half of backward are gradients of inputs.
    backward = faster if kind == "with weight gradients" else (1 + faster) / 2
    cast = _CAST_BYTES * work.hidden_size * work.num_tokens / 3 if kind == "eager" else 0.0
    return dataclasses.replace(
        work,
        layer=dataclasses.replace(
            layer,
            forward_flops=layer.forward_flops * faster,
            recompute_flops=layer.recompute_flops * faster,
            backward_flops=layer.backward_flops * backward,
            forward_bytes=layer.forward_bytes + cast,
            recompute_bytes=layer.recompute_bytes + cast,
            backward_bytes=layer.backward_bytes + cast,
        ),
    )


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

"""What the step-time model says of changes that the engine does not have. None was measured on a GPU."""

from __future__ import annotations

import dataclasses

from horizon_server.planning.rates import DeviceRates


def with_attention(rates: DeviceRates, forward: float, backward: float) -> DeviceRates:
    """Attention at these operations per second, whatever the length of a document."""
    return dataclasses.replace(
        rates,
        attention_forward_flops_per_s=((1, forward),),
        attention_backward_flops_per_s=((1, backward),),
    )

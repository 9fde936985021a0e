"""How fast one kind of device works: the parameters of the step-time model. Either measured on this node
(`engine.rate_probe`) or estimated from data sheets (`planning.gpus`); the model is the same for both.

Units: operations per second, bytes per second, seconds. A curve gives a rate by a number of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

LOOPBACK_BYTES_PER_S = 1.3e9
"""What processes of one machine exchange with gloo over its loopback, all of them together: measured on two cores,
torch 2.13."""

Curve = tuple[tuple[int, float], ...]
"""Pairs (tokens, rate) in ascending order of tokens."""


def rate_at(curve: Curve, tokens: float) -> float:
    """The rate at a number of tokens: on a straight line in both logarithms between two points, and level beyond the
    ends."""
    if tokens <= curve[0][0]:
        return curve[0][1]
    for (few, low), (many, high) in pairwise(curve):
        if tokens <= many:
            return low * math.exp(math.log(high / low) * math.log(tokens / few) / math.log(many / few))
    return curve[-1][1]


@dataclass(frozen=True, kw_only=True)
class WidthRates:
    """What models of one hidden size reach.

    `gemm_flops_per_s` is by the tokens of a micro-batch. `elementwise_bytes_per_s` is the traffic of norms, rotary
    tables, activations and sums in a layer; `head_bytes_per_s` that of logits and loss.
    """

    hidden_size: int
    gemm_flops_per_s: Curve
    elementwise_bytes_per_s: float
    head_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class PeerRates:
    """What each of several devices of a node does while all of them do the same: `together` is its link up, `gather`
    and `exchange` what it gets of the others' weights and of their gradients."""

    num_devices: int
    together_bytes_per_s: float
    gather_bytes_per_s: float
    exchange_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class DriveRates:
    """What the drives of a node do together, reading alone and writing alone."""

    read_bytes_per_s: float
    write_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """The speed of one device and of the host that feeds it. `widths` is in ascending order and not empty.

    Attention's rates are by the length of a document, with the operations of forward counted once and those of backward
    2.5 times. Copies are those of the engine: on the host, h2d merges the two halves of a master weight and d2h sums a
    gradient's squares too. `gather` and `scatter` are embedding rows on their way to the device and back into the
    table, `zero` clears that table's gradient. `adamw_bytes_per_s` is what the optimizer's kernel moves through host
    memory, `compressed_parameters_per_s` how many parameters it updates whose states are compressed: they move fewer
    bytes and take more work. `*_launch_s` is what the host needs to start one layer on one micro-batch, `ends_launch_s`
    to start embedding and head; a device of its own hides it under its work, but where `launches_add`, the processors
    that start a layer compute it too. `submit_s` is to queue one piece of work.
    """

    name: str
    num_threads: int
    measured: bool = True
    peak_flops_per_s: float
    attention_forward_flops_per_s: Curve
    attention_backward_flops_per_s: Curve
    accumulate_bytes_per_s: float
    widths: tuple[WidthRates, ...]
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    gather_bytes_per_s: float
    scatter_bytes_per_s: float
    zero_bytes_per_s: float
    adamw_bytes_per_s: float
    compressed_parameters_per_s: float
    launches_add: bool = False
    forward_launch_s: float = 0.0
    backward_launch_s: float = 0.0
    ends_launch_s: float = 0.0
    submit_s: float = 0.0
    peers: PeerRates | None = None
    """Where there are several such devices."""
    drives: DriveRates | None = None
    """Of the node's drives, where a plan uses them."""

    def checked(self) -> DeviceRates:
        """Return these rates, which came from a file or another process. Raises ValueError: one is not above zero, or
        there is no width."""
        if not self.widths or not all(math.isfinite(number) and number > 0 for number in self.numbers()):
            raise ValueError("every rate must be above zero, and there must be at least one width")
        return self

    def numbers(self) -> Iterator[float]:
        """Every rate, those of curves and widths included."""
        of_others = [part for part in (self.peers, self.drives) if part is not None]
        for part in (self, *self.widths, *of_others):
            for name, value in vars(part).items():
                if name.endswith("_per_s"):
                    # A curve without points is as wrong as a rate of zero.
                    yield from [rate for _, rate in value] or [0.0] if isinstance(value, tuple) else [value]

    def at(self, hidden_size: int) -> WidthRates:
        """The width that is nearest in ratio."""
        return min(self.widths, key=lambda w: max(w.hidden_size / hidden_size, hidden_size / w.hidden_size))

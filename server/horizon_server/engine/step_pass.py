"""What one pass over the units carries from the driver to compute, and what random numbers its work draws.

Shapes: N = tokens of the step, S = its supervised tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from horizon_server.engine.device.protocol import Device
from horizon_server.engine.kept_products import KeptProducts
from horizon_server.engine.layer_stream import UnitRequest
from horizon_server.engine.layer_stubs import LayerCall
from horizon_server.engine.micro_batch import StepTokens
from horizon_server.engine.objectives import StepObjective


@dataclass(frozen=True, kw_only=True)
class StepKey:
    """A step of a run, by the run's seed and the steps taken before: decides which random numbers dropout and noise
    draw."""

    seed: int
    step: int

    def seed_of(self, unit_index: int, micro_batch: int) -> int:
        """The seed of a unit's work on a micro-batch (for the head: on a chunk), within 63 bits.

        It is the same when the work runs for the first time, is recomputed in backward, or runs after a resume.
        """
        text = f"{self.seed}/{self.step}/{unit_index}/{micro_batch}"
        # Not hash(), which Python salts differently in every process.
        return int.from_bytes(hashlib.blake2b(text.encode("ascii"), digest_size=8).digest(), "big") >> 1


@dataclass
class StepPass:
    """What one pass over the units carries along. `generator` is None where the model draws no random numbers.

    Thread: after the driver built it, compute's own.
    """

    tokens: StepTokens
    embedding: UnitRequest
    chunks: Sequence[slice]
    loss: Tensor
    key: StepKey | None
    generator: torch.Generator | None = None
    objective: StepObjective | None = None
    """Placed on the device; None is cross-entropy."""
    weights_S: Tensor | None = None
    """Of the cross-entropy, what each target counts beside the others; None is 1."""
    divisor: float = 0.0
    """By what the sum of the targets' cross-entropies is divided: their number, or the sum of their weights."""
    logprobs_S: Tensor | None = None
    """Where the pass leaves its tokens' log-probabilities, if it is to."""
    num_correct: Tensor | None = None
    """Where the supervised tokens add up that the model finds the likeliest, if they are counted."""
    noise_N1: Tensor | None = None
    """How far noise may move each element of a token's embedding; None without noise."""
    first_square: Tensor | None = None
    """Where the square sum of the layers' gradients of the first micro-batch adds up, if it is measured."""
    calls: dict[int, list[LayerCall]] = field(default_factory=dict)
    call_bytes: int = 0
    products: dict[tuple[int, int], KeptProducts] = field(default_factory=dict)
    """By layer and micro-batch."""
    product_bytes: int = 0

    def seed(self, unit_index: int, index: int) -> None:
        """Have the work that follows draw the numbers that are its own, the first time and when it is recomputed."""
        if self.key is not None and self.generator is not None:
            self.generator.manual_seed(self.key.seed_of(unit_index, index))


@contextmanager
def charged(device: Device, num_bytes: int) -> Iterator[None]:
    """Account for working memory of a known size inside the block."""
    device.charge("workspace", num_bytes)
    try:
        yield
    finally:
        device.charge("workspace", -num_bytes)

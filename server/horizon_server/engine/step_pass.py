"""What one pass over the units carries from the driver to compute, and what random numbers its work draws.

Shapes: S = supervised tokens at the edges, L = layers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from horizon_server.engine.device.protocol import Device
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

    def seed_of(self, unit_index: int, micro_batch: int | str) -> int:
        """The seed of a unit's work on a micro-batch (for the head: on a chunk), within 63 bits. In a step of several
        lanes a micro-batch is named by its lane and its number there.

        It is the same when the work runs for the first time, is recomputed in backward, or runs after a resume.
        """
        text = f"{self.seed}/{self.step}/{unit_index}/{micro_batch}"
        # Not hash(), which Python salts differently in every process.
        return int.from_bytes(hashlib.blake2b(text.encode("ascii"), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Supervised tokens that the head computes at once, all of one lane; `lane` counts from this rank's first one."""

    lane: int
    tokens: slice
    name: int | str


def in_lane(lane: int, number: int, num_lanes: int) -> int | str:
    """What names a piece of a step by its lane and its number there; in a step of one lane, the number alone."""
    return number if num_lanes == 1 else f"{lane}.{number}"


@dataclass(frozen=True, kw_only=True)
class PassTokens:
    """Tokens of a step that a rank computes the same units of: those of some of its `num_lanes` lanes.

    Shapes: N = these tokens.
    """

    tokens: StepTokens
    """Lane by lane, in order."""
    lanes: range
    num_lanes: int
    noise_N1: Tensor | None = None
    """How far noise may move each element of a token's embedding; None without noise."""

    def micro_batches_of(self, lanes: range) -> range:
        """Those of some of these lanes, which are neighbours."""
        first, last = lanes.start - self.lanes.start, lanes.stop - 1 - self.lanes.start
        return range(self.tokens.lanes[first].start, self.tokens.lanes[last].stop)

    def name_of(self, index: int) -> int | str:
        """What names a micro-batch in its step, whichever rank computes it."""
        for lane, numbers in zip(self.lanes, self.tokens.lanes, strict=True):
            if index in numbers:
                return in_lane(lane, index - numbers.start, self.num_lanes)
        raise AssertionError("every micro-batch is in a lane")


@dataclass
class StepPass:
    """What one pass over the units carries along. `generator` is None where the model draws no random numbers.

    Thread: after the driver built it, compute's own.
    """

    layers: PassTokens
    """Those that this rank computes layers of; it embeds them too."""
    edges: PassTokens
    """Those that it computes the head of, and the gradient of the embedding; of one rank, and of ranks that divide the
    step by rows, the same."""
    embedding: UnitRequest
    embedding_backward: UnitRequest
    head_chunk_tokens: int
    """Supervised tokens that the head computes at once."""
    loss: Tensor
    """By lane at the edges."""
    key: StepKey | None
    generator: torch.Generator | None = None
    objective: StepObjective | None = None
    """Placed on the device; None is cross-entropy, and on a rank that gets the coefficients from the first one."""
    runs_twice: bool = False
    """Whether the head runs forward for the log-probabilities before it runs for the gradients."""
    logprobs_of_ranks: tuple[int, ...] = ()
    """How many supervised tokens each rank has."""
    weights_S: Tensor | None = None
    """Of the cross-entropy, what each target counts beside the others; None is 1."""
    divisor: float = 0.0
    """By what the sum of the targets' cross-entropies is divided: their number, the sum of their weights, or 1."""
    logprobs_S: Tensor | None = None
    """Where the pass leaves the log-probabilities of the tokens at the edges, if it is to."""
    num_correct: Tensor | None = None
    """Where the supervised tokens add up that the model finds the likeliest, if they are counted."""
    first_squares_L: Tensor | None = None
    """Where each layer's square sum of its gradients of the first micro-batch goes, if it is measured."""
    calls: dict[int, list[LayerCall]] = field(default_factory=dict)
    call_bytes: int = 0
    products: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    """What compiled layers keep for their backward, by layer and micro-batch."""
    product_bytes: int = 0

    def chunks(self, lane: int, numbers: range) -> Iterator[Chunk]:
        """The head's work on some parts of a lane, on supervised tokens only; both count from this rank's first one."""
        tokens, size = self.edges.tokens, self.head_chunk_tokens
        targets = tokens.targets_of(numbers)
        for start in range(targets.start, targets.stop, size):
            yield Chunk(
                lane=lane,
                tokens=slice(start, min(start + size, targets.stop)),
                name=in_lane(self.edges.lanes[lane], start - tokens.target_lanes[lane].start, self.edges.num_lanes),
            )

    def seed(self, unit_index: int, name: int | str) -> None:
        """Have the work that follows, on the micro-batch or chunk of that name, draw the numbers that are its own, the
        first time and when it is recomputed."""
        if self.key is not None and self.generator is not None:
            self.generator.manual_seed(self.key.seed_of(unit_index, name))


@contextmanager
def charged(device: Device, num_bytes: int) -> Iterator[None]:
    """Account for working memory of a known size inside the block."""
    device.charge("workspace", num_bytes)
    try:
        yield
    finally:
        device.charge("workspace", -num_bytes)

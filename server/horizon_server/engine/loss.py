"""The training loss: cross-entropy summed over supervised tokens, as a fraction of all supervised tokens of the step.

Owns the scaling that makes the loss the token-weighted mean for any split into micro-batches and chunks.

It is what the plain forward of transformers computes. For mixtures of experts that forward adds the routers' auxiliary loss only where
the config sets `output_router_logits`; such a config is refused, any other is trained without.

Shapes: C = tokens of a chunk, V = vocabulary.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def chunk_loss(logits_CV: Tensor, targets_C: Tensor, *, num_targets_of_step: int) -> Tensor:
    """This chunk's share of the step's mean loss, in fp32. Every target counts: ignored positions were dropped before."""
    return functional.cross_entropy(logits_CV.float(), targets_C, reduction="sum") / num_targets_of_step

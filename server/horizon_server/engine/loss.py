"""The training loss: cross-entropy summed over supervised tokens, as a fraction of all supervised tokens of the step.

Owns the scaling that makes the loss the token-weighted mean whatever the split into micro-batches and chunks. Must not know the
model or the schedule.

Shapes: C = tokens of a chunk, V = vocabulary.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

_MAX_LOGITS_BYTES = 32 << 20
_MIN_CHUNK_TOKENS = 256
_MAX_CHUNK_TOKENS = 4096
_FP32_BYTES = 4


def chunk_loss(logits_CV: Tensor, targets_C: Tensor, *, num_targets_of_step: int) -> Tensor:
    """This chunk's share of the step's mean loss, in fp32. Every target counts: ignored positions were dropped before."""
    return functional.cross_entropy(logits_CV.float(), targets_C, reduction="sum") / num_targets_of_step


def chunk_tokens(vocab_size: int) -> int:
    """Tokens per logits chunk: as many as keep one fp32 logits chunk near 32 MiB, within sane bounds."""
    return max(_MIN_CHUNK_TOKENS, min(_MAX_CHUNK_TOKENS, _MAX_LOGITS_BYTES // (_FP32_BYTES * vocab_size)))

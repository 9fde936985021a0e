"""NEFTune: noise on the embeddings of a training step.

Each document has the noise that it would have alone, however rows are packed. Source: NEFTune (arXiv 2310.05914).

Shapes: N = tokens of the step, T = tokens of a micro-batch, D = hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from horizon_server.engine.device.protocol import Device
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.step_pass import PassTokens, StepPass

NOISE = -1
"""In the place of a unit's index: the noise has random numbers of its own, apart from dropout's."""


def noise_magnitudes(micro_batches: Sequence[MicroBatch], hidden_size: int, alpha: float, device: Device) -> Tensor:
    """alpha / sqrt(L * D) for each token, where L is the length of its document. Shapes: [N, 1]."""
    lengths = torch.tensor(
        [length for micro_batch in micro_batches for length in micro_batch.document_lengths], dtype=torch.int64
    )
    magnitudes = alpha / (lengths * hidden_size).sqrt()
    return device.place(magnitudes.repeat_interleave(lengths)[:, None])


def noise_of(current: StepPass, part: PassTokens, index: int, hidden_size: int, device: Device) -> Tensor | None:
    """The noise on the embeddings of a micro-batch, the same in forward and backward; None without. Shapes: [1, T,
    D]."""
    if part.noise_N1 is None or current.key is None:
        return None
    magnitudes_T1 = part.noise_N1[part.tokens.spans[index]]
    shape = (1, magnitudes_T1.shape[0], hidden_size)
    noise_1TD = torch.empty(shape, dtype=device.compute_dtype, device=magnitudes_T1.device)
    device.generator.manual_seed(current.key.seed_of(NOISE, part.name_of(index)))
    return noise_1TD.uniform_(-1.0, 1.0, generator=device.generator).mul_(magnitudes_T1)

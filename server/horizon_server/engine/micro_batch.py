"""One packed row of tokens, ready for the model: the only shape in which data enters the engine.

Owns the meaning of labels, positions and document boundaries. Must not know where the tokens came from, how rows were chosen or
what a step is.

Shapes: T = tokens of the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED_LABEL = -100


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """A row of documents laid end to end.

    `labels_T[t]` is the target of position t (already shifted, never crossing a document) or `IGNORED_LABEL`; `position_ids_T`
    restarts at 0 with each document; `document_lengths` sum to T.
    """

    input_ids_T: Tensor
    position_ids_T: Tensor
    labels_T: Tensor
    document_lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        num_tokens = self.input_ids_T.numel()
        for tensor in (self.input_ids_T, self.position_ids_T, self.labels_T):
            assert tensor.dtype == torch.int64, f"token tensors are int64, got {tensor.dtype}"
            assert tensor.shape == (num_tokens,), f"token tensors share one length, got {tuple(tensor.shape)}"
        assert num_tokens > 0, "a micro-batch holds at least one token"
        assert sum(self.document_lengths) == num_tokens, "document lengths sum to the number of tokens"

    @property
    def num_tokens(self) -> int:
        """Real tokens of the row; there is no padding."""
        return self.input_ids_T.numel()

    @property
    def num_targets(self) -> int:
        """Positions that are trained on."""
        return int((self.labels_T != IGNORED_LABEL).sum())

"""Supervised fine-tuning whose tokens do not all count the same.

Shapes: S = supervised tokens of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from horizon_server.engine.objectives.objective import Documents, Objective


@dataclass(frozen=True, kw_only=True)
class WeightedSFT(Objective):
    """Cross-entropy with a weight for each token::

        loss = - sum_t w_t log p_t / sum_t w_t

    over all supervised tokens of the step. Equal weights give the mean over tokens, which is plain cross-entropy.
    Training steps compute it without a second look at the logits (`chunk_loss`); the formula here is for
    log-probabilities that are there.

    Source: the weighted mean of torch.nn.functional.cross_entropy, with a weight per token instead of per class.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"weights_S"})
    is_cross_entropy: ClassVar[bool] = True

    def _loss(
        self, logprobs_S: Tensor, references_S: Tensor | None, weights_S: Tensor | None, documents: Documents
    ) -> Tensor:
        assert weights_S is not None, "checked before the step"
        weights_S = weights_S.double()
        return -(weights_S * logprobs_S).sum() / weights_S.sum()

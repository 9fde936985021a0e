"""Policy gradients on samples that were recorded with their log-probabilities and advantages.

Shapes: K = documents of the step, S = supervised tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from horizon_server.engine.micro_batch import refused
from horizon_server.engine.objectives.objective import Documents, Objective, StepObjective

Mean = Literal["tokens", "documents"]


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(Objective):
    """With the ratio of the policy to the one that sampled, r_t = exp(log p_t - recorded_t), and the advantage A_t::

        loss_t = - r_t A_t                                                         without `clip`: importance sampling
        loss_t = - min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)        with it: PPO
        loss_t += kl_coefficient (exp(d_t) - d_t - 1),  d_t = log ref_t - log p_t  where kl_coefficient is above 0

    Advantages are data: GRPO's are one number per document, (reward - mean of its group) / standard deviation of its
    group, which `Documents.of` takes as `advantages_K`. On samples of the very policy that is trained r_t is 1, and the
    gradient is REINFORCE's.

    `mean` is over what losses are averaged: all tokens of the step alike (DAPO), or the tokens of each document and
    then the documents, so that every document counts the same (GRPO). Documents without a supervised token do not
    count.

    Source: PPO, Schulman et al. (arXiv 1707.06347), equations 6 and 7; GRPO, Shao et al. (arXiv 2402.03300), equations
    3 and 4; mean over tokens and two clips, Yu et al., DAPO (arXiv 2503.14476), equation 8.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"documents.recorded_S", "documents.advantages_S"})

    clip: bool = True
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coefficient: float = 0.0
    mean: Mean = "tokens"

    def __post_init__(self) -> None:
        assert 0 <= self.clip_low <= 1, "clip_low is from 0 to 1"
        assert self.clip_high >= 0, "clip_high is not negative"
        assert self.kl_coefficient >= 0, "kl_coefficient is not negative"

    def check(self, step: StepObjective) -> None:
        """A KL term needs a reference model. Raises: InvalidData."""
        if self.kl_coefficient and step.references_S is None:
            raise refused(
                "objective.references_S", "is missing; PolicyGradient needs it where kl_coefficient is above 0"
            )

    def _loss(
        self, logprobs_S: Tensor, references_S: Tensor | None, weights_S: Tensor | None, documents: Documents
    ) -> Tensor:
        assert documents.recorded_S is not None and documents.advantages_S is not None, "checked before the step"
        ratios_S, advantages_S = torch.exp(logprobs_S - documents.recorded_S.double()), documents.advantages_S.double()
        gains_S = ratios_S * advantages_S
        if self.clip:
            clipped_S = ratios_S.clamp(1 - self.clip_low, 1 + self.clip_high)
            gains_S = torch.minimum(gains_S, clipped_S * advantages_S)
        losses_S = -gains_S
        if self.kl_coefficient:
            assert references_S is not None, "checked before the step"
            losses_S = losses_S + self.kl_coefficient * divergences(references_S - logprobs_S)
        if weights_S is not None:
            losses_S = losses_S * weights_S.double()
        sizes_K = documents.sizes(weights_S)
        if self.mean == "tokens":
            return losses_S.sum() / sizes_K.sum()
        counted_K = sizes_K > 0
        means_K = documents.sums(losses_S) / torch.where(counted_K, sizes_K, 1.0)
        return means_K.sum() / counted_K.sum()

    def figures(
        self, logprobs_S: Tensor, references_S: Tensor | None, weights_S: Tensor | None, documents: Documents
    ) -> dict[str, Tensor]:
        """The mean ratio, the share of tokens that a clip leaves without a gradient, the KL divergence from the
        reference model where there is one, and that from the policy that sampled."""
        assert documents.recorded_S is not None and documents.advantages_S is not None, "checked before the step"
        old_S, advantages_S = documents.recorded_S.double(), documents.advantages_S.double()
        ratios_S = torch.exp(logprobs_S - old_S)
        found = {"ratio": ratios_S.mean(), "kl_recorded": divergences(old_S - logprobs_S).mean()}
        if self.clip:
            is_low_S = (ratios_S < 1 - self.clip_low) & (advantages_S < 0)
            is_high_S = (ratios_S > 1 + self.clip_high) & (advantages_S > 0)
            found["clip_ratio/low_mean"] = is_low_S.double().mean()
            found["clip_ratio/high_mean"] = is_high_S.double().mean()
            found["clip_ratio/region_mean"] = (is_low_S | is_high_S).double().mean()
        if references_S is not None:
            found["kl"] = divergences(references_S - logprobs_S).mean()
        return found


def divergences(differences_S: Tensor) -> Tensor:
    """The estimate exp(d) - d - 1 of the KL divergence at each token."""
    # expm1, because exp(d) - 1 loses its digits where the policies are still alike.
    return torch.expm1(differences_S) - differences_S

"""The losses of sessions, whose data comes with each call: sums over tokens, so that what several calls add up to does
not depend on how the tokens were divided among them.

With the ratio of the policy to the one that sampled, r_t = exp(log p_t - recorded_t), and the advantage A_t.

Shapes: S = supervised tokens of the call.
Source: the losses that Tinker names so (https://tinker-docs.thinkingmachines.ai/losses).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from horizon_server.engine.micro_batch import refused
from horizon_server.engine.objectives.objective import Documents, Objective, StepObjective
from horizon_server.engine.objectives.policy_gradient import divergences

_LOW, _HIGH = 0.8, 1.2


@dataclass(frozen=True, kw_only=True)
class SumCrossEntropy(Objective):
    """Cross-entropy as a sum::

        loss = - sum_t w_t log p_t

    Weights may have any sign: with minus the derivative of another loss by each log-probability, its gradient is that
    loss's. Training steps compute it in one pass over the logits, which gives the log-probabilities too.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"weights_S"})
    is_cross_entropy: ClassVar[bool] = True
    is_sum: ClassVar[bool] = True

    def _loss(
        self, logprobs_S: Tensor, references_S: Tensor | None, weights_S: Tensor | None, documents: Documents
    ) -> Tensor:
        assert weights_S is not None, "checked before the step"
        return -(weights_S.double() * logprobs_S).sum()


@dataclass(frozen=True, kw_only=True)
class _OfSamples(Objective):
    """What the losses of recorded samples have in common."""

    needs: ClassVar[frozenset[str]] = frozenset({"documents.recorded_S", "documents.advantages_S"})
    is_sum: ClassVar[bool] = True

    def figures(
        self, logprobs_S: Tensor, references_S: Tensor | None, weights_S: Tensor | None, documents: Documents
    ) -> dict[str, Tensor]:
        """The mean ratio, and the KL divergence from the policy that sampled, as `PolicyGradient` has them."""
        recorded_S, _ = _given(documents)
        return {
            "ratio": torch.exp(logprobs_S - recorded_S).mean(),
            "kl_recorded": divergences(recorded_S - logprobs_S).mean(),
        }


@dataclass(frozen=True, kw_only=True)
class SumImportanceSampling(_OfSamples):
    """Importance sampling: loss = - sum_t r_t A_t."""

    def _loss(
        self, logprobs_S: Tensor, references_S: Tensor | None, weights_S: Tensor | None, documents: Documents
    ) -> Tensor:
        recorded_S, advantages_S = _given(documents)
        return -(torch.exp(logprobs_S - recorded_S) * advantages_S).sum()


@dataclass(frozen=True, kw_only=True)
class SumClipped(_OfSamples):
    """PPO: loss = - sum_t min(r_t A_t, clip(r_t) A_t). CISPO (`detached`): loss = - sum_t c_t A_t log p_t, where c_t is
    clip(r_t) as a constant. The thresholds are of the ratio itself.

    Source: PPO, Schulman et al. (arXiv 1707.06347), equation 7; CISPO, MiniMax-M1 (arXiv 2506.13585), equation 4.
    """

    detached: bool = False
    clip_low_threshold: float = _LOW
    clip_high_threshold: float = _HIGH

    def check(self, step: StepObjective) -> None:
        """The low threshold is not above the high one. Raises: InvalidData."""
        if self.clip_low_threshold > self.clip_high_threshold:
            raise refused(
                "options.clip_low_threshold",
                f"is {self.clip_low_threshold:g}, above clip_high_threshold, which is {self.clip_high_threshold:g}; "
                "it must not be",
            )

    def _loss(
        self, logprobs_S: Tensor, references_S: Tensor | None, weights_S: Tensor | None, documents: Documents
    ) -> Tensor:
        recorded_S, advantages_S = _given(documents)
        ratios_S = torch.exp(logprobs_S - recorded_S)
        clipped_S = ratios_S.clamp(self.clip_low_threshold, self.clip_high_threshold)
        if self.detached:
            return -(clipped_S.detach() * advantages_S * logprobs_S).sum()
        return -torch.minimum(ratios_S * advantages_S, clipped_S * advantages_S).sum()

    def figures(
        self, logprobs_S: Tensor, references_S: Tensor | None, weights_S: Tensor | None, documents: Documents
    ) -> dict[str, Tensor]:
        """Also the shares of tokens that a clip leaves without a gradient, for CISPO with a smaller or larger one."""
        recorded_S, advantages_S = _given(documents)
        ratios_S = torch.exp(logprobs_S - recorded_S)
        is_low_S, is_high_S = ratios_S < self.clip_low_threshold, ratios_S > self.clip_high_threshold
        if not self.detached:
            is_low_S, is_high_S = is_low_S & (advantages_S < 0), is_high_S & (advantages_S > 0)
        return {
            **super().figures(logprobs_S, references_S, weights_S, documents),
            "clip_ratio/low_mean": is_low_S.double().mean(),
            "clip_ratio/high_mean": is_high_S.double().mean(),
            "clip_ratio/region_mean": (is_low_S | is_high_S).double().mean(),
        }


@dataclass(frozen=True, kw_only=True)
class SumDro(_OfSamples):
    """Direct reward optimisation: loss = - sum_t (A_t log p_t - beta / 2 (log p_t - recorded_t)^2).

    Source: DRO, Richemond et al. (arXiv 2405.19107), with the advantage in place of reward minus value.
    """

    beta: float = 0.05

    def _loss(
        self, logprobs_S: Tensor, references_S: Tensor | None, weights_S: Tensor | None, documents: Documents
    ) -> Tensor:
        recorded_S, advantages_S = _given(documents)
        away_S = logprobs_S - recorded_S
        return -(advantages_S * logprobs_S - 0.5 * self.beta * away_S.square()).sum()


def _given(documents: Documents) -> tuple[Tensor, Tensor]:
    """The recorded log-probabilities and the advantages. Shapes: [S], float64."""
    assert documents.recorded_S is not None and documents.advantages_S is not None, "checked before the step"
    return documents.recorded_S.double(), documents.advantages_S.double()


SESSION_LOSSES: dict[str, Callable[..., Objective]] = {
    "cross_entropy": SumCrossEntropy,
    "importance_sampling": SumImportanceSampling,
    "ppo": SumClipped,
    "cispo": partial(SumClipped, detached=True),
    "dro": SumDro,
}
"""By the loss's name in a call. Each takes the call's options."""

"""Learning from single answers that are labelled good or bad: KTO.

Shapes: K = documents of the step, S = supervised tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from horizon_server.engine.micro_batch import refused
from horizon_server.engine.objectives.objective import Documents, Objective, StepObjective

# Values of `Documents.labels_K`. A mismatched document joins a prompt with another prompt's completion: it estimates
# the KL term alone.
DESIRABLE, UNDESIRABLE, MISMATCHED = 1, 0, -1


@dataclass(frozen=True, kw_only=True)
class KTO(Objective):
    """Kahneman-Tversky optimisation. With the gain of a document against the reference model, r = log p(y) - log
    ref(y)::

        z0 = max(0, mean of r over the step's mismatched documents)
        loss = mean over the others of  desirable_weight (1 - sigmoid(beta (r - z0)))      where labelled desirable
                                        undesirable_weight (1 - sigmoid(beta (z0 - r)))    where labelled undesirable

    z0 estimates the KL divergence from the reference model and is not differentiated through. Mismatched documents are
    no part of the mean. They come in the same step, one for each document as TRL makes them or fewer; a step without
    any has z0 = 0, which is TRL without its KL term. The estimate is of the whole step, all micro-batches together,
    where TRL takes it over each of its batches.

    Source: Ethayarajh et al. (arXiv 2402.01306), equations 7 and 8, and section 4.1 for the estimate of z0.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"documents.labels_K", "references_S"})

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        assert self.beta > 0, "beta is positive"
        assert self.desirable_weight >= 0 and self.undesirable_weight >= 0, "weights are not negative"

    def check(self, step: StepObjective) -> None:
        """Labels are known ones, and not all documents are mismatched. Raises: InvalidData."""
        labels_K = step.documents.labels_K
        assert labels_K is not None, "checked before"
        known = torch.isin(labels_K, torch.tensor([DESIRABLE, UNDESIRABLE, MISMATCHED]))
        field = "objective.documents.labels_K"
        if not bool(known.all()):
            label = labels_K[~known][0].item()
            raise refused(
                field,
                f"holds {label}; labels are {DESIRABLE} (desirable), {UNDESIRABLE} (undesirable) and {MISMATCHED} "
                "(mismatched)",
            )
        if bool((labels_K == MISMATCHED).all()):
            raise refused(
                field, "has mismatched documents only; a step needs at least one that is desirable or undesirable"
            )

    def _loss(
        self, logprobs_S: Tensor, references_S: Tensor | None, weights_S: Tensor | None, documents: Documents
    ) -> Tensor:
        assert references_S is not None and documents.labels_K is not None, "checked before the step"
        gains_K = documents.log_probabilities(logprobs_S - references_S, weights_S, average=False)
        # Factors of 0 and 1, because selecting by value would wait for the device.
        mismatched_K = (documents.labels_K == MISMATCHED).double()
        desirable_K = documents.labels_K == DESIRABLE
        kl = _divergence(gains_K, mismatched_K)
        margins_K = torch.where(desirable_K, gains_K - kl, kl - gains_K)
        counted_K = 1 - mismatched_K
        factors_K = torch.where(desirable_K, self.desirable_weight * counted_K, self.undesirable_weight * counted_K)
        # 1 - sigmoid(x), without the cancellation.
        return (factors_K * torch.sigmoid(-self.beta * margins_K)).sum() / counted_K.sum()

    def figures(
        self, logprobs_S: Tensor, references_S: Tensor | None, weights_S: Tensor | None, documents: Documents
    ) -> dict[str, Tensor]:
        """The estimate of the KL divergence, and the rewards and log-probabilities of the answers by their label."""
        assert references_S is not None and documents.labels_K is not None, "checked before the step"
        gains_K = documents.log_probabilities(logprobs_S - references_S, weights_S, average=False)
        logps_K = documents.log_probabilities(logprobs_S, weights_S, average=False)
        found = {"kl": _divergence(gains_K, (documents.labels_K == MISMATCHED).double())}
        for name, label in (("chosen", DESIRABLE), ("rejected", UNDESIRABLE)):
            if bool((is_it_K := documents.labels_K == label).any()):
                found[f"rewards/{name}"] = self.beta * gains_K[is_it_K].mean()
                found[f"logps/{name}"] = logps_K[is_it_K].mean()
        if "rewards/chosen" in found and "rewards/rejected" in found:
            found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
        return found


def _divergence(gains_K: Tensor, mismatched_K: Tensor) -> Tensor:
    """The estimate of the KL divergence, without gradients; `mismatched_K` is 1 for mismatched documents, else 0.
    Shapes: []."""
    return ((gains_K.detach() * mismatched_K).sum() / mismatched_K.sum().clamp(min=1)).clamp(min=0)

"""Objectives that learn from pairs of a chosen and a rejected answer: DPO and its relatives, SimPO, ORPO.

Every loss is the mean over the pairs of a step. In all of them log p(y) is the sum of the log-probabilities of a
document's supervised tokens, and |y| their number; with token weights w, the sum of w_t log p_t and the sum of w_t.

Shapes: P = pairs of the step, K = documents, S = supervised tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from horizon_server.engine.micro_batch import refused
from horizon_server.engine.objectives.objective import Documents, Objective, StepObjective

PreferenceLoss = Literal["sigmoid", "hinge", "ipo"]


class PairedObjective(Objective):
    """An objective over pairs; both documents of each must have something to compare."""

    needs: ClassVar[frozenset[str]] = frozenset({"documents.pairs_P2"})
    averages: ClassVar[bool] = True
    """Whether the reported log-probabilities of an answer are averages over its tokens, or sums."""

    def figures(
        self, logprobs_S: Tensor, references_S: Tensor | None, weights_S: Tensor | None, documents: Documents
    ) -> dict[str, Tensor]:
        """Means over the pairs: rewards of chosen and rejected answers, how often and how far the chosen one's is
        higher, and their log-probabilities."""
        assert documents.pairs_P2 is not None, "checked before the step"
        rewards_K = self._rewards(logprobs_S, references_S, weights_S, documents)
        logps_K = documents.log_probabilities(logprobs_S, weights_S, average=self.averages)
        chosen_P, rejected_P = rewards_K[documents.pairs_P2].unbind(1)
        chosen_logps_P, rejected_logps_P = logps_K[documents.pairs_P2].unbind(1)
        return {
            "rewards/chosen": chosen_P.mean(),
            "rewards/rejected": rejected_P.mean(),
            "rewards/accuracies": (chosen_P > rejected_P).double().mean(),
            "rewards/margins": (chosen_P - rejected_P).mean(),
            "logps/chosen": chosen_logps_P.mean(),
            "logps/rejected": rejected_logps_P.mean(),
        }

    @abstractmethod
    def _rewards(
        self, logprobs_S: Tensor, references_S: Tensor | None, weights_S: Tensor | None, documents: Documents
    ) -> Tensor:
        """The implicit reward of each document. Shapes: [K]."""

    def check(self, step: StepObjective) -> None:
        """There are pairs, and both documents of each have something to compare. Raises: InvalidData."""
        pairs_P2 = step.documents.pairs_P2
        assert pairs_P2 is not None, "checked before"
        if not pairs_P2.numel():
            raise refused("objective.documents.pairs_P2", "is empty; a step needs at least one pair")
        sizes_P2 = step.documents.sizes(step.weights_S)[pairs_P2]
        if not bool((sizes_P2 > 0).all()):
            index = int((sizes_P2 <= 0).any(1).nonzero()[0, 0])
            raise refused(
                f"objective.documents.pairs_P2[{index}]",
                "has a document without a supervised token of positive weight, so that there is nothing to compare",
            )


@dataclass(frozen=True, kw_only=True)
class DPO(PairedObjective):
    """Direct preference optimisation. With the margin between chosen y_w and rejected y_l against the reference model::

        h = (log p(y_w) - log ref(y_w)) - (log p(y_l) - log ref(y_l))

        sigmoid   -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)     e: label_smoothing
        hinge     max(0, 1 - beta h)
        ipo       (h - 1 / (2 beta))^2

    `length_normalised` divides each log p(y) and log ref(y) by |y|. The paper of IPO sums; TRL's `ipo` averages, which
    is `length_normalised=True` here, and its `sigmoid_norm` is `sigmoid` with it.

    Source: Rafailov et al. (arXiv 2305.18290), equation 7; label smoothing: Mitchell, "A note on DPO with noisy
    preferences" (2023), equation 3; hinge: Zhao et al., SLiC-HF (arXiv 2305.10425), in the form of Liu et al., RSO
    (arXiv 2309.06657), equation 9; IPO: Azar et al. (arXiv 2310.12036), equation 17.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"documents.pairs_P2", "references_S"})
    averages: ClassVar[bool] = False

    beta: float = 0.1
    loss: PreferenceLoss = "sigmoid"
    label_smoothing: float = 0.0
    length_normalised: bool = False

    def __post_init__(self) -> None:
        assert self.beta > 0, "beta is positive"
        assert 0 <= self.label_smoothing < 0.5, "label_smoothing is the share of swapped labels, below one half"
        assert not self.label_smoothing or self.loss == "sigmoid", "label_smoothing is for the sigmoid loss"

    def _loss(
        self, logprobs_S: Tensor, references_S: Tensor | None, weights_S: Tensor | None, documents: Documents
    ) -> Tensor:
        assert references_S is not None and documents.pairs_P2 is not None, "checked before the step"
        # One difference per token first: the sums of two long documents are large and nearly equal.
        gains_K = documents.log_probabilities(logprobs_S - references_S, weights_S, average=self.length_normalised)
        chosen_P, rejected_P = gains_K[documents.pairs_P2].unbind(1)
        margins_P = chosen_P - rejected_P
        if self.loss == "hinge":
            return torch.relu(1 - self.beta * margins_P).mean()
        if self.loss == "ipo":
            return (margins_P - 1 / (2 * self.beta)).square().mean()
        return _log_loss(self.beta * margins_P, self.label_smoothing).mean()

    def _rewards(
        self, logprobs_S: Tensor, references_S: Tensor | None, weights_S: Tensor | None, documents: Documents
    ) -> Tensor:
        assert references_S is not None, "checked before the step"
        # Of sums also where the loss is of averages, as TRL reports them.
        return self.beta * documents.log_probabilities(logprobs_S - references_S, weights_S, average=False)


@dataclass(frozen=True, kw_only=True)
class SimPO(PairedObjective):
    """Preferences without a reference model, by average log-probabilities and a target margin gamma::

        h = beta / |y_w| log p(y_w) - beta / |y_l| log p(y_l) - gamma
        loss = -(1 - e) log sigmoid(h) - e log sigmoid(-h)                  e: label_smoothing

    Source: Meng et al. (arXiv 2405.14734), equation 6. TRL's `simpo_gamma` is this gamma.
    """

    beta: float = 2.0
    gamma: float = 0.5
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        assert self.beta > 0, "beta is positive"
        assert 0 <= self.label_smoothing < 0.5, "label_smoothing is the share of swapped labels, below one half"

    def _loss(
        self, logprobs_S: Tensor, references_S: Tensor | None, weights_S: Tensor | None, documents: Documents
    ) -> Tensor:
        assert documents.pairs_P2 is not None, "checked before the step"
        averages_K = documents.log_probabilities(logprobs_S, weights_S, average=True)
        chosen_P, rejected_P = averages_K[documents.pairs_P2].unbind(1)
        return _log_loss(self.beta * (chosen_P - rejected_P) - self.gamma, self.label_smoothing).mean()

    def _rewards(
        self, logprobs_S: Tensor, references_S: Tensor | None, weights_S: Tensor | None, documents: Documents
    ) -> Tensor:
        return self.beta * documents.log_probabilities(logprobs_S, weights_S, average=True)


@dataclass(frozen=True, kw_only=True)
class ORPO(PairedObjective):
    """Supervised fine-tuning on the chosen answers, with a penalty on the odds of the rejected ones::

        odds(y) = p / (1 - p)  with  log p = log p(y) / |y|
        loss = NLL(chosen) - lambda mean log sigmoid(log odds(y_w) - log odds(y_l))

    NLL is the mean over all supervised tokens of the chosen documents, so a token of a long answer counts as one of a
    short one. TRL's trainer (which calls lambda `beta`) takes it over the prompt's tokens too; here it is over what the
    data says is trained.

    Source: Hong et al. (arXiv 2403.07691), equations 3 to 7.
    """

    penalty: float = 0.1

    def __post_init__(self) -> None:
        assert self.penalty >= 0, "penalty is not negative"

    def _loss(
        self, logprobs_S: Tensor, references_S: Tensor | None, weights_S: Tensor | None, documents: Documents
    ) -> Tensor:
        nll, log_odds_P = self._parts(logprobs_S, weights_S, documents)
        return nll - self.penalty * functional.logsigmoid(log_odds_P).mean()

    def _parts(self, logprobs_S: Tensor, weights_S: Tensor | None, documents: Documents) -> tuple[Tensor, Tensor]:
        """The chosen answers' loss, and the logarithm of each pair's odds ratio. Shapes: [], [P]."""
        assert documents.pairs_P2 is not None, "checked before the step"
        sums_K, sizes_K = documents.log_probabilities(logprobs_S, weights_S, average=False), documents.sizes(weights_S)
        chosen_P = documents.pairs_P2[:, 0]
        nll = -sums_K[chosen_P].sum() / sizes_K[chosen_P].sum()
        averages_P2 = (sums_K / sizes_K)[documents.pairs_P2]
        # expm1, because 1 - p loses its digits where p is close to 1.
        log_odds_P2 = averages_P2 - torch.log(-torch.expm1(averages_P2))
        return nll, log_odds_P2[:, 0] - log_odds_P2[:, 1]

    def figures(
        self, logprobs_S: Tensor, references_S: Tensor | None, weights_S: Tensor | None, documents: Documents
    ) -> dict[str, Tensor]:
        """Those of all pairs, and both parts of the loss."""
        nll, log_odds_P = self._parts(logprobs_S, weights_S, documents)
        return {
            **super().figures(logprobs_S, references_S, weights_S, documents),
            "nll_loss": nll,
            "log_odds_ratio": functional.logsigmoid(log_odds_P).mean(),
            "log_odds_chosen": log_odds_P.mean(),
        }

    def _rewards(
        self, logprobs_S: Tensor, references_S: Tensor | None, weights_S: Tensor | None, documents: Documents
    ) -> Tensor:
        return self.penalty * documents.log_probabilities(logprobs_S, weights_S, average=True)


def _log_loss(margins_P: Tensor, label_smoothing: float) -> Tensor:
    """-log sigmoid of the margin, where `label_smoothing` is the probability that a pair's order is wrong."""
    right_P, wrong_P = functional.logsigmoid(margins_P), functional.logsigmoid(-margins_P)
    return -(1 - label_smoothing) * right_P - label_smoothing * wrong_P

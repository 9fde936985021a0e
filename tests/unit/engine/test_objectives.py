"""Each objective against its formula written out document by document, and what a step that does not fit is
answered."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from horizon_server.engine.micro_batch import IGNORED_LABEL, MicroBatch
from horizon_server.engine.objectives import (
    DESIRABLE,
    DPO,
    KTO,
    MISMATCHED,
    ORPO,
    UNDESIRABLE,
    Documents,
    PolicyGradient,
    SimPO,
    StepObjective,
    WeightedSFT,
)
from horizon_server.errors import InvalidData

# Supervised tokens of each document; one has none.
SIZES = (3, 5, 2, 4, 0, 6)
PAIRS = torch.tensor([[0, 1], [3, 2], [5, 2]])
LABELS = torch.tensor([DESIRABLE, UNDESIRABLE, MISMATCHED, DESIRABLE, UNDESIRABLE, MISMATCHED])
NUM_TARGETS = sum(SIZES)


def draw(seed: int, scale: float = 1.0) -> Tensor:
    """Log-probabilities of all tokens."""
    noise = torch.randn(NUM_TARGETS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return -scale * noise.abs() - 0.05


LOGPROBS, REFERENCES, RECORDED = draw(1), draw(2, 2.0), draw(1) + 0.3 * draw(3)
WEIGHTS = torch.rand(NUM_TARGETS, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
ADVANTAGES = torch.randn(NUM_TARGETS, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def documents(**known: Tensor) -> Documents:
    return Documents(num_targets_K=torch.tensor(SIZES), **known)


def parts(values: Tensor) -> list[list[float]]:
    """The values of each document."""
    return [part.tolist() for part in torch.split(values, list(SIZES))]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def scores(logprobs: Tensor, *, average: bool, weights: Tensor | None = None) -> list[float]:
    """Each document's sum or average of its tokens' log-probabilities."""
    found = []
    for own, weight in zip(
        parts(logprobs), parts(torch.ones(NUM_TARGETS) if weights is None else weights), strict=True
    ):
        total = sum(w * p for w, p in zip(weight, own, strict=True))
        found.append(total / sum(weight) if average and own else total)
    return found


def dpo(
    logprobs: Tensor, pair_loss: Callable[[float], float], *, average: bool = False, weights: Tensor | None = None
) -> float:
    policy, reference = (scores(values, average=average, weights=weights) for values in (logprobs, REFERENCES))
    margins = [(policy[w] - reference[w]) - (policy[r] - reference[r]) for w, r in PAIRS.tolist()]
    return sum(map(pair_loss, margins)) / len(margins)


def simpo(logprobs: Tensor) -> float:
    average = scores(logprobs, average=True)
    return sum(-math.log(sigmoid(2.5 * average[w] - 2.5 * average[r] - 0.7)) for w, r in PAIRS.tolist()) / len(PAIRS)


def orpo(logprobs: Tensor) -> float:
    average, pairs = scores(logprobs, average=True), PAIRS.tolist()
    odds = [math.exp(a) / (1 - math.exp(a)) if size else 0.0 for a, size in zip(average, SIZES, strict=True)]
    penalty = sum(-math.log(sigmoid(math.log(odds[w] / odds[r]))) for w, r in pairs) / len(pairs)
    chosen = [p for w, _ in pairs for p in parts(logprobs)[w]]
    return float(-sum(chosen) / len(chosen) + 0.3 * penalty)


def kto(logprobs: Tensor, *, has_kl: bool, fixed: Tensor = LOGPROBS) -> float:
    """The KL term is of `fixed`, because it is not differentiated through."""
    reference = scores(REFERENCES, average=False)
    gains = [p - r for p, r in zip(scores(logprobs, average=False), reference, strict=True)]
    fixed_gains = [p - r for p, r in zip(scores(fixed, average=False), reference, strict=True)]
    mismatched = [gain for gain, label in zip(fixed_gains, LABELS.tolist(), strict=True) if label == MISMATCHED]
    kl = max(0.0, sum(mismatched) / len(mismatched)) if has_kl else 0.0
    labelled = [(gain, label) for gain, label in zip(gains, LABELS.tolist(), strict=True) if label != MISMATCHED]
    good = [1.3 * (1 - sigmoid(0.2 * (gain - kl))) for gain, label in labelled if label == DESIRABLE]
    bad = [0.7 * (1 - sigmoid(0.2 * (kl - gain))) for gain, label in labelled if label == UNDESIRABLE]
    return (sum(good) + sum(bad)) / len(labelled)


def policy(
    logprobs: Tensor, *, clips: tuple[float, float] | None = None, kl: float = 0.0, by_document: bool = False
) -> float:
    losses = []
    for new, old, advantage, reference in zip(
        *(values.tolist() for values in (logprobs, RECORDED, ADVANTAGES, REFERENCES)), strict=True
    ):
        ratio = math.exp(new - old)
        gain = ratio * advantage
        if clips:
            gain = min(gain, min(max(ratio, 1 - clips[0]), 1 + clips[1]) * advantage)
        losses.append(-gain + kl * (math.exp(reference - new) - (reference - new) - 1))
    if not by_document:
        return float(sum(losses) / len(losses))
    means = [sum(own) / len(own) for own in parts(torch.tensor(losses, dtype=torch.float64)) if own]
    return float(sum(means) / len(means))


PAIRED, LABELLED = documents(pairs_P2=PAIRS), documents(labels_K=LABELS)
SAMPLED = documents(recorded_S=RECORDED, advantages_S=ADVANTAGES)
CASES: dict[str, tuple[StepObjective, Callable[[Tensor], float]]] = {
    "weighted sft": (
        StepObjective(objective=WeightedSFT(), documents=documents(), weights_S=WEIGHTS),
        lambda p: -float((WEIGHTS * p).sum() / WEIGHTS.sum()),
    ),
    "dpo": (
        StepObjective(objective=DPO(beta=0.3), documents=PAIRED, references_S=REFERENCES),
        lambda p: dpo(p, lambda h: -math.log(sigmoid(0.3 * h))),
    ),
    "dpo, smoothed, by length": (
        StepObjective(
            objective=DPO(beta=0.3, label_smoothing=0.1, length_normalised=True),
            documents=PAIRED,
            references_S=REFERENCES,
        ),
        lambda p: dpo(p, lambda h: -0.9 * math.log(sigmoid(0.3 * h)) - 0.1 * math.log(sigmoid(-0.3 * h)), average=True),
    ),
    "dpo, tokens weighted": (
        StepObjective(objective=DPO(beta=0.3), documents=PAIRED, references_S=REFERENCES, weights_S=WEIGHTS),
        lambda p: dpo(p, lambda h: -math.log(sigmoid(0.3 * h)), weights=WEIGHTS),
    ),
    "hinge": (
        StepObjective(objective=DPO(beta=0.3, loss="hinge"), documents=PAIRED, references_S=REFERENCES),
        lambda p: dpo(p, lambda h: max(0.0, 1 - 0.3 * h)),
    ),
    "ipo": (
        StepObjective(objective=DPO(beta=0.3, loss="ipo"), documents=PAIRED, references_S=REFERENCES),
        lambda p: dpo(p, lambda h: (h - 1 / 0.6) ** 2),
    ),
    "ipo, as TRL": (
        StepObjective(
            objective=DPO(beta=0.3, loss="ipo", length_normalised=True), documents=PAIRED, references_S=REFERENCES
        ),
        lambda p: dpo(p, lambda h: (h - 1 / 0.6) ** 2, average=True),
    ),
    "simpo": (StepObjective(objective=SimPO(beta=2.5, gamma=0.7), documents=PAIRED), simpo),
    "orpo": (StepObjective(objective=ORPO(penalty=0.3), documents=PAIRED), orpo),
    "kto": (
        StepObjective(
            objective=KTO(beta=0.2, desirable_weight=1.3, undesirable_weight=0.7),
            documents=LABELLED,
            references_S=REFERENCES,
        ),
        lambda p: kto(p, has_kl=True),
    ),
    "importance sampling": (StepObjective(objective=PolicyGradient(clip=False), documents=SAMPLED), policy),
    "ppo": (
        StepObjective(objective=PolicyGradient(clip_low=0.2, clip_high=0.3), documents=SAMPLED),
        lambda p: policy(p, clips=(0.2, 0.3)),
    ),
    "grpo": (
        StepObjective(
            objective=PolicyGradient(clip_low=0.2, clip_high=0.2, kl_coefficient=0.04, mean="documents"),
            documents=SAMPLED,
            references_S=REFERENCES,
        ),
        lambda p: policy(p, clips=(0.2, 0.2), kl=0.04, by_document=True),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_derivative_are_those_of_the_formula(name: str) -> None:
    step, formula = CASES[name]

    loss, gradient = step(LOGPROBS)

    assert loss.dtype == gradient.dtype == torch.float64
    assert float(loss) == pytest.approx(formula(LOGPROBS), rel=1e-12)
    for token in range(NUM_TARGETS):
        beyond, before = LOGPROBS.clone(), LOGPROBS.clone()
        beyond[token] += 1e-5
        before[token] -= 1e-5
        slope = (formula(beyond) - formula(before)) / 2e-5
        assert float(gradient[token]) == pytest.approx(slope, rel=1e-6, abs=1e-9), f"token {token}"


def test_the_kl_term_of_kto_is_at_work_in_these_numbers_and_is_zero_without_mismatched_documents() -> None:
    step, _ = CASES["kto"]
    assert kto(LOGPROBS, has_kl=True) != pytest.approx(kto(LOGPROBS, has_kl=False), rel=1e-3)
    lowered = LOGPROBS - 2
    assert float(step(lowered)[0]) == pytest.approx(kto(lowered, has_kl=False), rel=1e-12), "it is never below zero"

    labels = torch.tensor([DESIRABLE, UNDESIRABLE, DESIRABLE, DESIRABLE, UNDESIRABLE, UNDESIRABLE])
    loss, _ = step.objective(LOGPROBS, REFERENCES, None, documents(labels_K=labels))

    gains = [p - r for p, r in zip(*(scores(v, average=False) for v in (LOGPROBS, REFERENCES)), strict=True)]
    signs = [1 if label == DESIRABLE else -1 for label in labels.tolist()]
    weights = {1: 1.3, -1: 0.7}
    wanted = [weights[sign] * (1 - sigmoid(0.2 * sign * gain)) for gain, sign in zip(gains, signs, strict=True)]
    assert float(loss) == pytest.approx(sum(wanted) / len(wanted), rel=1e-12)


def test_at_the_start_dpo_has_the_logarithm_of_two_and_pushes_chosen_against_rejected() -> None:
    step = StepObjective(objective=DPO(beta=0.1), documents=documents(pairs_P2=PAIRS[:1]), references_S=LOGPROBS)

    loss, gradient = step(LOGPROBS)

    assert float(loss) == pytest.approx(math.log(2), rel=1e-15)
    assert gradient.tolist() == pytest.approx([-0.05] * 3 + [0.05] * 5 + [0.0] * 12, rel=1e-15)


def test_equal_weights_are_plain_cross_entropy() -> None:
    step = StepObjective(objective=WeightedSFT(), documents=documents(), weights_S=torch.full((NUM_TARGETS,), 2.0))

    loss, gradient = step(LOGPROBS)

    assert float(loss) == pytest.approx(-float(LOGPROBS.mean()), rel=1e-15)
    assert gradient.tolist() == [-1 / NUM_TARGETS] * NUM_TARGETS


def test_a_rejected_answer_that_is_certain_has_finite_odds() -> None:
    nearly_certain = LOGPROBS.clone()
    nearly_certain[3:8] = -1e-12

    loss, gradient = CASES["orpo"][0](nearly_certain)

    assert math.isfinite(loss)
    assert bool(torch.isfinite(gradient).all())


def rows() -> list[MicroBatch]:
    """Documents of 4, 3 and 5 tokens in two rows, of which 2, 0 and 4 are trained."""

    def row(lengths: tuple[int, ...], trained: list[int]) -> MicroBatch:
        labels = torch.full((sum(lengths),), IGNORED_LABEL)
        labels[trained] = 1
        positions = torch.cat([torch.arange(length) for length in lengths])
        return MicroBatch(
            input_ids_T=torch.ones(sum(lengths), dtype=torch.int64),
            position_ids_T=positions,
            labels_T=labels,
            document_lengths=lengths,
        )

    return [row((4, 3), [1, 2]), row((5,), [0, 1, 2, 3])]


def test_documents_are_read_off_the_rows() -> None:
    found = Documents.of(rows(), advantages_K=torch.tensor([1.5, 7.0, -2.0]))

    assert found.num_targets_K.tolist() == [2, 0, 4]
    assert found.advantages_S is not None
    assert found.advantages_S.tolist() == [1.5, 1.5, -2.0, -2.0, -2.0, -2.0]


SIX = torch.zeros(6)
REFUSED: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "references_S is missing; DPO needs it": (DPO(), {"pairs_P2": torch.tensor([[0, 2]])}, {}),
    "documents.pairs_P2 is missing; SimPO needs it": (SimPO(), {}, {}),
    "documents.labels_K is missing; KTO needs it": (KTO(), {}, {"references_S": SIX}),
    "weights_S is missing; WeightedSFT needs it": (WeightedSFT(), {}, {}),
    "references_S is missing; PolicyGradient needs it where kl_coefficient": (
        PolicyGradient(kl_coefficient=0.1),
        {"recorded_S": SIX, "advantages_S": SIX},
        {},
    ),
    r"references_S has shape \[5\]; it needs one number for each supervised token: \[6\]": (
        DPO(),
        {"pairs_P2": torch.tensor([[0, 2]])},
        {"references_S": SIX[:5]},
    ),
    r"labels_K has shape \[2\]; it needs one number for each document: \[3\]": (
        KTO(),
        {"labels_K": torch.tensor([1, 0])},
        {"references_S": SIX},
    ),
    "references_S holds a number that is not finite": (
        DPO(),
        {"pairs_P2": torch.tensor([[0, 2]])},
        {"references_S": SIX - torch.inf},
    ),
    "pairs_P2 must be pairs of document numbers from 0 to 2": (SimPO(), {"pairs_P2": torch.tensor([[0, 3]])}, {}),
    "pairs_P2 is empty": (SimPO(), {"pairs_P2": torch.zeros(0, 2, dtype=torch.int64)}, {}),
    r"pairs_P2\[1\] has a document without a supervised token": (
        SimPO(),
        {"pairs_P2": torch.tensor([[0, 2], [2, 1]])},
        {},
    ),
    r"pairs_P2\[0\] has a document without a supervised token of positive weight": (
        SimPO(),
        {"pairs_P2": torch.tensor([[0, 2]])},
        {"weights_S": torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0, 1.0])},
    ),
    "labels_K holds 2; labels are 1": (KTO(), {"labels_K": torch.tensor([1, 0, 2])}, {"references_S": SIX}),
    "labels_K has mismatched documents only": (
        KTO(),
        {"labels_K": torch.tensor([-1, -1, -1])},
        {"references_S": SIX},
    ),
    "weights_S must not be negative": (WeightedSFT(), {}, {"weights_S": SIX}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_the_step_is_refused_by_field(message: str) -> None:
    objective, known, given = REFUSED[message]
    step = StepObjective(objective=objective, documents=Documents.of(rows(), **known), **given)

    with pytest.raises(InvalidData, match=message) as caught:
        step.check(rows())
    assert caught.value.violations[0].field.startswith("objective.")


def test_documents_of_other_rows_and_advantages_of_another_number_are_refused() -> None:
    step = StepObjective(objective=SimPO(), documents=Documents.of(rows()[::-1], pairs_P2=torch.tensor([[0, 1]])))
    with pytest.raises(InvalidData, match="documents are not those of the rows"):
        step.check(rows())
    with pytest.raises(InvalidData, match="needs one number for each of 3 documents"):
        Documents.of(rows(), advantages_K=torch.zeros(2))

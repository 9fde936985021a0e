"""Figures that look like those of training: noisy losses that fall, evaluations, and answers that get better. The same
job says the same again."""

from __future__ import annotations

import hashlib
import math
import random
from typing import Any

from horizon_server.events import EvalAnswer, EvalDone
from horizon_server.figures import EvalSetFigures, StepFigures

_QUESTIONS = (
    ("Natalia sold clips to 48 friends in April, and half as many in May. How many did she sell in all?", "72"),
    ("Weng earns $12 an hour for babysitting. Yesterday she did 50 minutes of it. How much did she earn?", "10"),
    ("A robe takes 2 bolts of blue fibre and half that much white fibre. How many bolts does it take?", "3"),
    ("James writes a 3-page letter to 2 friends twice a week. How many pages does he write in a year?", "624"),
    ("Mark has 10 yellow flowers, 80 % more purple ones, and a quarter of both as many green ones. How many?", "35"),
    ("Ken put jelly beans into a box until it weighed 2 pounds, then tripled its weight. How much is it?", "6"),
)


def _chance(job: str, *what: object) -> random.Random:
    return random.Random(hashlib.sha256(f"{job} {what}".encode()).digest())


def step_figures(job: str, step: int, num_steps: int, spec: dict[str, Any], duration_s: float) -> dict[str, Any]:
    """Return the fields of a step beyond those that say where it is."""
    train, chance = spec["train"], _chance(job, step)
    share = step / num_steps
    warm = min(1.0, step / max(1, train["warmup_steps"]))
    noise = chance.gauss(0.0, 0.07) * (0.4 + math.exp(-4 * share))
    floor = 0.62 + 4e4 * abs(train["learning_rate"] - 2e-5)
    loss = floor + 1.75 * math.exp(-5.5 * share) + noise * 0.6
    is_pairs = spec["method"] in ("dpo", "ipo", "simpo", "orpo")
    margin = 2.4 * (1 - math.exp(-3.5 * share)) + chance.gauss(0.0, 0.16)
    figures: dict[str, Any] = {}
    if is_pairs:
        loss = math.log1p(math.exp(-margin))
        figures = {
            "rewards/margins": margin,
            "rewards/accuracies": min(1.0, max(0.0, 0.5 + margin / 5 + chance.gauss(0.0, 0.05))),
            "rewards/chosen": 0.3 * margin,
            "rewards/rejected": -0.7 * margin,
        }
    tokens = train["tokens_per_step"]
    return {
        "loss": loss,
        "grad_norm": 0.8 + 2.2 * math.exp(-6 * share) + abs(chance.gauss(0.0, 0.18)),
        "learning_rate": train["learning_rate"] * warm * (0.5 + 0.5 * math.cos(math.pi * share)),
        "num_tokens": tokens,
        "num_input_tokens_seen": tokens * step,
        "tokens_per_second": tokens / duration_s * (1 + chance.gauss(0.0, 0.015)),
        "overlap_ratio": min(1.0, 0.955 + chance.gauss(0.0, 0.012)),
        "method_figures": figures,
        "host_memory_bytes": {
            "weights": 10_518_528,
            "moments": 21_037_056,
            "gradients": 10_420_000,
            "activations": 1_980_000,
            "other": 431_000_000,
        },
    }


def evaluation(job: str, step: int, num_steps: int, figures: StepFigures) -> EvalDone:
    """Return an evaluation of two sets after a step, with answers to a few prompts."""
    share = step / num_steps
    loss = figures.loss * 0.9 + 0.14
    answers = tuple(_answer(job, i, share) for i in range(len(_QUESTIONS)))
    matches = sum(answer.matches for answer in answers)
    sets = (
        EvalSetFigures(
            name="eval",
            loss=loss,
            perplexity=math.exp(loss),
            accuracy=0.55 + 0.3 * share,
            num_targets=8000,
            num_correct=int(8000 * (0.55 + 0.3 * share)),
            num_answers=len(answers),
            num_matches=matches,
            exact_match=matches / len(answers),
        ),
    )
    return EvalDone(step=step, eval_loss=loss, num_targets=8000, sets=sets, answers=answers, judged=loss)


def _answer(job: str, document: int, share: float) -> EvalAnswer:
    question, right = _QUESTIONS[document]
    # Each is learned at a moment of its own.
    knows = share > 0.12 + 0.8 * _chance(job, document).random()
    found = right if knows else str(int(right) + 1 + _chance(job, document, share).randrange(20))
    reason = "Let me work it out step by step." if share < 0.3 else f"The numbers in the question give {found}."
    return EvalAnswer(
        document=document,
        prompt=question,
        answer=f"{reason}\n#### {found}",
        reference=f"Worked out from the question.\n#### {right}",
        found=found,
        expected=right,
        matches=knows,
        ended="stop",
    )

"""The section `eval` of a job: named sets, prompts to answer, and the figure that decides."""

from __future__ import annotations

from typing import Any

import pytest

from horizon_server.errors import InvalidSpec
from horizon_server.spec import JobSpec, parse_job_spec

JOB: dict[str, Any] = {"name": "j", "model": "m", "dataset": "d"}
SETS = {"gsm8k": "gsm", "general": "gen"}


def spec_of(evaluation: dict[str, Any], **more: Any) -> JobSpec:
    return parse_job_spec({**JOB, **more, "eval": evaluation})


def test_sets_are_the_main_one_and_then_the_named_ones_in_a_stable_order() -> None:
    assert spec_of({}).eval_sets == ()
    assert spec_of({"sets": SETS}).eval_sets == ("general", "gsm8k")
    assert spec_of({"sets": SETS}, eval_fraction=0.1).eval_sets == ("eval", "general", "gsm8k")
    spec = spec_of({"sets": SETS, "generate": {"set": "gsm8k"}, "best_by": "gsm8k.loss"}, eval_dataset="e")
    assert parse_job_spec(spec.to_mapping()) == spec


@pytest.mark.parametrize(("best_by", "is_high"), [("loss", False), ("gsm8k.loss", False), ("gsm8k.accuracy", True)])
def test_each_figure_has_its_direction(best_by: str, is_high: bool) -> None:
    evaluation = spec_of({"sets": SETS, "best_by": best_by}).eval
    assert evaluation.is_better(2.0, 1.0) is is_high
    assert evaluation.is_better(1.0, 2.0) is not is_high
    assert not evaluation.is_better(1.1, 1.0, by=0.2)
    assert not evaluation.is_better(float("nan"), 1.0)


@pytest.mark.parametrize(
    ("evaluation", "field", "problem"),
    [
        ({"sets": {"a b": "d"}}, "eval.sets", "a name must be 1 to 63 letters"),
        ({"sets": {"eval": "d"}}, "eval.sets", "choose another name"),
        ({"sets": {"a": "not a name"}}, "eval.sets.a", "it must be 1 to 63 letters"),
        ({"sets": ["d"]}, "eval.sets", "a mapping of up to 8 names"),
        ({"generate": {}}, "eval.generate.set", "'eval', which is not an eval set; there is none"),
        ({"sets": SETS, "generate": {}}, "eval.generate.set", "the sets are gsm8k, general"),
        ({"sets": SETS, "generate": 4}, "eval.generate", "must be a mapping"),
        ({"sets": SETS, "generate": {"set": "gsm8k", "answer": "[0-9]+"}}, "eval.generate.answer", "has no group"),
        (
            {"sets": SETS, "generate": {"set": "gsm8k", "answer": "(a"}},
            "eval.generate.answer",
            "not a regular expression",
        ),
        ({"sets": SETS, "generate": {"set": "gsm8k", "tokens": 4}}, "eval.generate.tokens", "is not a field"),
        ({"sets": SETS, "best_by": "accuracy"}, "eval.best_by", "it must be loss, SET.loss"),
        ({"sets": SETS, "best_by": "other.loss"}, "eval.best_by", "'other' is not an eval set"),
        ({"sets": SETS, "best_by": "gsm8k.exact_match"}, "eval.best_by", "set eval.generate with set: gsm8k"),
        ({"patience": 2}, "eval.patience", "there is no data for them"),
    ],
)
def test_what_cannot_be_is_refused_by_its_field(evaluation: dict[str, Any], field: str, problem: str) -> None:
    with pytest.raises(InvalidSpec, match=problem) as refused:
        spec_of(evaluation, eval_every_steps=5)
    assert [violation.field for violation in refused.value.violations] == [field]


@pytest.mark.parametrize("more", [{"method": "pretrain"}, {"train": {"train_on": "all"}}])
def test_without_a_prompt_nothing_can_be_answered(more: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpec, match=r"eval\.generate needs rows with a prompt and an answer"):
        spec_of({"sets": SETS, "generate": {"set": "gsm8k"}}, **more)


def test_what_evaluations_take_is_bounded() -> None:
    assert len(spec_of({"sets": {f"s{i}": "d" for i in range(8)}}).eval_sets) == 8
    for evaluation, field in (
        ({"sets": {f"s{i}": "d" for i in range(9)}}, "eval.sets"),
        ({"sets": SETS, "generate": {"set": "gsm8k", "prompts": 257}}, "eval.generate.prompts"),
        ({"sets": SETS, "generate": {"set": "gsm8k", "max_new_tokens": 4097}}, "eval.generate.max_new_tokens"),
        ({"sets": SETS, "generate": {"set": "gsm8k", "answer": "(a)" + 254 * "b"}}, "eval.generate.answer"),
    ):
        with pytest.raises(InvalidSpec) as refused:
            spec_of(evaluation)
        assert [violation.field for violation in refused.value.violations] == [field]

"""Regular expressions of users: what is refused, and that none takes the daemon's time or memory."""

from __future__ import annotations

import resource
import time
from contextlib import suppress

import pytest

from horizon_server.errors import InvalidSpec
from horizon_server.expressions import (
    MAX_NAME_CHARS,
    final_answer,
    fitting_names,
    problem_of,
    problem_with_extraction,
)

NAMES = [f"model.layers.{layer}.{part}" for layer in (0, 1, 11) for part in ("self_attn.q_proj.weight", "norm.bias")]


@pytest.mark.parametrize(
    ("expression", "number"),
    [
        ("norm", 3),
        (r"layers\.1[0-9]?\.", 4),
        (r"(?i)NORM\.(?:bias|weight)$", 3),
        (r"\.[0-9]{2}\.", 2),
        (r"q_proj|\(\?&", 3),
    ],
)
def test_an_expression_is_searched_for(expression: str, number: int) -> None:
    assert problem_of(expression) == ""
    assert len(fitting_names("train.x", expression, NAMES)) == number


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("a(", "missing )"),
        ("^(?!.*norm)", "invalid perl operator: (?!"),
        (r"(a)\1", r"invalid escape sequence: \1"),
        ("(?P<a>(?&a)|x)", "(?&"),
        ("a{2000}", "invalid repetition size: {2000}"),
        ("((a{100}){100}){100}", "invalid repetition size: {100}"),
    ],
)
def test_what_is_refused_is_named_with_the_reason(expression: str, words: str) -> None:
    assert words in problem_of(expression)
    assert repr(expression) in problem_of(expression)


@pytest.mark.parametrize(
    ("expression", "text", "answer"),
    [
        (r"#### (-?[0-9.,]+)", "6 + 6 = 12\n#### 12", "12"),
        (r"#### (-?[0-9.,]+)", "#### 12, no: #### -1,234.5", "-1234.5"),
        (r"(?i)answer:? *(.*)", "Answer: 3, 4 \nmore", "3, 4"),
        (r"(?m)^(\w+)$", "one\ntwo\n", "two"),
        (r"(a)|b", "a b", None),
        (r"(x)", "nothing", None),
    ],
)
def test_the_final_answer_is_the_group_of_the_last_match(expression: str, text: str, answer: str | None) -> None:
    assert problem_with_extraction(expression) == ""
    assert final_answer(expression, text) == answer


def test_an_answer_needs_a_group() -> None:
    assert "put parentheses around the part that is the answer" in problem_with_extraction("####")
    assert "missing )" in problem_with_extraction("#### (")


@pytest.mark.parametrize(
    "expression",
    [
        r"^(.|..|...)*[0-9]$",
        r"^(\w|\w\w|\.|\.\w)*[0-9]$",
        "(.)?" * 60 + "[!#]",
        r"\pL{100}",
        "(?:" * 60 + "a" + ")*" * 60,
    ],
)
def test_none_takes_long_or_much(expression: str) -> None:
    # Each of the first three takes minutes to years where a search goes back and tries again.
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started_s = time.process_time()
    assert problem_of(expression) == ""
    with suppress(InvalidSpec):
        fitting_names("train.x", expression, NAMES * 1000)
    final_answer(f"({expression})", "a1.!" * 20_000)
    assert time.process_time() - started_s < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 64 << 10


def test_of_a_long_name_the_beginning_counts() -> None:
    long = "x" * MAX_NAME_CHARS + "norm"
    assert fitting_names("train.x", "norm", [long, "norm"]) == ["norm"]


def test_an_expression_that_fits_nothing_is_named_with_examples() -> None:
    with pytest.raises(InvalidSpec) as caught:
        fitting_names("train.x", "experts", NAMES)
    assert caught.value.violations[0].field == "train.x"
    assert caught.value.violations[0].description == (
        "train.x: 'experts' fits none of the model's 6 tensors, whose names are such as "
        "model.layers.0.self_attn.q_proj.weight, model.layers.1.self_attn.q_proj.weight, "
        "model.layers.11.self_attn.q_proj.weight"
    )

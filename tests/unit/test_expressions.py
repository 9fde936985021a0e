"""Regular expressions of users: what is refused, and that none takes the daemon's time or memory."""

from __future__ import annotations

import resource
import time
from contextlib import suppress

import pytest

from horizon_server.errors import InvalidSpec
from horizon_server.expressions import MAX_NAME_CHARS, MAX_REPETITIONS, fitting_names, problem_of

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
        ("a(", "unclosed group"),
        ("^(?!.*norm)", "look-around, including look-ahead and look-behind, is not supported"),
        (r"(a)\1", "backreferences are not supported"),
        ("(?P<a>(?&a)|x)", "unrecognized flag"),
        ("a{4294967290}", "whose counts in {} multiply to 4294967290; at most 100 are allowed"),
        ("((a{100}){100}){100}", "multiply to 1000000; at most 100 are allowed"),
        ("(a{10,}){,11}", "multiply to 110"),
    ],
)
def test_what_is_refused_is_named_with_the_reason(expression: str, words: str) -> None:
    assert words in problem_of(expression)
    assert repr(expression) in problem_of(expression)


def test_counts_are_bounded_together() -> None:
    assert problem_of(f"a{{{MAX_REPETITIONS}}}") == ""
    assert f"at most {MAX_REPETITIONS}" in problem_of(f"a{{{MAX_REPETITIONS + 1}}}")


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
        "train.x: 'experts' fits none of the model's 6 tensors, whose names are such as model.layers.0.self_attn.q_proj.weight, "
        "model.layers.1.self_attn.q_proj.weight, model.layers.11.self_attn.q_proj.weight"
    )

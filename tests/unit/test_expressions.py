"""Regular expressions of users: what is refused, and that none takes the daemon's time or memory."""

from __future__ import annotations

import time

import pytest

from horizon_server import expressions
from horizon_server.errors import InvalidSpec
from horizon_server.expressions import MAX_NAME_CHARS, MAX_REPETITIONS, fitting_names, problem_of

NAMES = [f"model.layers.{layer}.{part}" for layer in (0, 1, 11) for part in ("self_attn.q_proj.weight", "norm.bias")]
# A million ways to give the groups their letters, each tried for the reference.
FOREVER = "(.)?" * 23 + r"\1[!#]"


@pytest.mark.parametrize(
    ("expression", "number"),
    [
        ("norm", 3),
        (r"layers\.1[0-9]?\.", 4),
        (r"(?i)NORM\.(?:bias|weight)$", 3),
        (r"^(?!.*norm).*(?<=proj)\.weight", 3),
        (r"\.[0-9]{2}\.", 2),
        (r"q_proj|\(\?&", 3),
    ],
)
def test_an_expression_is_searched_for(expression: str, number: int) -> None:
    assert problem_of(expression) == ""
    (found,) = fitting_names("train.x", [expression], NAMES)
    assert len(found) == number


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("a(", "is not a regular expression: missing )"),
        ("(?P<a>(?&a)|x)", "only (?:, (?=, (?!, (?<=, (?<! and (?i) are allowed, not '(?P<'"),
        ("(a(?R)?b)", "not '(?R)'"),
        ("(?b)(?:norm){e<=3}", "not '(?b)'"),
        ("(?:norm){e<=3}", "only numbers are allowed in {}, not 'e<=3'"),
        (r"\p{Lu}", "only numbers are allowed in {}"),
        ("(*SKIP)a", "not '(*SK'"),
        ("((((((a{100}){100}){100}){100}){100}){100}){100}", "multiply to 100000000000000; at most 1000 are allowed"),
        ("(a{10,}){,101}", "multiply to 1010"),
    ],
)
def test_what_could_take_all_memory_is_refused(expression: str, words: str) -> None:
    assert words in problem_of(expression)
    assert repr(expression) in problem_of(expression)


def test_counts_are_bounded_together() -> None:
    assert problem_of(f"a{{{MAX_REPETITIONS}}}") == ""
    assert f"at most {MAX_REPETITIONS}" in problem_of(f"a{{{MAX_REPETITIONS + 1}}}")


def test_an_expression_that_takes_forever_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expressions, "TIMEOUT_S", 0.1)
    started_s = time.monotonic()
    with pytest.raises(
        InvalidSpec, match=r"takes too long to compare with the tensors' names; write it without nested"
    ):
        # Together, not each.
        fitting_names("train.x", ["norm", *[FOREVER] * 50], NAMES)
    assert time.monotonic() - started_s < 5


def test_of_a_long_name_the_beginning_counts() -> None:
    long = "x" * MAX_NAME_CHARS + "norm"
    assert fitting_names("train.x", ["norm"], [long, "norm"]) == [["norm"]]


def test_an_expression_that_fits_nothing_is_named_with_examples() -> None:
    with pytest.raises(InvalidSpec) as caught:
        fitting_names("train.x", ["experts"], NAMES)
    assert caught.value.violations[0].field == "train.x"
    assert caught.value.violations[0].description == (
        "train.x: 'experts' fits none of the model's 6 tensors, whose names are such as model.layers.0.self_attn.q_proj.weight, "
        "model.layers.1.self_attn.q_proj.weight, model.layers.11.self_attn.q_proj.weight"
    )

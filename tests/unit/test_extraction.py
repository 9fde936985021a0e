"""Final answers found in texts: equal to Python's own `re`, and in bounded steps where that never ends."""

from __future__ import annotations

import random
import re
import time

import pytest

from horizon_server.expressions import problem_of
from horizon_server.extraction import final_answer, problem_with_extraction

EXPRESSIONS = [
    r"#### (-?[0-9.,]+)", r"(\d+)", r"(a|ab)(c|bcd)?", r"(a*?)b", r"(?:x|(a+))b", r"(?i)answer:? (\w+)",
    r"(?m)^(\w+)$",
    r"boxed\{(.*?)\}", r"\b(a{2,3})\b", r"([^ab]*)", r"(?s)(a.*)b", r"\s(\S+?)", r"((?:ab){1,2})", r"(?:a|b)*?(c)",
    r"(?i)([^a]+)", r"\B(b)",
]  # fmt: skip


def _by_python(expression: str, text: str) -> str | None:
    found = list(re.finditer(expression, text))
    last = found[-1] if found else None
    if last is None or last.group(1) is None:
        return None
    return re.sub(r"(?<=[0-9]),(?=[0-9])", "", last.group(1).strip())


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_the_last_match_is_that_of_re(expression: str) -> None:
    assert problem_of(expression) == "" == problem_with_extraction(expression)
    draw = random.Random(expression)
    texts = ["", "#### 12", "so 3 and\n#### -1,234.5", "Answer: Yes answer no", r"\boxed{7} and \boxed{x=1}"]
    texts += ["".join(draw.choices("abcABx 1,\n{}", k=draw.randrange(12))) for _ in range(400)]
    for text in texts:
        assert final_answer(expression, text) == _by_python(expression, text), text


def test_commas_in_numbers_and_white_space_do_not_count() -> None:
    assert final_answer(r"#### (.+)", "#### 1,234,567 ") == "1234567"
    assert final_answer(r"#### (.+)", "#### yes, sir") == "yes, sir"


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        (r"[0-9]+", "has no group"),
        (r"(?:a", "is not understood"),
        (r"(a)(?=b)", "cannot be searched for"),
        (r"(a)\1", "cannot be searched for"),
        (r"(\p{L})", "is not understood"),
        (r"((?:a{100}){100})", "is too large"),
    ],
)
def test_what_cannot_be_run_is_refused(expression: str, problem: str) -> None:
    assert problem in problem_with_extraction(expression)


@pytest.mark.parametrize("expression", [r"(?:a*)*(b)", r"(?:(?:a|a)+)+(b)", r"(a*a*a*a*a*a*b)"])
def test_an_expression_that_backtracks_for_ever_ends(expression: str) -> None:
    began_s = time.monotonic()
    final_answer(expression, "a" * 3000)
    assert time.monotonic() - began_s < 60

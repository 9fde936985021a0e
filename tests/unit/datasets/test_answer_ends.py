"""The tokens that end trained answers, as a preparation finds them: which rows say it, and which do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.datasets.test_prepare import CHAT, request_for, run, write
from tests.unit.datasets.test_prepare_answers import labelled, pair, sample

from horizon_server.datasets.tokens.codec import TextCodec

END = {"<|im_end|>": 2}
PAIRS = [{"prompt": f"Say {number}.", "completion": f"{number}!"} for number in range(4)]
QUESTION_LAST = {"messages": [*CHAT, {"role": "user", "content": "And?"}]}


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        ([{"messages": CHAT}], {}),
        ([{"messages": CHAT}], {"train_on": "all"}),
        ([{"messages": CHAT}], {"method": "pretrain"}),
        ([QUESTION_LAST], {}),
        (PAIRS, {}),
        # The template's line break is trained behind the token, too.
        ([pair(number) for number in range(3)], {}),
        ([labelled(number) for number in range(3)], {}),
        ([{"input_ids": [9, 8, 7, 2], "labels": [-100, -100, 7, 2]}], {}),
        ([{"tokens": [9, 8, 7, 2], "logprobs": [-1, -2], "advantage": 1, "prompt_length": 2}], {}),
    ],
)
def test_answers_end_with_the_token_that_closes_them(
    demo_model: Path, tmp_path: Path, rows: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    report, _ = run(request_for(demo_model, write(tmp_path / "data.jsonl", *rows), **options))
    assert report.answer_ends == END


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        ([{"text": "One of many texts."}], {}),
        ([{"text": "A text that spells it.<|im_end|>"}], {}),
        ([QUESTION_LAST], {"train_on": "all"}),
        # Cut before its end.
        ([{"messages": CHAT}], {"sequence_length": 16}),
        ([sample(number) for number in range(3)], {}),
        ([{"input_ids": [9, 8, 7, 2], "labels": [9, 8, 7, 2]}], {}),
    ],
)
def test_what_is_no_answer_or_has_no_end_says_nothing(
    demo_model: Path, tmp_path: Path, rows: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    report, _ = run(request_for(demo_model, write(tmp_path / "data.jsonl", *rows), **options))
    assert report.answer_ends == {}


def test_a_token_that_closes_few_answers_is_no_end(demo_model: Path, tmp_path: Path) -> None:
    def answer(end: int) -> dict[str, Any]:
        return {"input_ids": [9, 8, 7, end], "labels": [-100, -100, 7, end]}

    # 3 closes 1 of 11 answers, 0 closes 2 of 11.
    rows = [answer(2)] * 8 + [answer(3)] + [answer(0)] * 2
    report, _ = run(request_for(demo_model, write(tmp_path / "few.jsonl", *rows)))
    assert report.answer_ends == {"<|endoftext|>": 0, "<|im_end|>": 2}


def test_rows_that_are_held_out_do_not_count(demo_model: Path, tmp_path: Path) -> None:
    request = request_for(demo_model, write(tmp_path / "data.jsonl", *PAIRS), eval_fraction=0.5)
    report, _ = run(request)
    assert 0 < report.eval_rows < report.rows
    assert report.answer_ends == END


def test_special_tokens_and_white_space_are_told_apart(demo_model: Path) -> None:
    codec = TextCodec.from_folder(demo_model)
    assert codec.special_ids == {0, 1, 2, 3}
    (line_break,) = codec.encode_ids("\n")
    (word,) = codec.encode_ids("x")
    assert (codec.is_blank(line_break), codec.is_blank(word), codec.is_blank(2)) == (True, False, False)

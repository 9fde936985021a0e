"""Prompts of `horizon checkpoint sample`: what a file may hold, and how answers come together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from horizon_client.cli.sampling import answer_text, answers, printable, read_prompts
from horizon_client.errors import BadFile
from horizon_client.reporter import Reporter
from horizon_client.resources import SampledText, SampleFigures


class Noted(Reporter):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def notice(self, text: str) -> None:
        self.texts.append(text)


def test_texts_and_chats_are_read(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "one"}\n\n{"messages": [{"role": "user", "content": "two", "weight": 1}]}\n', encoding="utf-8"
    )
    assert read_prompts(file) == ["one", [{"role": "user", "content": "two"}]]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"text": "a"}',
        '{"prompt": 3}',
        '{"prompt": "a", "messages": []}',
        '{"messages": [{"role": "user"}]}',
    ],
)
def test_a_line_that_is_no_prompt_is_named(line: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "one"}}\n{line}\n', encoding="utf-8")
    with pytest.raises(BadFile, match=r'prompts.jsonl:2 is not .*write \{"prompt"'):
        read_prompts(file)


def test_an_answer_comes_when_it_is_complete() -> None:
    def piece(prompt: int, text: str, ended: str = "") -> SampledText:
        return SampledText(prompt=prompt, text=text, num_tokens=2, ended=ended)

    figures = SampleFigures(
        num_prompt_tokens=3, num_tokens=4, load_s=1.0, duration_s=2.0, tokens_per_second=2.0, weights="tiny in nf4"
    )
    noted = Noted()
    pieces: list[Any] = [piece(0, "a"), piece(1, "x", "stop"), piece(0, "b", "length"), figures]
    chat = [{"role": "user", "content": "why?"}]

    found = list(answers(pieces, ["one", chat], noted))

    assert found == [
        {"index": 1, "messages": chat, "answer": "x", "num_tokens": 2, "ended": "stop"},
        {"index": 0, "prompt": "one", "answer": "ab", "num_tokens": 2, "ended": "length"},
    ]
    assert answer_text(found[0]) == "[1] why?\n--> x\n"
    assert "2.0 tokens/s" in noted.texts[0] and noted.texts[1] == "answered with tiny in nf4"


def test_a_model_cannot_control_the_terminal() -> None:
    assert printable("a\x1b[31m\n\tb\u202e") == "a[31m\n\tb"

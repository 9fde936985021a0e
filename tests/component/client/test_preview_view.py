"""Rendered rows on a terminal and elsewhere."""

from __future__ import annotations

import io
import sys
from typing import get_args

import click
import pytest

from horizon_client import Client, InvalidRequest
from horizon_client.choices import METHODS
from horizon_client.cli.preview_page import preview_page
from horizon_client.resources import DatasetPreview, PreviewRow, PreviewSpan
from horizon_server.spec import Method


def preview(*spans: PreviewSpan, num_documents: int = 1, problems: tuple[str, ...] = ()) -> DatasetPreview:
    row = PreviewRow(
        file="a.txt",
        unit="piece",
        number=2,
        spans=spans,
        num_tokens=1500,
        num_trained_tokens=7,
        num_cut_tokens=20,
        num_documents=num_documents,
        clipped=True,
        problems=problems,
        part="",
    )
    return DatasetPreview(
        rows=(row,), num_rows=9, format="text", method="pretrain", train_on="all", sequence_length=1500
    )


def test_a_preview_is_offered_for_every_method() -> None:
    assert get_args(Method) == METHODS


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def span(text: str, *, trained: bool, weight: float | None = None) -> PreviewSpan:
    return PreviewSpan(text=text, trained=trained, weight=weight)


SPANS = (span("first\x1b[31m\n", trained=False), span("second", trained=True))


@pytest.mark.parametrize(
    ("no_colour", "expected"), [("", "first[31m\n\x1b[32msecond\x1b[0m\n"), ("1", "first[31m\n[[second]]\n")]
)
def test_a_terminal_gets_colour_unless_no_color_is_set(
    monkeypatch: pytest.MonkeyPatch, no_colour: str, expected: str
) -> None:
    monkeypatch.setenv("NO_COLOR", no_colour)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    click.echo(preview_page("notes", preview(*SPANS)))
    assert expected in terminal.getvalue(), "and the data cannot control the terminal"


def test_what_is_not_shown_or_not_trained_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    click.echo(preview_page("notes", preview(*SPANS, num_documents=3, problems=("line[2] has no trainable token",))))
    lines = capsys.readouterr().out.splitlines()
    assert "--- a.txt piece 2: 1,500 tokens, 7 trained, in 3 documents ---" in lines
    assert lines[-3:] == [
        "... the row is longer; only its beginning is shown",
        "... 20 more tokens are beyond the sequence length: not trained, not shown",
        "not trained: line[2] has no trainable token",
    ]


def test_a_weight_follows_what_it_weighs(capsys: pytest.CaptureFixture[str]) -> None:
    click.echo(preview_page("notes", preview(*SPANS, span("third", trained=True, weight=0.3))))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "trained text is between [[ and ]]; the number after * is its weight, where that is not 1"
    assert "[[second]][[third]]*0.3" in lines


def pair() -> DatasetPreview:
    rows = [
        PreviewRow(
            file="pairs.jsonl",
            unit="line",
            number=3,
            num_tokens=9,
            num_trained_tokens=4,
            num_cut_tokens=cut,
            num_documents=1,
            clipped=False,
            problems=(),
            part=part,
            spans=(span("Why?\n", trained=False), span(text, trained=True)),
        )
        for part, text, cut in (("chosen", "Because of \u6797.", 0), ("rejected", "So " * 20, 5))
    ]
    return DatasetPreview(
        rows=tuple(rows), num_rows=9, format="preference", method="dpo", train_on="assistant", sequence_length=64
    )


def test_answers_that_are_compared_follow_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    click.echo(preview_page("pairs", pair()))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "pairs: 9 rows, preference; sequence_length 64", "all methods train the answers"
    assert lines[3:] == [
        "--- pairs.jsonl line 3, chosen: 9 tokens, 4 trained ---",
        "Why?",
        "[[Because of \u6797.]]",
        "",
        "--- pairs.jsonl line 3, rejected: 9 tokens, 4 trained ---",
        "Why?",
        f"[[{'So ' * 20}]]",
        "... 5 more tokens are beyond the sequence length: not trained, not shown",
    ]


def test_a_wide_terminal_has_them_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "118")
    monkeypatch.setenv("NO_COLOR", "1")
    lines = preview_page("pairs", pair()).splitlines()[3:]
    assert lines == [
        "--- pairs.jsonl line 3 ---",
        "chosen: 9 tokens, 4 trained                                 rejected: 9 tokens, 4 trained",
        "Why?                                                        Why?",
        "[[Because of \u6797.]]                                          [[So So So So So So So So So So So So So So "
        "So So So So ]]",
        "                                                            [[So So ]]",
        "                                                            ... 5 more tokens are beyond the sequence length: "
        "not",
        "                                                            trained, not shown",
    ]
    monkeypatch.delenv("NO_COLOR")
    assert "\x1b[32mBecause of \u6797.\x1b[0m" in preview_page("pairs", pair())
    monkeypatch.setenv("COLUMNS", "99")
    assert "--- pairs.jsonl line 3, rejected: 9 tokens, 4 trained ---" in preview_page("pairs", pair())


def test_wrong_options_are_refused_with_their_field(client: Client) -> None:
    for field, options in (
        ("num_rows", {"num_rows": 0}),
        ("offset", {"offset": -1}),
        ("sequence_length", {"sequence_length": 0}),
        ("train_on", {"train_on": "user"}),
        ("method", {"method": "rlhf"}),
    ):
        with pytest.raises(InvalidRequest, match=f"^{field} is ") as caught:
            client.datasets.preview("sums", model="tiny", **options)
        assert [violation.field for violation in caught.value.violations] == [field]

"""Prompts of `horizon checkpoint sample`: what a file may hold, and how answers come together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from horizon_client.cli.sampling import answer_text, answers, printable, read_prompts, with_system
from horizon_client.errors import BadFile
from horizon_client.prompts import _prompt as sample_prompt
from horizon_client.reporter import Reporter
from horizon_client.resources import SampledText, SampleFigures

NO_TOKENS: dict[str, Any] = {"sample": 0, "tokens": (), "texts": (), "logprobs": (), "top": ()}


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


TOOLS = [{"type": "function", "function": {"name": "weather"}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
ASKED = {"role": "user", "content": "Rome?"}
CALLED = [
    ASKED,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "20 C"},
]


@pytest.mark.parametrize("chat", [{"messages": [ASKED], "tools": TOOLS}, {"messages": CALLED}])
def test_tools_and_their_calls_stay(chat: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(chat | {"other": 1}), encoding="utf-8")
    [prompt] = read_prompts(file)
    assert prompt == chat
    sent = sample_prompt("prompts[0]", prompt)
    assert (sent.text, list(sent.messages)) == ("", [])
    assert json.loads(sent.chat_json) == {"tools": None, **chat}
    said = [SampledText(prompt=0, text="x", num_tokens=1, ended="stop", **NO_TOKENS)]
    [found] = answers(said, [prompt], Noted())
    assert found == {"index": 0, **chat, "answer": "x", "num_tokens": 1, "ended": "stop"}
    assert answer_text(found).startswith("[0] ")


def test_a_plain_chat_is_sent_as_every_daemon_knows_it(tmp_path: Path) -> None:
    chats: list[Any] = [[ASKED], {"messages": [{**ASKED, "weight": 0, "name": None}], "tools": []}]
    for chat in chats:
        sent = sample_prompt("prompts[0]", chat)
        assert [(message.role, message.content) for message in sent.messages] == [("user", "Rome?")]
        assert sent.chat_json == ""


def test_columns_of_other_names_are_mapped(tmp_path: Path) -> None:
    file = tmp_path / "raw.jsonl"
    file.write_text('{"question": "2+2?", "prompt": "no", "answer": "4"}\n', encoding="utf-8")
    assert read_prompts(file, {"prompt": "question"}) == ["2+2?"]
    with pytest.raises(
        BadFile, match=r"raw\.jsonl:1 is not a prompt \(it has answer, prompt, question; --map prompt=COLUMN"
    ):
        read_prompts(file, {"prompt": "asked"})
    with pytest.raises(BadFile, match=r"--map answer=\.\.\.: a prompt has the fields prompt, messages, tools"):
        read_prompts(file, {"answer": "answer"})


def test_a_system_message_comes_first() -> None:
    system = {"role": "system", "content": "Be brief."}
    assert with_system("2+2?", "Be brief.") == [system, {"role": "user", "content": "2+2?"}]
    assert with_system([ASKED], "Be brief.") == [system, ASKED]
    assert with_system({"messages": CALLED}, "Be brief.") == {"messages": [system, *CALLED]}
    with pytest.raises(BadFile, match="has a system message already"):
        with_system([system, ASKED], "Be brief.")


def test_a_defect_of_a_chat_is_named(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        json.dumps({"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]}), encoding="utf-8"
    )
    with pytest.raises(
        BadFile, match=r"prompts\.jsonl:1 is not a prompt: messages\[0\]\.tool_calls is given, but only"
    ):
        read_prompts(file)


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
        return SampledText(prompt=prompt, text=text, num_tokens=2, ended=ended, **NO_TOKENS)

    figures = SampleFigures(
        num_prompt_tokens=3,
        num_tokens=4,
        load_s=1.0,
        duration_s=2.0,
        tokens_per_second=2.0,
        weights="tiny in nf4",
        num_passes=2,
        num_shared_passes=0,
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


def test_the_time_that_a_caller_waited_is_said() -> None:
    for load_s, end_s, wanted in (
        (5.0, 7.2, "tokens/s), after 5.0 s to load"),
        (5.0, 10.0, "tokens/s), after 5.0 s to load and 3.0 s of waiting"),
        # Of a model that was in memory already.
        (0.0, 2.2, "tokens/s)"),
        (0.0, 5.0, "tokens/s), after 3.0 s of waiting"),
    ):
        figures = SampleFigures(
            num_prompt_tokens=3,
            num_tokens=4,
            load_s=load_s,
            duration_s=2.0,
            tokens_per_second=2.0,
            weights="",
            num_passes=2,
            num_shared_passes=1,
        )
        times, noted = iter((100.0, 100.0 + end_s)), Noted()
        assert list(answers([figures], [], noted, clock=times.__next__)) == []
        assert noted.texts[0].endswith(wanted)


def test_a_model_cannot_control_the_terminal() -> None:
    assert printable("a\x1b[31m\n\tb\u202e") == "a[31m\n\tb"

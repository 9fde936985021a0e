"""Calls of tools in the text of an answer, whole and streamed in pieces of every size."""

from __future__ import annotations

import json
from typing import Any

import pytest

from horizon_server.api.openai.chat import Chunks
from horizon_server.api.openai.prompts import ChatBody
from horizon_server.api.openai.tool_calls import calls_in
from horizon_server.events import SampledText
from horizon_server.records.sample import SampleFigures

TOOLS = [{"type": "function", "function": {"name": "weather"}}]
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
OSLO = '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}</tool_call>'
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "?"}]}


def call(city: str) -> dict[str, str]:
    return {"name": "weather", "arguments": json.dumps({"city": city})}


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        ("It rains.", "It rains.", []),
        (ROME, "", [call("Rome")]),
        (f"I look.\n{ROME}\n{OSLO}", "I look.", [call("Rome"), call("Oslo")]),
        ("<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", []),
        ("<tool_call>{oops}</tool_call>", "<tool_call>{oops}</tool_call>", []),
        ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
        ('<tool_call>{"name": "now"}</tool_call>', "", [{"name": "now", "arguments": "{}"}]),
        ("<tool_call>", "<tool_call>", []),
        ("a <b", "a <b", []),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_stream_says_what_the_whole_says(text: str, said: str, calls: list[dict[str, str]], size: int) -> None:
    assert calls_in(text) == (said, calls)
    chunks = Chunks(ChatBody.model_validate({**BODY, "tools": TOOLS, "stream": True, "logprobs": True}))
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    events: list[dict[str, Any]] = []
    for number, piece in enumerate(pieces, 1):
        ended = "stop" if number == len(pieces) else ""
        line = SampledText(
            prompt=0, text=piece, num_tokens=number, ended=ended, tokens=(7,), texts=(piece,), logprobs=(-1.0,)
        )
        events += chunks.of(line)
    choices = [event["choices"][0] for event in events]
    assert "".join(choice["delta"].get("content") or "" for choice in choices).rstrip() == said
    found = [one for choice in choices for one in choice["delta"].get("tool_calls", ())]
    assert [one["function"] for one in found] == calls
    assert [one["index"] for one in found] == list(range(len(calls)))
    assert [choice["finish_reason"] for choice in choices][-1] == ("tool_calls" if calls else "stop")
    tokens = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["content"]]
    assert "".join(token["token"] for token in tokens) == text, "no token is lost while its text is held back"


def test_without_tools_such_a_text_is_a_text() -> None:
    for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        chunks = Chunks(ChatBody.model_validate({**BODY, **options}))
        events = chunks.of(SampledText(prompt=0, text=ROME, num_tokens=1, ended="stop"))
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == ROME


def test_usage_comes_last_where_it_was_asked_for() -> None:
    figures = SampleFigures(num_prompt_tokens=3, num_tokens=4, load_s=0, duration_s=1, tokens_per_second=4)
    asked = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
    (event,) = Chunks(ChatBody.model_validate(asked)).of(figures)
    assert (event["choices"], event["usage"]["total_tokens"]) == ([], 7)
    assert Chunks(ChatBody.model_validate(BODY)).of(figures) == []

"""/v1/chat/completions: a chat is rendered by the model's template, and answered."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from horizon_server.api.openai.answers import (
    Choice,
    Envelope,
    Line,
    Lines,
    Token,
    event_stream,
    lines_of,
    tokens_of,
    unless_gone,
    usage_of,
)
from horizon_server.api.openai.bodies import read_body
from horizon_server.api.openai.calls import Changing
from horizon_server.api.openai.prompts import ChatBody
from horizon_server.api.openai.tool_calls import calls_in, sayable
from horizon_server.events import SampledPrompt
from horizon_server.records.sample import SampleFigures

router = APIRouter(prefix="/v1/chat/completions")


@router.post("", response_model=None)
async def create_chat_completion(change: Changing, request: Request) -> dict[str, Any] | Response:
    """Answer a chat."""
    body = await read_body(request, ChatBody)
    prompts, options = body.prompts(), body.options()
    lines = lines_of(change, body.model, prompts, options, "messages")
    if body.stream:
        return await event_stream(request, change, lines, Chunks(body).of)
    return await unless_gone(request, _whole(body, lines))


async def _whole(body: ChatBody, lines: Lines) -> dict[str, Any]:
    choices, figures = [Choice() for _ in range(body.num_choices)], None
    async with aclosing(lines):
        async for line in lines:
            if isinstance(line, SampleFigures):
                figures = line
            elif not isinstance(line, SampledPrompt):
                choices[line.sample].add(line)
    assert figures is not None, "the figures come last"
    envelope = Envelope.new("chat.completion", body.model, "chatcmpl")
    shown = [_choice(body, index, choice) for index, choice in enumerate(choices)]
    return envelope.of(shown, usage=usage_of(figures))


def _choice(body: ChatBody, index: int, choice: Choice) -> dict[str, Any]:
    said, calls = calls_in(choice.text) if body.may_call_tools else (choice.text, [])
    message: dict[str, Any] = {"role": "assistant", "content": said or (None if calls else ""), "refusal": None}
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
    return {
        "index": index,
        "message": message,
        "logprobs": _logprobs(choice.tokens, choice.text, choice.ended) if body.logprobs else None,
        "finish_reason": "tool_calls" if calls else choice.ended,
    }


class Chunks:
    """Makes the events of a stream."""

    def __init__(self, body: ChatBody) -> None:
        self._body = body
        self._envelope = Envelope.new("chat.completion.chunk", body.model, "chatcmpl")
        self._choices = [Choice() for _ in range(body.num_choices)]
        self._num_said = [0] * body.num_choices
        self._unsent: list[list[Token]] = [[] for _ in self._choices]
        self._begun: set[int] = set()

    def of(self, line: Line) -> list[dict[str, Any]]:
        """Return the events for one line."""
        if isinstance(line, SampledPrompt):
            return []
        if isinstance(line, SampleFigures):
            return [self._envelope.of([], usage=usage_of(line))] if self._body.includes_usage else []
        index, choice = line.sample, self._choices[line.sample]
        choice.add(line)
        self._unsent[index] += tokens_of(line)
        deltas: list[tuple[dict[str, Any], str | None]] = []
        if index not in self._begun:
            self._begun.add(index)
            deltas.append(({"role": "assistant", "content": "", "refusal": None}, None))
        calls: list[dict[str, Any]] = []
        end = len(choice.text)
        if self._body.may_call_tools:
            # Whether what looks like a call is one shows at its end.
            end = sayable(choice.text)
            if line.ended:
                said, calls = calls_in(choice.text)
                end = max(self._num_said[index], len(said))
        if text := choice.text[self._num_said[index] : end]:
            deltas.append(({"content": text}, None))
            self._num_said[index] = end
        deltas += [({"tool_calls": [{"index": n, **_call(call)}]}, None) for n, call in enumerate(calls)]
        if line.ended:
            deltas.append(({}, "tool_calls" if calls else line.ended))
        return self._shown(index, deltas, said=choice.text)

    def _shown(
        self, index: int, deltas: Sequence[tuple[dict[str, Any], str | None]], *, said: str
    ) -> list[dict[str, Any]]:
        usage: dict[str, Any] = {"usage": None} if self._body.includes_usage else {}
        found = []
        for number, (delta, ended) in enumerate(deltas):
            logprobs = None
            if self._body.logprobs and number == len(deltas) - 1:
                # Those of all tokens since the last event, with the last part of this one.
                tokens, self._unsent[index] = self._unsent[index], []
                logprobs = _logprobs(tokens, said, ended)
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": ended}
            found.append(self._envelope.of([choice], **usage))
        return found


def _call(call: dict[str, Any]) -> dict[str, Any]:
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": call}


def _logprobs(tokens: Sequence[Token], said: str, ended: str | None) -> dict[str, Any]:
    # The token that ends an answer is no part of it.
    if tokens and ended == "stop" and not said.endswith(tokens[-1].text):
        tokens = tokens[:-1]
    content = [
        {**_token(token.text, token.logprob or 0.0), "top_logprobs": [_token(*one) for one in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _token(text: str, logprob: float) -> dict[str, Any]:
    # Of a part of a character no bytes are known.
    whole = "\N{REPLACEMENT CHARACTER}" not in text
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}

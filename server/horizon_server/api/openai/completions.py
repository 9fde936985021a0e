"""/v1/completions: texts and tokens are continued, and with `echo` the prompt's own tokens are scored."""

from __future__ import annotations

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
from horizon_server.api.openai.prompts import CompletionBody
from horizon_server.events import SampledPrompt, SampledText
from horizon_server.records.sample import SampleFigures

router = APIRouter(prefix="/v1/completions")


@router.post("", response_model=None)
async def create_completion(change: Changing, request: Request) -> dict[str, Any] | Response:
    """Continue the prompts."""
    body = await read_body(request, CompletionBody)
    prompts, options = body.prompts(), body.options()
    lines = lines_of(change, body.model, prompts, options, "prompt")
    answer = _Answer(body, len(prompts))
    if body.stream:
        return await event_stream(request, change, lines, answer.chunks)
    return await unless_gone(request, answer.whole(lines))


class _Answer:
    """The choices of one request: those to the first prompt, then those to the second."""

    def __init__(self, body: CompletionBody, num_prompts: int) -> None:
        self._body = body
        self._envelope = Envelope.new("text_completion", body.model, "cmpl")
        self._choices = [Choice() for _ in range(num_prompts * body.num_choices)]
        # Characters of each choice that were sent before.
        self._offsets = [0] * len(self._choices)

    async def whole(self, lines: Lines) -> dict[str, Any]:
        """Return the answer when all of it is there."""
        figures = None
        async with aclosing(lines):
            async for line in lines:
                if isinstance(line, SampleFigures):
                    figures = line
                    continue
                for index, piece in self._pieces(line):
                    choice = self._choices[index]
                    choice.text += piece.text
                    choice.tokens += piece.tokens
                    choice.ended = piece.ended or choice.ended
        assert figures is not None, "the figures come last"
        shown = [self._shown(index, choice, 0) for index, choice in enumerate(self._choices)]
        return self._envelope.of(shown, usage=usage_of(figures))

    def chunks(self, line: Line) -> list[dict[str, Any]]:
        """Return the events of a stream for one line."""
        if isinstance(line, SampleFigures):
            return [self._envelope.of([], usage=usage_of(line))] if self._body.includes_usage else []
        found = []
        for index, piece in self._pieces(line):
            shown = self._shown(index, piece, self._offsets[index])
            self._offsets[index] += len(piece.text)
            found.append(self._envelope.of([shown], **({"usage": None} if self._body.includes_usage else {})))
        return found

    def _pieces(self, line: SampledText | SampledPrompt) -> list[tuple[int, Choice]]:
        """Return what a line adds to which choices: a prompt is echoed in each of its own."""
        first = line.prompt * self._body.num_choices
        if isinstance(line, SampledText):
            return [(first + line.sample, Choice(text=line.text, tokens=tokens_of(line), ended=line.ended))]
        if not self._body.echo:
            return []
        # Without an answer to come, the prompt is the whole.
        ended = "length" if self._body.max_tokens == 0 else ""
        tokens = tokens_of(line)
        text = self._prompt_text(line)
        return [(first + n, Choice(text=text, tokens=tokens, ended=ended)) for n in range(self._body.num_choices)]

    def _prompt_text(self, line: SampledPrompt) -> str:
        given = self._body.text(line.prompt)
        # Tokens that the tokenizer puts before a text are not part of it.
        return given if given is not None else "".join(line.texts)

    def _shown(self, index: int, choice: Choice, offset: int) -> dict[str, Any]:
        logprobs = None if self._body.logprobs is None else _logprobs(choice.tokens, offset, self._body.logprobs)
        return {
            "index": index,
            "text": choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.ended or None,
        }


def _logprobs(tokens: Sequence[Token], offset: int, num_top: int) -> dict[str, Any]:
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [_by_text(token) for token in tokens] if num_top else None,
        "text_offset": offsets,
    }


def _by_text(token: Token) -> dict[str, float] | None:
    """Return the likeliest tokens of a place by their texts; of those that look alike the likelier."""
    found: dict[str, float] = {}
    for text, logprob in token.top:
        found.setdefault(text, logprob)
    return found or None

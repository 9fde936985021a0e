"""What the routes of completions and of chats share: answers of the sampler, whole or as a stream of events."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request, Response
from sse_starlette import EventSourceResponse, ServerSentEvent

from horizon_server.api.audited import Asked
from horizon_server.api.http.changes import Change
from horizon_server.api.http.live import SEPARATOR
from horizon_server.api.openai.errors import about_model, body_of, called
from horizon_server.api.openai.model_names import Tuned, named
from horizon_server.api.services import OpenStreams
from horizon_server.children.child import streamed
from horizon_server.children.entry import Answer
from horizon_server.errors import HorizonError, NotFound
from horizon_server.events import SampledPrompt, SampledText
from horizon_server.records.sample import SampleFigures, SampleOptions, SamplePrompt

ResultT = TypeVar("ResultT")
Line = SampledText | SampledPrompt | SampleFigures
Lines = AsyncGenerator[Line, None]

# Until a stream says that it is still there: a long prompt of a large model takes minutes.
_PING_S = 15
_DONE = "[DONE]"
# What a proxy says of a caller who has left; nobody reads it.
_GONE = 499
_PARAMS: Mapping[str, str] = {"num_samples": "n"}


@dataclass(frozen=True, kw_only=True)
class Token:
    """A token of an answer or a prompt; `top` are the likeliest in its place with their log-probabilities."""

    text: str
    logprob: float | None = None
    top: tuple[tuple[str, float], ...] = ()


@dataclass(kw_only=True)
class Choice:
    """One answer, as far as it has come."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    ended: str = ""

    def add(self, piece: SampledText) -> None:
        """Add what has come since."""
        self.text += piece.text
        self.tokens += tokens_of(piece)
        self.ended = piece.ended


@dataclass(kw_only=True)
class Envelope:
    """What every part of one answer says of it."""

    kind: str
    model: str
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def new(cls, kind: str, model: str, prefix: str) -> Envelope:
        """Make the envelope of a new answer."""
        return cls(kind=kind, model=model, id=f"{prefix}-{secrets.token_hex(12)}")

    def of(self, choices: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Return a part, or the whole, of the answer."""
        head = {"id": self.id, "object": self.kind, "created": self.created, "model": self.model}
        return {**head, "system_fingerprint": None, "choices": list(choices), **more}


def tokens_of(piece: SampledText | SampledPrompt) -> list[Token]:
    """Return the tokens of a piece; a prompt's first has no log-probability, as nothing precedes it."""
    first = 1 if isinstance(piece, SampledPrompt) else 0
    found = []
    for place, text in enumerate(piece.texts):
        scored = place - first
        logprob = _number(piece.logprobs[scored]) if 0 <= scored < len(piece.logprobs) else None
        top: tuple[tuple[str, float], ...] = ()
        if 0 <= scored < len(piece.top):
            numbers = (_number(number) for _, number in piece.top[scored])
            top = tuple(zip(piece.top_texts[scored], numbers, strict=True))
        found.append(Token(text=text, logprob=logprob, top=top))
    return found


def _number(logprob: float) -> float:
    # JSON has no infinity; OpenAI writes this for a token that is very unlikely.
    return logprob if math.isfinite(logprob) else -9999.0


def usage_of(figures: SampleFigures) -> dict[str, int]:
    """Return what an answer took, as OpenAI counts it."""
    prompt, completion = figures.num_prompt_tokens, figures.num_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


async def lines_of(
    change: Change, model: str, prompts: Sequence[SamplePrompt], options: SampleOptions, param: str
) -> Lines:
    """Yield what the named model answers, then what it took. Closing it ends the call, which the audit log then says.

    Args:
        param: of the request that has the prompts, for errors.
    """
    services, caller = change.services, change.caller
    names = {**_PARAMS} | {f"prompts[{index}]": param for index in range(len(prompts))} | {"prompts": param}

    async def ask(put: Callable[[Any], Awaitable[None]]) -> SampleFigures | None:
        async def answer() -> SampleFigures | None:
            figures = None
            with called(names):
                found = await named(services, caller, model)
                texts = (
                    services.samples.sample(caller, found.job.job_id, found.checkpoint.step, prompts, options)
                    if isinstance(found, Tuned)
                    else services.samples.sample_base(caller, found.name, prompts, options)
                )
                try:
                    async with aclosing(texts):
                        async for text in texts:
                            if isinstance(text, SampleFigures):
                                figures = text
                            else:
                                await put(text)
                except NotFound as error:
                    about_model(error)
                    raise
            return figures

        asked = Asked(resource=model, values={"prompts": len(prompts)})
        return await change.carry_out("CheckpointService/SampleCheckpoint", asked, answer, lambda _: "")

    async with aclosing(streamed(ask)) as lines:
        async for line in lines:
            value = line.value if isinstance(line, Answer) else line
            assert isinstance(value, SampledText | SampledPrompt | SampleFigures)
            yield value


async def unless_gone(request: Request, work: Coroutine[Any, Any, ResultT]) -> ResultT | Response:
    """Return the result of `work`, whose request was read; it is cancelled when the caller leaves."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else Response(status_code=_GONE)
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def event_stream(
    request: Request, change: Change, lines: Lines, chunks: Callable[[Line], list[dict[str, Any]]]
) -> Response:
    """Return a stream of what `chunks` makes of each line. What goes wrong before the first one is raised, as a status
    says more than an event."""
    first = await unless_gone(request, anext(lines))
    if isinstance(first, Response):
        return first
    streams: OpenStreams = request.app.state.streams

    async def events() -> AsyncIterator[ServerSentEvent]:
        try:
            async with streams.one(change.caller), aclosing(lines):
                for chunk in chunks(first):
                    yield _event(chunk)
                async for line in lines:
                    for chunk in chunks(line):
                        yield _event(chunk)
        except HorizonError as error:
            yield _event(body_of(error))
        else:
            yield ServerSentEvent(_DONE, sep=SEPARATOR)

    return EventSourceResponse(
        events(),
        ping=_PING_S,
        ping_message_factory=lambda: ServerSentEvent(comment="still here", sep=SEPARATOR),
        sep=SEPARATOR,
    )


def _event(chunk: dict[str, Any]) -> ServerSentEvent:
    return ServerSentEvent(json.dumps(chunk, separators=(",", ":"), allow_nan=False), sep=SEPARATOR)

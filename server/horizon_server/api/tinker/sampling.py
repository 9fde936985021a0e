"""Sampling clients: of a base, of a saved checkpoint, or of a model as it is."""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field

from horizon_server.api.audited import Asked
from horizon_server.api.http.changes import Change
from horizon_server.api.openai.bodies import read_body
from horizon_server.api.services import OpenStreams
from horizon_server.api.tinker.calls import Body, Calling, short
from horizon_server.api.tinker.messages import sample_response
from horizon_server.errors import InvalidSpec
from horizon_server.records.sample import MAX_NEW_TOKENS, MAX_TOP_LOGPROBS, SampleOptions, SamplePrompt, check_sample
from horizon_server.services.tinker.drawing import Drawn
from horizon_server.services.tinker.names import Target, require_own, sampler_id, target_of

router = APIRouter(prefix="/api/v1")


class CreateSamplerBody(Body):
    """Makes a sampling client."""

    session_id: str
    sampling_session_seq_id: int = Field(ge=0, lt=10**9)
    base_model: str | None = None
    model_path: str | None = None


class Prompt(Body):
    """A prompt of tokens."""

    chunks: list[dict[str, Any]]

    def ids(self) -> tuple[int, ...]:
        """Return its tokens. Raises InvalidSpec."""
        found: list[int] = []
        for index, chunk in enumerate(self.chunks):
            if chunk.get("type", "encoded_text") != "encoded_text" or not chunk.keys() <= {"type", "tokens"}:
                raise InvalidSpec.of(
                    f"prompt.chunks[{index}]", f"prompt.chunks[{index}] must be encoded_text with its tokens"
                )
            tokens = chunk.get("tokens")
            if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
                raise InvalidSpec.of(f"prompt.chunks[{index}].tokens", f"prompt.chunks[{index}].tokens must be tokens")
            found += tokens
        if not found:
            raise InvalidSpec.of("prompt", "prompt must have at least one token")
        return tuple(found)


class Params(Body):
    """How to answer."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampleBody(Body):
    """Asks for answers to a prompt."""

    prompt: Prompt
    sampling_params: Params
    num_samples: int = 1
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = Field(default=None, ge=0, lt=2**63)
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS)
    topk_sample_logprobs: int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS)
    target_prompt_logprobs: dict[str, Any] | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None

    def options(self, longest: int) -> SampleOptions:
        """Return how to answer, without a seed of its own as seed 0. An answer without a bound has as many tokens as
        the model takes. Raises InvalidSpec."""
        if self.target_prompt_logprobs is not None or self.prompt_alt_tokens_k or self.record_stability_info:
            raise InvalidSpec.of(
                "target_prompt_logprobs",
                "target_prompt_logprobs, prompt_alt_tokens_k and record_stability_info are not carried out; leave them "
                "out",
            )
        params = self.sampling_params
        if params.stop == []:
            raise InvalidSpec.of("sampling_params.stop", "stop is []: answers always end with the model's own ends")
        stop = [params.stop] if isinstance(params.stop, str) else params.stop or []
        scored = self.prompt_logprobs or self.topk_prompt_logprobs
        return SampleOptions(
            max_tokens=max(1, min(MAX_NEW_TOKENS, longest)) if params.max_tokens is None else params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=0 if params.top_k == -1 else params.top_k,
            seed=(params.seed or 0) % 2**63,
            num_samples=self.num_samples,
            stop=tuple(one for one in stop if isinstance(one, str)),
            stop_ids=tuple(one for one in stop if isinstance(one, int)),
            logprobs=self.topk_sample_logprobs,
            prompt_logprobs=self.topk_prompt_logprobs if scored else None,
        )


@router.post("/create_sampling_session")
async def create_sampling_session(change: Calling, request: Request) -> dict[str, Any]:
    """Make a sampling client of a base or a checkpoint."""
    body = await read_body(request, CreateSamplerBody)
    require_own(change.caller, body.session_id)
    target = await _target(change, body.base_model, body.model_path)
    made = sampler_id(body.session_id, body.sampling_session_seq_id, target)
    return {"type": "create_sampling_session", "sampling_session_id": made}


@router.get("/samplers/{sampler}")
async def get_sampler(change: Calling, sampler: str) -> dict[str, Any]:
    """Say what a sampling client asks."""
    target = target_of(change.caller, short(sampler, "sampler_id"))
    base = await change.services.tinker_drawing.base_of(change.caller, target)
    return {"sampler_id": sampler, "base_model": base, "model_path": None}


@router.post("/asample")
async def asample(change: Calling, request: Request) -> dict[str, Any]:
    """Have a prompt answered. Without a seed, prompts that come at nearly the same time are answered together."""
    body = await read_body(request, SampleBody)
    prompt = SamplePrompt(ids=body.prompt.ids())
    if body.sampling_session_id is not None:
        if body.seq_id is None or body.base_model is not None or body.model_path is not None:
            raise InvalidSpec.of("seq_id", "seq_id is required with sampling_session_id, and no model beside it")
        target = target_of(change.caller, short(body.sampling_session_id, "sampling_session_id"))
        asked = f"{body.sampling_session_id}/{body.seq_id}"
    else:
        target = await _target(change, body.base_model, body.model_path)
        asked = secrets.token_hex(12)
    drawing = change.services.tinker_drawing
    longest = await drawing.longest(change.caller, target) if body.sampling_params.max_tokens is None else 0
    options = body.options(longest - len(prompt.ids))
    check_sample([prompt], options)
    await drawing.check(change.caller, target, options)
    last_n = body.prompt_logprobs_last_n
    if last_n is not None and not (1 <= last_n < len(prompt.ids) and options.prompt_logprobs is not None):
        raise InvalidSpec.of(
            "prompt_logprobs_last_n",
            "prompt_logprobs_last_n must be from 1 to the number of the prompt's tokens less 1, with prompt_logprobs",
        )
    key = f"sample/{hashlib.sha256(asked.encode()).hexdigest()[:32]}"
    has_seed = body.sampling_params.seed is not None
    change.services.tinker_samples.ask(
        change.caller.name,
        key,
        (prompt, last_n, options),
        # Its bits must not depend on what else comes.
        group=None if has_seed else (change.caller.name, change.caller.token_id, target, options),
        num_bytes=8 * len(prompt.ids) + 1024,
        num_answers=options.num_samples,
        draw=partial(_draw, change, target, options, has_seed),
    )
    return {"request_id": key, "sample_sequence_ids": [f"{key}/{index}" for index in range(options.num_samples)]}


async def _target(change: Change, base: str | None, path: str | None) -> Target:
    if (base is None) == (path is None):
        raise InvalidSpec.of("model_path", "either model_path or base_model is required")
    return await change.services.tinker_drawing.target(
        change.caller, base=short(base, "base_model") if base is not None else "", path=path or ""
    )


async def _draw(
    change: Change, target: Target, options: SampleOptions, has_seed: bool, requests: Sequence[Any]
) -> list[bytes]:
    """Draw for who has asked, as long as their token is accepted; one line of the audit log."""
    if not has_seed:
        options = dataclasses.replace(options, seed=secrets.randbits(62))
    prompts = [prompt for prompt, _, _ in requests]
    streams: OpenStreams = change.request.app.state.streams
    draw = partial(change.services.tinker_drawing.draw, change.caller, target, prompts, options)
    asked = Asked(resource=target.base or target.model, values={"prompts": len(prompts)})
    async with streams.one(change.caller):
        drawn = await change.carry_out("CheckpointService/SampleCheckpoint", asked, draw, lambda _: "")
    return [sample_response(_of_last(one, last_n)) for one, (_, last_n, _) in zip(drawn, requests, strict=True)]


def _of_last(drawn: Drawn, last_n: int | None) -> Drawn:
    """Leave out the log-probabilities of the prompt before its last tokens."""
    if last_n is not None:
        before = len(drawn.prompt_logprobs) - last_n
        drawn.prompt_logprobs[:before] = [None] * before
        drawn.prompt_top[:before] = [()] * len(drawn.prompt_top[:before])
    return drawn

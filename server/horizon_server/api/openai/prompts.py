"""The bodies of /v1/completions and /v1/chat/completions, and what they mean for the sampler.

Parameters that change an answer are carried out or refused; those that only say who asks, or how the answer is billed
or kept, are taken and have no effect. docs/openai.md lists both.
"""

from __future__ import annotations

import json
import secrets
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from horizon_formats.row_checks import check_prompt_row
from horizon_server.api.openai.bodies import Body
from horizon_server.api.openai.errors import BadParameter, unsupported
from horizon_server.records.sample import (
    MAX_NEW_TOKENS,
    MAX_SAMPLES,
    MAX_STOPS,
    MAX_TOP_LOGPROBS,
    SampleOptions,
    SamplePrompt,
)

# Tokens of a chat, where the request names no maximum.
CHAT_TOKENS = 1024
# Of a completion, as OpenAI has it.
COMPLETION_TOKENS = 16


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class StreamOptions(Body):
    """How an answer is streamed."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Asked(Body):
    """What both kinds of requests have."""

    model: str = Field(max_length=4200)
    n: int | None = Field(default=None, ge=1, le=MAX_SAMPLES)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: Annotated[list[str] | None, BeforeValidator(_as_list)] = Field(default=None, max_length=MAX_STOPS)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, le=2**31 - 1, description="Ours: only the likeliest are drawn from.")
    max_tokens: int | None = Field(default=None, ge=0, le=MAX_NEW_TOKENS)
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    def options_with(self, max_tokens: int, *, logprobs: int | None, prompt_logprobs: int | None) -> SampleOptions:
        """How to answer. OpenAI draws where nothing else is said, and differently each time without a seed."""
        seed = secrets.randbits(62) if self.seed is None else self.seed % 2**63
        return SampleOptions(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            seed=seed,
            num_samples=self.num_choices,
            stop=tuple(self.stop or ()),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with what it took."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def refuse_unsupported(self) -> None:
        """Refuse what would change the answer and is not carried out. Raises BadParameter."""
        for name in ("frequency_penalty", "presence_penalty", "logit_bias"):
            if getattr(self, name):
                raise unsupported(name, "is not carried out; leave it out")
        if self.stream_options is not None and not self.stream:
            raise BadParameter("stream_options", "stream_options is only for stream: true")


class CompletionBody(Asked):
    """A request for completions."""

    prompt: Annotated[list[Any], BeforeValidator(_as_list)] = Field(min_length=1)
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    suffix: str | None = None

    def prompts(self) -> list[SamplePrompt]:
        """The prompts: one text or several, the tokens of one or of several. Raises BadParameter."""
        self.refuse_unsupported()
        if self.best_of is not None and self.best_of != self.num_choices:
            raise unsupported("best_of", "is not carried out; ask for n answers, with logprobs, and choose")
        if self.suffix:
            raise unsupported("suffix", "is not carried out: the models here only continue a text")
        if self.max_tokens == 0 and not self.echo:
            raise BadParameter("max_tokens", "Invalid value for 'max_tokens': 0 is only for echo: true")
        return [_prompt(one) for one in self._given]

    def options(self) -> SampleOptions:
        """How to answer."""
        max_tokens = COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        # With the prompt's numbers come its tokens.
        of_prompt = (self.logprobs or 0) if self.echo else None
        return self.options_with(max_tokens, logprobs=self.logprobs, prompt_logprobs=of_prompt)

    def text(self, index: int) -> str | None:
        """The text of a prompt; None of one that is tokens."""
        given = self._given[index]
        return given if isinstance(given, str) else None

    @property
    def _given(self) -> list[Any]:
        return [self.prompt] if _is_ids(self.prompt) else self.prompt


class ChatBody(Asked):
    """A request for the answer to a chat."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_NEW_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    store: bool | None = None
    reasoning_effort: str | None = None
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    moderation: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    # These have no effect on the answer.
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    prediction: Any = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None

    def options(self) -> SampleOptions:
        """How to answer."""
        asked = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.options_with(CHAT_TOKENS if asked is None else asked, logprobs=logprobs, prompt_logprobs=None)

    @property
    def may_call_tools(self) -> bool:
        """Whether the answer may be calls of tools."""
        return bool(self.tools) and self.tool_choice != "none"

    def prompts(self) -> list[SamplePrompt]:
        """The chat, with its tools where the model may call them. Raises BadParameter."""
        self.refuse_unsupported()
        for name in ("audio", "function_call", "functions", "moderation", "verbosity", "web_search_options"):
            if getattr(self, name) is not None:
                raise unsupported(name, "is not carried out; leave it out")
        if self.reasoning_effort not in (None, "none"):
            raise unsupported("reasoning_effort", "is not carried out; leave it out")
        if self.response_format is not None and self.response_format.get("type") != "text":
            raise unsupported("response_format", "may only be text: an answer is not forced into a form")
        if self.modalities not in (None, ["text"]):
            raise unsupported("modalities", "may only be text")
        if self.store:
            raise unsupported("store", "is not carried out: no answer is kept; leave it out")
        if self.tool_choice not in (None, "none", "auto"):
            raise unsupported("tool_choice", "may only be none or auto: no model is forced to call a tool")
        if self.top_logprobs is not None and not self.logprobs:
            raise BadParameter("top_logprobs", "top_logprobs is only for logprobs: true")
        row: dict[str, Any] = {"messages": [_message(message) for message in self.messages]}
        if self.may_call_tools:
            row["tools"] = self.tools
        if problems := check_prompt_row(row):
            path, problem = problems[0]
            raise BadParameter(path, f"Invalid value for '{path}': {path} {problem}")
        return [SamplePrompt(chat_json=json.dumps(row))]


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message as chat templates know it: what OpenAI calls developer, they call system."""
    return {**message, "role": "system"} if message.get("role") == "developer" else message


def _is_ids(prompt: list[Any]) -> bool:
    return bool(prompt) and all(type(one) is int for one in prompt)


def _prompt(given: Any) -> SamplePrompt:
    if isinstance(given, str):
        return SamplePrompt(text=given)
    if isinstance(given, list) and _is_ids(given):
        return SamplePrompt(ids=tuple(given))
    raise BadParameter(
        "prompt", "Invalid value for 'prompt': it must be a text, a list of texts, a list of tokens, or lists of tokens"
    )

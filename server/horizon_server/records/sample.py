"""Prompts for a checkpoint: what may be asked, what the child that answers is told, and its figures.

Free of torch and transformers, as the daemon imports it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horizon_server.errors import FieldViolation, InvalidSpec
from horizon_server.spec import JobSpec

MAX_PROMPTS = 64
MAX_PROMPT_CHARACTERS = 64 * 1024
MAX_PROMPT_TOKENS = 4096
MAX_MESSAGES = 256
MAX_NEW_TOKENS = 4096
MAX_TEMPERATURE = 100
MAX_SAMPLES = 128
"""Answers to a prompt; of all prompts of a call, `MAX_ANSWERS`."""
MAX_ANSWERS = 256
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True)
class SampleMessage:
    """A turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True, kw_only=True)
class SamplePrompt:
    """A text or tokens to continue, or a chat to answer, which the model's chat template renders. One of the four is
    set.

    `chat_json` is a chat with tools, or with more in its messages: a row of the dataset format `messages`, as JSON.
    """

    text: str = ""
    messages: tuple[SampleMessage, ...] = ()
    chat_json: str = ""
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """How to answer: `temperature` 0 takes the likeliest token; `top_p`, `top_k` (0: all) and `seed` matter only above
    it.

    An answer ends before the first of the texts `stop`, or with one of the tokens `stop_ids` or of the model's own
    ends. `logprobs` None leaves out log-probabilities, a number has those of the answers' tokens and of as many of the
    likeliest tokens beside each; `prompt_logprobs` the same of the prompts' tokens, with which `max_tokens` may be 0.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    top_k: int = 0
    num_samples: int = 1
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, kw_only=True)
class SampleFigures:
    """What answering took. `load_s` is until the weights were in memory and tried, the start of the process included,
    and 0 where they were in memory already; `duration_s` is from when the answers were begun to the last token.

    `num_passes` are the passes over the model from the first prompt to the last token, and `num_shared_passes` those of
    them that were for other calls too.
    """

    num_prompt_tokens: int
    num_tokens: int
    load_s: float
    duration_s: float
    tokens_per_second: float
    weights: str = ""
    """What answered, as a message."""
    num_passes: int = 0
    num_shared_passes: int = 0


@dataclass(frozen=True, kw_only=True)
class SampleAdapter:
    """An adapter to answer with: its folder, the digest of its base, and the book that knows the digest of the folder
    answered from.

    With `spec`, that of the job, it is computed next to the base as the job kept it, as in the job's evaluations;
    otherwise it is merged into the base.
    """

    folder: Path
    base_sha256: str
    digests: Path
    spec: JobSpec | None = None


@dataclass(frozen=True, kw_only=True)
class SampleModel:
    """What a child answers with. `folder` holds the model; of an adapter, its base. `answers` is the folder whose
    generation_config.json says where answers end: that of the checkpoint, or where it is None, `folder`.

    The answers that are computed together are at most `num_sequences`, and their keys and values take at most
    `cache_bytes`. With `keeps_weights`, layers and head stay in fp32 from pass to pass; else experts come in pages of
    at most `expert_page_elements`, where that is not 0.
    """

    folder: Path
    num_threads: int
    cache_bytes: int
    num_sequences: int = MAX_ANSWERS
    keeps_weights: bool = False
    expert_page_elements: int = 0
    adapter: SampleAdapter | None = None
    answers: Path | None = None


@dataclass(frozen=True, kw_only=True)
class SampleCall:
    """One call of the child."""

    prompts: tuple[SamplePrompt, ...]
    options: SampleOptions


def require_few(prompts: Sequence[Any]) -> None:
    """Refuse a wrong number of prompts. Raises: InvalidSpec."""
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise InvalidSpec.of("prompts", f"prompts has {len(prompts)} prompts; it must have 1 to {MAX_PROMPTS}")


def check_sample(prompts: Sequence[SamplePrompt], options: SampleOptions) -> None:
    """Refuse what may not be asked. Raises: InvalidSpec with one violation per field."""
    require_few(prompts)
    found: dict[str, str] = {}
    for index, prompt in enumerate(prompts):
        if problem := _problem(prompt):
            found[f"prompts[{index}]"] = problem
    least = 1 if options.prompt_logprobs is None else 0
    if not least <= options.max_tokens <= MAX_NEW_TOKENS:
        found["max_tokens"] = f"is {options.max_tokens}; it must be {least} to {MAX_NEW_TOKENS}"
    # Not a number is in no range.
    if not 0 <= options.temperature <= MAX_TEMPERATURE:
        found["temperature"] = f"is {options.temperature:g}; it must be 0 to {MAX_TEMPERATURE}"
    if not 0 < options.top_p <= 1 or math.isnan(options.top_p):
        found["top_p"] = f"is {options.top_p:g}; it must be above 0 and at most 1"
    if options.top_k < 0:
        found["top_k"] = f"is {options.top_k}; it must be 0, for all tokens, or more"
    if not 1 <= options.num_samples <= MAX_SAMPLES or options.num_samples * len(prompts) > MAX_ANSWERS:
        found["num_samples"] = (
            f"is {options.num_samples}, for {len(prompts)} prompts; it must be 1 to {MAX_SAMPLES}, and at most "
            f"{MAX_ANSWERS} answers to all prompts together"
        )
    if len(options.stop) > MAX_STOPS or not all(1 <= len(stop) <= MAX_STOP_CHARACTERS for stop in options.stop):
        found["stop"] = f"must be at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARACTERS} characters"
    if len(options.stop_ids) > MAX_STOPS or not all(token >= 0 for token in options.stop_ids):
        found["stop_ids"] = f"must be at most {MAX_STOPS} tokens, each 0 or more"
    for name, most in (("logprobs", options.logprobs), ("prompt_logprobs", options.prompt_logprobs)):
        if most is not None and not 0 <= most <= MAX_TOP_LOGPROBS:
            found[name] = f"is {most}; it must be 0 to {MAX_TOP_LOGPROBS}"
    violations = [FieldViolation(field=name, description=f"{name} {what}") for name, what in found.items()]
    if violations:
        raise InvalidSpec(violations[0].description, violations=violations)


def _problem(prompt: SamplePrompt) -> str:
    given = (prompt.text, prompt.messages, prompt.chat_json, prompt.ids)
    if sum(map(bool, given)) != 1:
        return "must have either text or messages or chat_json or ids"
    if len(prompt.ids) > MAX_PROMPT_TOKENS:
        return f"has {len(prompt.ids)} tokens; at most {MAX_PROMPT_TOKENS} are allowed"
    if prompt.ids and min(prompt.ids) < 0:
        return f"has the token {min(prompt.ids)}; tokens are 0 or more"
    if len(prompt.messages) > MAX_MESSAGES:
        return f"has {len(prompt.messages)} messages; at most {MAX_MESSAGES} are allowed"
    if not all(message.role for message in prompt.messages):
        return "has a message without a role"
    length = (
        len(prompt.text)
        + len(prompt.chat_json)
        + sum(len(message.role) + len(message.content) for message in prompt.messages)
    )
    if length > MAX_PROMPT_CHARACTERS:
        return f"has {length} characters; at most {MAX_PROMPT_CHARACTERS} are allowed"
    return ""

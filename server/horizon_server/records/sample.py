"""Prompts for a checkpoint: what may be asked, the request to the child that answers, and its figures.

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
    """How to answer: `temperature` 0 takes the likeliest token; `top_p` and `seed` matter only above it."""

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class SampleFigures:
    """What answering took. `load_s` is until the weights were in memory and tried, the start of the process included,
    and 0 where they were in memory already; `duration_s` is from there to the last token.
    """

    num_prompt_tokens: int
    num_tokens: int
    load_s: float
    duration_s: float
    tokens_per_second: float
    weights: str = ""
    """What answered, as a message."""


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
class SampleRequest:
    """One call of the child. `folder` holds the model; of an adapter, its base. `answers` is the folder whose
    generation_config.json says where answers end: that of the checkpoint, or where it is None, `folder`.
    """

    folder: Path
    prompts: tuple[SamplePrompt, ...]
    options: SampleOptions
    num_threads: int
    cache_bytes: int
    adapter: SampleAdapter | None = None
    answers: Path | None = None


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
    if not 1 <= options.max_tokens <= MAX_NEW_TOKENS:
        found["max_tokens"] = f"is {options.max_tokens}; it must be 1 to {MAX_NEW_TOKENS}"
    # Not a number is in no range.
    if not 0 <= options.temperature <= MAX_TEMPERATURE:
        found["temperature"] = f"is {options.temperature:g}; it must be 0 to {MAX_TEMPERATURE}"
    if not 0 < options.top_p <= 1 or math.isnan(options.top_p):
        found["top_p"] = f"is {options.top_p:g}; it must be above 0 and at most 1"
    violations = [FieldViolation(field=name, description=f"{name} {what}") for name, what in found.items()]
    if violations:
        raise InvalidSpec(violations[0].description, violations=violations)


def _problem(prompt: SamplePrompt) -> str:
    given = (prompt.text, prompt.messages, prompt.chat_json, prompt.ids)
    if sum(map(bool, given)) != 1:
        return "must have either text or messages or chat_json or ids"
    if len(prompt.ids) > MAX_PROMPT_TOKENS:
        return f"has {len(prompt.ids)} tokens; at most {MAX_PROMPT_TOKENS} are allowed"
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

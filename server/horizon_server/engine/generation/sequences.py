"""What is generated, and how: options, tokens, scores, and a sequence while its tokens come.

Shapes: T = tokens of a sequence in a pass, D = hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from horizon_server.engine.generation.cache import SequenceCache
from horizon_server.engine.generation.choosing import Choice, draw_for
from horizon_server.engine.layer_stubs import LayerCall
from horizon_server.errors import InvalidData

Ended = Literal["stop", "length"]
_LEAST_PIECE = 16
"""Tokens of a prompt that a pass computes, where it does not compute all of it."""
Top: TypeAlias = tuple[tuple[int, float], ...]
"""The likeliest tokens at a place with their log-probabilities, the likeliest first."""


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """How to answer. `temperature` 0 takes the likeliest token; `top_p`, `top_k` (0: all) and `seed` matter only above
    it. `num_samples` are the answers to each prompt.

    An answer ends with the first of `stop_tokens`, or after `max_tokens`. `logprobs` None leaves out the
    log-probabilities of the chosen tokens, a number has them and as many of the likeliest tokens; `prompt_logprobs` the
    same of the prompt's tokens, with which `max_tokens` may be 0. They are those of the model: no temperature changes
    them.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    num_samples: int = 1
    stop_tokens: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        least = 1 if self.prompt_logprobs is None else 0
        if self.max_tokens < least:
            raise refused("max_tokens", f"is {self.max_tokens}; it must be at least {least}")
        if not (0 <= self.temperature < math.inf):
            raise refused("temperature", f"is {self.temperature}; it must be 0 or more")
        if not 0 < self.top_p <= 1:
            raise refused("top_p", f"is {self.top_p}; it must be above 0 and at most 1")
        for name, value in (("top_k", self.top_k), ("logprobs", self.logprobs), ("num_samples", self.num_samples - 1)):
            if value is not None and value < 0:
                raise refused(name, "is too small; it must be 0 or more, and num_samples 1 or more")


@dataclass(frozen=True, kw_only=True)
class NewToken:
    """A token of an answer to a prompt. `ended` says why it is the last one, or None where it is not. `logprob` and
    `top` are there where they were asked for."""

    prompt: int
    sample: int = 0
    token: int
    ended: Ended | None
    logprob: float | None = None
    top: Top = ()


@dataclass(frozen=True, kw_only=True)
class ScoredPrompt:
    """The log-probabilities of a prompt's tokens but the first, and the likeliest tokens in the place of each."""

    prompt: int
    logprobs: tuple[float, ...]
    top: tuple[Top, ...]


New: TypeAlias = NewToken | ScoredPrompt


@dataclass(frozen=True, kw_only=True)
class GeneratedAnswer:
    """The tokens after a prompt, the stop token included, with their log-probabilities where they were asked for."""

    tokens: tuple[int, ...]
    ended: Ended
    logprobs: tuple[float, ...] = ()


@dataclass(eq=False, kw_only=True)
class Sequence:
    """A prompt and its answer, or until they differ, all of its answers. `new_ids` are the tokens that the next pass
    computes, and `later_ids` those of the prompt that come after them. `followers` are sequences that begin with these
    tokens, and are computed once they are; then this one, which has no answer, is at its end. `hidden_1TD` and `calls`
    are compute's, of a model whose sequences run one after the other."""

    ticket: int
    prompt: int
    samples: list[int]
    options: GenerationOptions
    cache: SequenceCache | None
    place: int
    """In `KeptKeys`, of a model whose sequences are one row; the others have a `cache`."""
    new_ids: Tensor
    capacity: int
    later_ids: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    followers: SequenceOf[Sequence] = ()
    waits: bool = False
    """For the sequence that it follows."""
    scores: list[float] = field(default_factory=list)
    tops: list[Top] = field(default_factory=list)
    num_computed: int = 0
    num_generated: int = 0
    hidden_1TD: Tensor | None = None
    calls: list[LayerCall] = field(default_factory=list)

    @property
    def num_new(self) -> int:
        """Tokens of the next pass."""
        return self.new_ids.numel()

    @property
    def is_prompt(self) -> bool:
        """Whether the next pass computes tokens of the prompt."""
        return self.num_generated == 0

    @property
    def scores_prompt(self) -> bool:
        """Whether the next pass is to score tokens of the prompt."""
        return self.options.prompt_logprobs is not None and self.is_prompt

    @property
    def num_scored(self) -> int:
        """Tokens of the prompt that the next pass scores: each by the token before it."""
        return self.num_new - (not self.later_ids.numel()) if self.scores_prompt else 0

    @property
    def scored_ids(self) -> Tensor:
        """These tokens."""
        return torch.cat([self.new_ids[1:], self.later_ids[:1]])

    @property
    def num_chosen(self) -> int:
        """Tokens that the next pass chooses."""
        return len(self.samples) if self.options.max_tokens and not self.later_ids.numel() else 0

    def take_piece(self, num_tokens: int) -> None:
        """Have the next pass compute at most so many tokens of the prompt."""
        ids = torch.cat([self.new_ids, self.later_ids])
        self.new_ids, self.later_ids = ids[:num_tokens], ids[num_tokens:]

    @property
    def choices(self) -> list[Choice]:
        """How the next tokens are chosen."""
        options = self.options
        return [
            Choice(
                temperature=options.temperature,
                top_p=options.top_p,
                top_k=options.top_k,
                draw=draw_for(options.seed, self.prompt, self.num_generated, sample),
            )
            for sample in self.samples[: self.num_chosen]
        ]


def in_pieces(sequences: SequenceOf[Sequence], most_tokens: int) -> list[Sequence]:
    """The sequences of a pass that computes at most so many tokens of prompts: an equal part of each, but not less than
    is worth a pass, and of those first of which least is computed."""
    prompts = sorted((one for one in sequences if one.is_prompt), key=lambda one: one.num_computed)
    left, part = most_tokens, max(_LEAST_PIECE, most_tokens // max(1, len(prompts)))
    chosen = [one for one in sequences if not one.is_prompt]
    for index, sequence in enumerate(prompts):
        if left <= 0:
            break
        # The last one takes what the others have left.
        sequence.take_piece(min(left, part if index + 1 < len(prompts) else left))
        left -= sequence.num_new
        chosen.append(sequence)
    return chosen


def refused(name: str, description: str) -> InvalidData:
    """The error for options or prompts that cannot be used."""
    return InvalidData.of(name, f"{name} {description}")

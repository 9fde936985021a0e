"""What a pass finds: the tokens that were chosen, and the log-probabilities of these and of prompts.

Shapes: C = tokens that are chosen in a pass, P = tokens of prompts that are scored in it, V = vocabulary, K = likeliest
tokens beside each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from horizon_server.engine.generation.sequences import Ended, NewToken, ScoredPrompt, Sequence, Top


@dataclass(eq=False, kw_only=True)
class Found:
    """What a pass is to find, where compute writes it. Shapes: [C], [P], and with K likeliest tokens [C, K], [P, K]."""

    tokens_C: Tensor
    logprobs_C: Tensor
    logprobs_P: Tensor
    top_C: tuple[Tensor, Tensor] | None
    top_P: tuple[Tensor, Tensor] | None


def tensors(found: Found) -> list[Tensor]:
    """All of it."""
    return [found.tokens_C, found.logprobs_C, found.logprobs_P, *(found.top_C or ()), *(found.top_P or ())]


def write_top(logits_CV: Tensor, top: tuple[Tensor, Tensor] | None, into: slice) -> None:
    """Note the likeliest tokens, where they were asked for."""
    if top is not None:
        tokens, logprobs = top
        values, tokens[into] = torch.log_softmax(logits_CV.float(), -1).topk(tokens.shape[1], -1)
        logprobs[into] = values


def _top_at(top: tuple[Tensor, Tensor] | None, at: int, most: int | None) -> Top:
    if top is None or not most:
        return ()
    tokens, logprobs = (part[at, :most].tolist() for part in top)
    return tuple(zip(tokens, logprobs, strict=True))


def add_scores(sequence: Sequence, found: Found, places: slice) -> None:
    """Note the scores of a part of a sequence's prompt, from its places."""
    most = sequence.options.prompt_logprobs
    sequence.scores += found.logprobs_P[places].tolist()
    sequence.tops += (_top_at(found.top_P, at, most) for at in range(places.start, places.stop))


def scored_prompt(sequence: Sequence) -> ScoredPrompt:
    """The scores of a sequence's prompt."""
    return ScoredPrompt(prompt=sequence.prompt, logprobs=tuple(sequence.scores), top=tuple(sequence.tops))


def new_token(sequence: Sequence, token: int, ended: Ended | None, found: Found, at: int) -> NewToken:
    """The next token of a sequence, from its place."""
    most = sequence.options.logprobs
    return NewToken(
        prompt=sequence.prompt,
        sample=sequence.samples[0],
        token=token,
        ended=ended,
        logprob=None if most is None else float(found.logprobs_C[at]),
        top=_top_at(found.top_C, at, most),
    )

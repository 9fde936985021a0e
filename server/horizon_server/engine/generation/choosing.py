"""The next token from a sequence's logits: the likeliest, or drawn by temperature, top-k and top-p.

A draw takes one uniform number, which comes from the host for each sequence and token. So it depends on the seed, the
prompt's place and the token's, and on nothing else: not on the device, nor on what else is in the batch.

Shapes: V = vocabulary, C = choices.
Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", arXiv 1904.09751 (top-p).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How one token is chosen: with `temperature` 0 the likeliest, the first of several. Otherwise it is drawn by
    `draw`, from 0 up to 1, among the `top_k` likeliest (0: all), and of these among the likeliest that together have at
    least `top_p` of the probability of all."""

    temperature: float
    top_p: float
    top_k: int
    draw: float


def choose(logits_CV: Tensor, choices: Sequence[Choice]) -> Tensor:
    """The token of each row, without waiting for the device. Shapes: [C, V] to [C].

    A row's token does not depend on the other rows.
    """
    # As transformers does: it compares in fp32 whatever the model computes in.
    logits_CV = logits_CV.float()
    tokens_C = logits_CV.argmax(-1)
    drawn = [index for index, choice in enumerate(choices) if choice.temperature]
    if not drawn:
        return tokens_C

    def column(values: Iterable[float]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.float64).to(logits_CV.device, non_blocking=True)[:, None]

    wanted = [choices[index] for index in drawn]
    rows_D = torch.tensor(drawn).to(logits_CV.device, non_blocking=True)
    # In fp64, because many small probabilities add up.
    scaled_DV = logits_CV[rows_D].double() / column(choice.temperature for choice in wanted)
    probabilities_DV, tokens_DV = torch.softmax(scaled_DV, dim=-1).sort(dim=-1, descending=True, stable=True)
    before_DV = probabilities_DV.cumsum(-1) - probabilities_DV
    places_V = torch.arange(logits_CV.shape[1], device=logits_CV.device)
    most = column(choice.top_k or logits_CV.shape[1] for choice in wanted)
    kept_DV = (before_DV < column(choice.top_p for choice in wanted)) & (places_V < most)
    # The first is always kept: nothing comes before it.
    kept_DV[:, 0] = True
    sums_DV = torch.where(kept_DV, probabilities_DV, 0.0).cumsum(-1)
    draws_D1 = column(choice.draw for choice in wanted) * sums_DV[:, -1:]
    place_D1 = torch.searchsorted(sums_DV, draws_D1, right=True)
    # Rounding may put the draw at the very end, after the last token that is kept.
    last_D1 = kept_DV.sum(-1, keepdim=True) - 1
    return tokens_C.index_copy(0, rows_D, tokens_DV.gather(1, torch.minimum(place_D1, last_D1))[:, 0])


def draw_for(seed: int, prompt: int, token: int, sample: int = 0) -> float:
    """A number from 0 up to 1 that belongs to a token of one of a prompt's answers under a seed."""
    which = f"{seed}/{prompt}/{token}" if sample == 0 else f"{seed}/{prompt}/{token}/{sample}"
    digest = hashlib.blake2b(which.encode("ascii"), digest_size=8).digest()
    # 53 bits, which a float64 holds exactly.
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)

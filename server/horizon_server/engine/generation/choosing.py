"""The next token from a sequence's logits: the likeliest, or drawn by temperature and top-p.

A draw takes one uniform number, which comes from the host for each sequence and token. So it depends on the seed, the
prompt's place and the token's, and on nothing else: not on the device, nor on what else is in the batch.

Shapes: V = vocabulary.
Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", arXiv 1904.09751 (top-p).
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def choose(logits_V: Tensor, *, temperature: float, top_p: float, draw: float) -> Tensor:
    """The token, without waiting for the device. Shapes: [V] to [].

    With `temperature` 0 it is the likeliest, the first of several. Otherwise it is drawn by `draw`, from 0 up to 1,
    among the likeliest tokens that together have at least `top_p` of the probability.
    """
    # As transformers does: it compares in fp32 whatever the model computes in.
    logits_V = logits_V.float()
    if temperature == 0:
        return logits_V.argmax()
    # In fp64, because many small probabilities add up.
    probabilities_V, tokens_V = torch.softmax(logits_V.double() / temperature, dim=-1).sort(
        descending=True, stable=True
    )
    before_V = probabilities_V.cumsum(0) - probabilities_V
    # The first is always kept: nothing comes before it.
    kept_V = torch.where(before_V < top_p, probabilities_V, 0.0)
    kept_V[0] = probabilities_V[0]
    sums_V = kept_V.cumsum(0)
    place = torch.searchsorted(sums_V, (draw * sums_V[-1]).reshape(1), right=True)
    # Rounding may put the draw at the very end, after the last token that is kept.
    last = (kept_V > 0).sum() - 1
    return tokens_V[torch.minimum(place, last)].squeeze(0)


def draw_for(seed: int, prompt: int, token: int) -> float:
    """A number from 0 up to 1 that belongs to a prompt's token under a seed."""
    digest = hashlib.blake2b(f"{seed}/{prompt}/{token}".encode("ascii"), digest_size=8).digest()
    # 53 bits, which a float64 holds exactly.
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)

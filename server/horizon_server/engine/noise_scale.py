"""The gradient noise scale: about how many tokens a step can have before more of them bring little.

A step's gradient is the mean over its tokens, and the gradient of its first micro-batch the mean over a part of them. Of the layers both
square norms cost nothing but reading a gradient once more, when the first micro-batch of a layer is done: no further backward, and no
memory but two numbers.

What it means: the ratio of the gradient's variance from token to token to its square, of the layers' parameters (embedding and head
add up in other parts), at the weights of the last steps. As documents and not tokens are drawn, it holds for documents like those of
the data. One step's estimate is mostly noise, so both parts are averaged over many, each by itself; dropout and noise on the embeddings
count as noise. A step of one micro-batch tells nothing.

Source: McCandlish et al., An Empirical Model of Large-Batch Training (arXiv 1812.06162), appendix A.1.
"""

from __future__ import annotations

import math
from typing import Any

EVERY_STEPS = 4
"""Steps from one measurement to the next, because reading a gradient once more does take time."""
_KEPT = 0.9
_FEWEST = 5


class NoiseScale:
    """Averages over measurements. Units: tokens are supervised ones."""

    def __init__(self) -> None:
        self._variance = self._square = 0.0
        self._num_measured = 0

    def observe(self, *, small_square: float, small_tokens: int, big_square: float, big_tokens: int) -> None:
        """Take the square norms of two mean gradients of one step: of a part of its tokens, and of all."""
        assert 0 < small_tokens < big_tokens, "the part is neither nothing nor all"
        if not (math.isfinite(small_square) and math.isfinite(big_square)):
            return
        # Both without bias: E |G_B|^2 = |G|^2 + variance / B, for each of the two sizes.
        square = (big_tokens * big_square - small_tokens * small_square) / (big_tokens - small_tokens)
        variance = (small_square - big_square) / (1.0 / small_tokens - 1.0 / big_tokens)
        self._square = _KEPT * self._square + (1.0 - _KEPT) * square
        self._variance = _KEPT * self._variance + (1.0 - _KEPT) * variance
        self._num_measured += 1

    @property
    def tokens(self) -> float | None:
        """The scale; None while too little was measured to tell it."""
        # Both averages began at 0, by the same factor, so that their ratio needs no correction.
        if self._num_measured < _FEWEST or self._square <= 0.0 or self._variance <= 0.0:
            return None
        return self._variance / self._square

    def state(self) -> dict[str, Any]:
        """What to keep to continue exactly, as JSON values; nothing where nothing was measured."""
        if not self._num_measured:
            return {}
        return {"variance": self._variance, "square": self._square, "num_measured": self._num_measured}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        self._variance, self._square = float(state["variance"]), float(state["square"])
        self._num_measured = int(state["num_measured"])

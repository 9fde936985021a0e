"""The gradient noise scale: about how many tokens a step can have before more of them bring little.

A step's gradient is the mean over its tokens, and the gradient of its first micro-batch the mean over a part of them.
Of the layers both square norms cost nothing but reading a gradient once more, when the first micro-batch of a layer is
done: no further backward, and no memory but two numbers.

What it means: the ratio of the gradient's variance from token to token to its square, of the layers' parameters
(embedding and head add up in other parts), at the weights of the last steps. As documents and not tokens are drawn, it
holds for documents like those of the data. One step's estimate is mostly noise, so both parts are averaged over many,
each by itself; dropout and noise on the embeddings count as noise. A step of one micro-batch tells nothing.

Weights: the mean G_w = sum w g / sum w over tokens of weights w has E |G_w|^2 = |G|^2 + variance * sum w^2 / (sum w)^2,
where a token's gradient does not depend on its weight. So it is as noisy as the plain mean over (sum w)^2 / sum w^2
tokens, its size; with equal weights that is their number. The scale is told in tokens with weights like those of the
steps, of which a step of that size has more.

Source: McCandlish et al., An Empirical Model of Large-Batch Training (arXiv 1812.06162), appendix A.1; the size is
Kish's effective sample size (Survey Sampling, 1965, section 8.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

EVERY_STEPS = 4
"""Steps from one measurement to the next, because reading a gradient once more does take time."""
_KEPT = 0.9
_FEWEST = 5
# Of the whole step's size by weights to its part's: below it, what they differ by is nothing but rounding and chance.
_LEAST_RATIO = 1.1


@dataclass(frozen=True, kw_only=True)
class Part:
    """Supervised tokens of a step: how many have a weight above 0, the sum of their weights, and the sum of the
    weights' squares."""

    num_tokens: int
    weight: float
    square_weight: float

    @classmethod
    def of(cls, num_targets: int, weights_S: Tensor | None = None) -> Part:
        """The first `num_targets` of the step's supervised tokens; without weights all have 1."""
        if weights_S is None:
            return cls(num_tokens=num_targets, weight=float(num_targets), square_weight=float(num_targets))
        weights_S = weights_S[:num_targets].double()
        return cls(
            num_tokens=int(weights_S.count_nonzero()),
            weight=float(weights_S.sum()),
            square_weight=float(weights_S.square().sum()),
        )

    @property
    def size(self) -> float:
        """How many tokens of one weight have a mean as noisy as this one's; 0 of nothing."""
        return self.weight**2 / self.square_weight if self.square_weight else 0.0


class NoiseScale:
    """Averages over measurements. Units: tokens are supervised ones."""

    def __init__(self) -> None:
        self._variance = self._square = 0.0
        self._num_measured = 0

    def observe(self, *, small_square: float, small: Part, big_square: float, big: Part) -> None:
        """Take the square norms of two mean gradients of one step: of a part of its tokens, and of all.

        A part that is nothing or all tells nothing, and neither does one that the weights make about as large as all.
        """
        if not (math.isfinite(small_square) and math.isfinite(big_square)):
            return
        is_weighted = big.size != big.num_tokens
        if not 0 < small.size < big.size or (is_weighted and big.size < _LEAST_RATIO * small.size):
            return
        # Both without bias: E |G_B|^2 = |G|^2 + variance / B, for each of the two sizes.
        square = (big.size * big_square - small.size * small_square) / (big.size - small.size)
        variance = (small_square - big_square) / (1.0 / small.size - 1.0 / big.size)
        self._square = _KEPT * self._square + (1.0 - _KEPT) * square
        # Of a token of these weights, of which a step of that size has more.
        self._variance = _KEPT * self._variance + (1.0 - _KEPT) * variance * big.num_tokens / big.size
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

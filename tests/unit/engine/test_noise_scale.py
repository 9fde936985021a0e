"""The gradient noise scale: the estimator against a known distribution."""

from __future__ import annotations

import pytest
import torch

from horizon_server.engine.noise_scale import NoiseScale

SMALL, BIG, WIDTH = 8, 64, 1000


def measure(scale: NoiseScale, *, signal: float, deviation: float, num_steps: int) -> None:
    """Gradients of tokens whose mean has the square norm `signal`, and each element this standard deviation."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.full((WIDTH,), (signal / WIDTH) ** 0.5, dtype=torch.float64)
    for _ in range(num_steps):
        tokens = mean + deviation * torch.randn(BIG, WIDTH, generator=generator, dtype=torch.float64)
        scale.observe(
            small_square=float(tokens[:SMALL].mean(0).square().sum()),
            small_tokens=SMALL,
            big_square=float(tokens.mean(0).square().sum()),
            big_tokens=BIG,
        )


@pytest.mark.parametrize("expected", [10.0, 200.0])
def test_it_is_the_variance_over_the_square_of_the_mean(expected: float) -> None:
    scale = NoiseScale()
    measure(scale, signal=5.0, deviation=(5.0 * expected / WIDTH) ** 0.5, num_steps=60)
    assert scale.tokens == pytest.approx(expected, rel=0.2)


def test_it_is_unknown_at_first_and_where_noise_is_all() -> None:
    scale = NoiseScale()
    measure(scale, signal=1.0, deviation=0.1, num_steps=4)
    assert scale.tokens is None
    measure(scale, signal=1.0, deviation=0.1, num_steps=1)
    assert scale.tokens is not None

    nothing = NoiseScale()
    # The estimate of a square may be below 0.
    for _ in range(10):
        nothing.observe(small_square=100.0, small_tokens=1, big_square=1.0, big_tokens=10)
    assert nothing.tokens is None


def test_what_is_not_finite_does_not_count_and_a_state_continues() -> None:
    scale, other = NoiseScale(), NoiseScale()
    measure(scale, signal=1.0, deviation=0.1, num_steps=7)
    before = scale.tokens
    scale.observe(small_square=float("nan"), small_tokens=1, big_square=1.0, big_tokens=2)
    other.restore(scale.state())
    assert scale.tokens == before == other.tokens

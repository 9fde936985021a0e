"""The gradient noise scale: the estimator against a known distribution."""

from __future__ import annotations

import pytest
import torch

from horizon_server.engine.noise_scale import NoiseScale, Part

SMALL, BIG, WIDTH = 8, 64, 1000


def measure(scale: NoiseScale, *, signal: float, deviation: float, num_steps: int) -> None:
    """Gradients of tokens whose mean has the square norm `signal`, and each element this standard deviation."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.full((WIDTH,), (signal / WIDTH) ** 0.5, dtype=torch.float64)
    for _ in range(num_steps):
        tokens = mean + deviation * torch.randn(BIG, WIDTH, generator=generator, dtype=torch.float64)
        scale.observe(
            small_square=float(tokens[:SMALL].mean(0).square().sum()),
            small=Part.of(SMALL),
            big_square=float(tokens.mean(0).square().sum()),
            big=Part.of(BIG),
        )


@pytest.mark.parametrize("expected", [10.0, 200.0])
def test_it_is_the_variance_over_the_square_of_the_mean(expected: float) -> None:
    scale = NoiseScale()
    measure(scale, signal=5.0, deviation=(5.0 * expected / WIDTH) ** 0.5, num_steps=60)
    assert scale.tokens == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("weights", [(1.0, 3.0), (0.05, 1.0), (0.0, 1.0)])
def test_weighted_means_give_the_scale_in_tokens_of_their_weights(weights: tuple[float, float]) -> None:
    scale, generator = NoiseScale(), torch.Generator().manual_seed(1)
    signal, variance = 5.0, 250.0
    mean = torch.full((WIDTH,), (signal / WIDTH) ** 0.5, dtype=torch.float64)
    # A quarter of the tokens have the larger weight.
    weights_S = torch.tensor(weights, dtype=torch.float64)[(torch.arange(BIG) % 4 == 0).long()]
    for _ in range(120):
        tokens = mean + (variance / WIDTH) ** 0.5 * torch.randn(BIG, WIDTH, generator=generator, dtype=torch.float64)
        weighted = weights_S[:, None] * tokens
        scale.observe(
            small_square=float((weighted[:SMALL].sum(0) / weights_S[:SMALL].sum()).square().sum()),
            small=Part.of(SMALL, weights_S),
            big_square=float((weighted.sum(0) / weights_S.sum()).square().sum()),
            big=Part.of(BIG, weights_S),
        )
    # So many tokens of these weights give a mean whose noise is as large as what it means: variance * sum w^2 / (sum
    # w)^2 = signal.
    counted_S = weights_S[weights_S > 0]
    expected = variance / signal * float(counted_S.square().mean() / counted_S.mean().square())
    assert scale.tokens == pytest.approx(expected, rel=0.2)


def test_equal_weights_are_none() -> None:
    plain, equal = Part.of(5), Part.of(5, torch.full((9,), 0.25))
    assert (plain.size, plain.num_tokens) == (equal.size, equal.num_tokens) == (5, 5)


@pytest.mark.parametrize(
    "weights", [[0.0, 0.0, 1.0, 1.0], [1.0, 1.0, 9.0, 0.1], [1.0, 1.0, 0.01, 0.01], [1.0, 1.0, 0.0, 0.0]]
)
def test_a_part_that_weighs_nothing_or_about_all_says_nothing(weights: list[float]) -> None:
    scale, weights_S = NoiseScale(), torch.tensor(weights)
    scale.observe(small_square=2.0, small=Part.of(2, weights_S), big_square=1.0, big=Part.of(4, weights_S))
    assert scale.state() == {}


def test_it_is_unknown_at_first_and_where_noise_is_all() -> None:
    scale = NoiseScale()
    measure(scale, signal=1.0, deviation=0.1, num_steps=4)
    assert scale.tokens is None
    measure(scale, signal=1.0, deviation=0.1, num_steps=1)
    assert scale.tokens is not None

    nothing = NoiseScale()
    # The estimate of a square may be below 0.
    for _ in range(10):
        nothing.observe(small_square=100.0, small=Part.of(1), big_square=1.0, big=Part.of(10))
    assert nothing.tokens is None


def test_what_is_not_finite_does_not_count_and_a_state_continues() -> None:
    scale, other = NoiseScale(), NoiseScale()
    measure(scale, signal=1.0, deviation=0.1, num_steps=7)
    before = scale.tokens
    scale.observe(small_square=float("nan"), small=Part.of(1), big_square=1.0, big=Part.of(2))
    other.restore(scale.state())
    assert scale.tokens == before == other.tokens

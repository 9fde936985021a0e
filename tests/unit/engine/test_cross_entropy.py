"""Loss and gradient of logits, block by block and by the kernel, against torch in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from horizon_server.engine import cross_entropy
from horizon_server.engine.cross_entropy import chunk_loss, log_probabilities, write_gradient

RowLosses = Callable[..., Tensor]
NUM_TARGETS = 50
SMOOTHINGS = [0.0, 0.1, 0.9]
VOCABULARIES = [5, 1000, 4099]


def case(vocab_size: int, dtype: torch.dtype, *, num_rows: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(num_rows, vocab_size, generator=generator)).to(dtype)
    return logits, torch.randint(0, vocab_size, (num_rows,), generator=generator)


def exact(logits: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    return by_torch(logits.double(), targets, smoothing)


def by_torch(logits: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().clone().requires_grad_()
    loss = functional.cross_entropy(leaf, targets, reduction="sum", label_smoothing=smoothing) / NUM_TARGETS
    torch.autograd.backward(loss)
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


@pytest.fixture
def kernel(triton_interpreter: Callable[[str], Any]) -> RowLosses:
    row_losses: RowLosses = triton_interpreter("horizon_server.engine.cross_entropy_triton").row_losses
    return row_losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_loss_and_gradient_are_exact_to_rounding(
    vocab_size: int, dtype: torch.dtype, in_place: bool, smoothing: float
) -> None:
    logits, targets = case(vocab_size, dtype)
    kept, (loss, gradient) = logits.clone(), exact(logits, targets, smoothing)
    out = logits if in_place else torch.empty_like(logits)

    got = chunk_loss(logits, targets, divisor=NUM_TARGETS, gradient_SV=out, smoothing=smoothing)

    assert error(got, loss) <= 2e-7
    # A target's gradient loses digits where most of it is spread, and plain fp32 loses more; how many depends on the
    # processor.
    of_plain = error(by_torch(kept.float(), targets, smoothing)[1], gradient)
    assert error(out, gradient) <= (3e-3 if dtype == torch.bfloat16 else max(3e-7, of_plain))
    assert in_place or torch.equal(logits, kept)
    assert error(chunk_loss(kept, targets, divisor=NUM_TARGETS, smoothing=smoothing), loss) <= 2e-7
    plain = functional.cross_entropy(kept.float(), targets, reduction="sum", label_smoothing=smoothing) / NUM_TARGETS
    assert error(got, plain.double()) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_targets_may_have_weights(dtype: torch.dtype, smoothing: float) -> None:
    logits, targets = case(1000, dtype)
    weights = torch.tensor([0.3, 1.0, 2.5, 0.001, 100.0, 0.7, 1.0])
    kept, leaf = logits.clone(), logits.double().requires_grad_()
    losses = functional.cross_entropy(leaf, targets, reduction="none", label_smoothing=smoothing)
    loss = (weights * losses).sum() / weights.double().sum()
    torch.autograd.backward(loss)

    divisor = float(weights.double().sum())
    got = chunk_loss(logits, targets, divisor=divisor, weights_S=weights, gradient_SV=logits, smoothing=smoothing)

    assert error(got, loss.detach()) <= 2e-7
    assert leaf.grad is not None
    assert error(logits, leaf.grad) <= (3e-3 if dtype == torch.bfloat16 else 5e-7)
    parts = [
        chunk_loss(kept[rows], targets[rows], divisor=divisor, weights_S=weights[rows], smoothing=smoothing)
        for rows in (slice(0, 3), slice(3, 7))
    ]
    assert float(sum(parts)) == pytest.approx(float(got), rel=1e-15)


def test_weights_of_one_give_the_bits_of_none() -> None:
    logits, targets = case(4099, torch.float32)
    plain, weighted = torch.empty_like(logits), torch.empty_like(logits)
    loss = chunk_loss(logits, targets, divisor=NUM_TARGETS, gradient_SV=plain)

    same = chunk_loss(logits, targets, divisor=float(NUM_TARGETS), weights_S=torch.ones(7), gradient_SV=weighted)

    assert torch.equal(loss, same)
    assert torch.equal(plain, weighted)


def test_without_smoothing_the_bits_are_those_of_torch() -> None:
    logits, targets = case(1000, torch.float32)
    leaf = logits.clone().requires_grad_()
    torch.autograd.backward(functional.cross_entropy(leaf, targets, reduction="sum") * (1 / NUM_TARGETS))

    chunk_loss(logits, targets, divisor=NUM_TARGETS, gradient_SV=logits)

    assert leaf.grad is not None
    assert torch.equal(logits, leaf.grad)


def test_rows_are_cut_into_blocks_without_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, targets = case(1000, torch.float32, num_rows=10)
    whole, parts = torch.empty_like(logits), torch.empty_like(logits)
    loss = chunk_loss(logits, targets, divisor=NUM_TARGETS, gradient_SV=whole)
    smoothed = torch.empty_like(logits)
    chunk_loss(logits, targets, divisor=NUM_TARGETS, gradient_SV=smoothed, smoothing=0.2)
    monkeypatch.setattr(cross_entropy, "_BLOCK_ELEMENTS", 3000)

    assert torch.equal(chunk_loss(logits, targets, divisor=NUM_TARGETS, gradient_SV=parts), loss)
    assert torch.equal(parts, whole)
    chunk_loss(logits, targets, divisor=NUM_TARGETS, gradient_SV=parts, smoothing=0.2)
    assert torch.equal(parts, smoothed)


def exact_with(logits: Tensor, targets: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities, and the gradient of their sum with these coefficients."""
    leaf = logits.double().requires_grad_()
    logprobs = torch.log_softmax(leaf, 1).gather(1, targets[:, None])[:, 0]
    torch.autograd.backward((coefficients * logprobs).sum())
    assert leaf.grad is not None
    return logprobs.detach(), leaf.grad


COEFFICIENTS = torch.tensor([0.3, -2.0, 0.0, 1e-3, -0.7, 5.0, -1.0], dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("in_place", [True, False])
def test_every_token_may_have_a_coefficient_of_its_own(vocab_size: int, dtype: torch.dtype, in_place: bool) -> None:
    logits, targets = case(vocab_size, dtype)
    logprobs, gradient = exact_with(logits, targets, COEFFICIENTS)
    out = logits if in_place else torch.empty_like(logits)

    got = log_probabilities(logits, targets)
    write_gradient(logits, targets, COEFFICIENTS, out)

    assert got.dtype == torch.float32
    assert error(got, logprobs) <= 2e-7
    assert error(out, gradient) <= (3e-7 if dtype == torch.float32 else 3e-3)
    assert not out[2].any()


def test_one_coefficient_for_all_gives_the_bits_of_the_mean_loss() -> None:
    logits, targets = case(4099, torch.float32)
    mean, weighted = torch.empty_like(logits), torch.empty_like(logits)
    chunk_loss(logits, targets, divisor=NUM_TARGETS, gradient_SV=mean)

    write_gradient(logits, targets, torch.full((7,), -1 / NUM_TARGETS, dtype=torch.float64), weighted)

    assert torch.equal(weighted, mean)


def test_autograd_refuses_logits_that_were_kept_and_overwritten() -> None:
    hidden = torch.randn(4, 6, requires_grad=True)
    logits = torch.tanh(hidden)
    targets = torch.zeros(4, dtype=torch.int64)
    chunk_loss(logits.detach(), targets, divisor=4, gradient_SV=logits.detach())

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(logits, logits.detach())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(value: float) -> None:
    logits, targets = case(100, torch.float32)
    logits[2, 5] = value

    assert not torch.isfinite(chunk_loss(logits, targets, divisor=7, gradient_SV=logits))
    assert not torch.isfinite(logits).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_the_kernel_agrees(
    kernel: RowLosses, vocab_size: int, dtype: torch.dtype, in_place: bool, smoothing: float
) -> None:
    wide, targets = case(vocab_size + 3, dtype)
    # Rows that begin at any address.
    logits, targets = wide[:, 1:-2], targets % vocab_size
    loss, gradient = exact(logits, targets, smoothing)
    out = logits if in_place else torch.empty(logits.shape, dtype=dtype)

    losses = kernel(logits, targets, out, 1 / NUM_TARGETS, smoothing)

    assert error(losses.double().sum() / NUM_TARGETS, loss) <= 2e-7
    # The interpreter cuts bits off where a GPU rounds to bf16.
    assert error(out, gradient) <= (3e-7 if dtype == torch.float32 else 6e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_place", [True, False])
def test_the_kernel_agrees_with_coefficients_too(kernel: RowLosses, dtype: torch.dtype, in_place: bool) -> None:
    logits, targets = case(4099, dtype)
    logprobs, gradient = exact_with(logits, targets, COEFFICIENTS)
    out = logits if in_place else torch.empty_like(logits)

    losses = kernel(logits, targets, out, -COEFFICIENTS.float())

    assert error(losses, -logprobs) <= 2e-7
    assert error(out, gradient) <= (3e-7 if dtype == torch.float32 else 6e-3)


def test_the_kernel_leaves_logits_alone_without_a_gradient(kernel: RowLosses) -> None:
    logits, targets = case(300, torch.float32)
    logits[:, :200], targets = -torch.inf, targets % 100 + 200
    kept = logits.clone()

    losses = kernel(logits, targets, None, 1.0)

    assert torch.equal(logits, kept)
    assert torch.allclose(losses, functional.cross_entropy(logits, targets, reduction="none"))

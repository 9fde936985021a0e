from __future__ import annotations

import math

import pytest
import torch

from horizon_server.engine.optimizer import clip_coefficient, global_norm, num_updated_in_backward


def test_the_coefficient_is_that_of_torch() -> None:
    for scale in (0.1, 1.0, 40.0):
        parameter = torch.nn.Parameter(torch.zeros(1000))
        parameter.grad = scale * torch.randn(1000, generator=torch.Generator().manual_seed(0))
        before = parameter.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_([parameter], 25.0)

        assert torch.allclose(before * clip_coefficient(float(norm), 25.0), parameter.grad, rtol=1e-6)


def test_without_clipping_gradients_stay() -> None:
    assert clip_coefficient(1e9, None) == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_unit_makes_the_norm_not_finite(bad: float) -> None:
    assert global_norm(torch.tensor([9.0, 16.0], dtype=torch.float64)) == 5.0
    assert not math.isfinite(global_norm(torch.tensor([9.0, bad, 16.0], dtype=torch.float64)))


@pytest.mark.parametrize(
    ("loss", "sums", "wanted"),
    [
        (2.0, [1.0, 1.0, 1.0], 3),
        (2.0, [math.inf, 1.0, 1.0], 2),
        (2.0, [1.0, math.nan, 1.0], 1),
        (2.0, [1.0, 1.0, math.nan], 0),
        (math.nan, [1.0, 1.0, 1.0], 0),
    ],
)
def test_backward_updates_from_the_head_to_the_first_bad_unit(loss: float, sums: list[float], wanted: int) -> None:
    assert num_updated_in_backward(loss, torch.tensor(sums, dtype=torch.float64)) == wanted

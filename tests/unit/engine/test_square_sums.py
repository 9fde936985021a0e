"""Sums of squares of blocks, by torch and by the GPU's kernel in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from horizon_server.engine import square_sums


@pytest.fixture(params=["torch", "triton"])
def square_blocks(
    request: pytest.FixtureRequest, triton_interpreter: Callable[[str], Any]
) -> Callable[[Tensor, int, Tensor], None]:
    if request.param == "torch":
        return square_sums.square_blocks
    found: Callable[[Tensor, int, Tensor], None]
    found = triton_interpreter("horizon_server.engine.square_sums_triton").block_sums
    return found


@pytest.mark.parametrize("block_elements", [2048, 2049, 100])
def test_blocks_are_summed_whatever_their_number(
    block_elements: int, square_blocks: Callable[[Tensor, int, Tensor], None]
) -> None:
    values = torch.randn(5 * block_elements, generator=torch.Generator().manual_seed(0))
    wanted = values.double().square().view(5, -1).sum(1)
    for number in (5, 1):
        found = torch.zeros(number, dtype=torch.float64)
        square_blocks(values[: number * block_elements], block_elements, found)
        torch.testing.assert_close(found, wanted[:number], rtol=1e-6, atol=0)

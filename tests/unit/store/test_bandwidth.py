"""The measurement that doctor and bench print."""

from __future__ import annotations

import pytest

from horizon_server.store.bandwidth import adamw_bytes_per_parameter, measure_bandwidth
from horizon_server.store.native import kernel_info


def test_an_update_moves_26_bytes_a_parameter_with_bf16_gradients() -> None:
    assert (adamw_bytes_per_parameter(2), adamw_bytes_per_parameter(4)) == (26, 28)


@pytest.mark.skipif(not kernel_info().available, reason=f"no compiled kernel: {kernel_info().reason}")
@pytest.mark.parametrize("grad_bytes", [2, 4])
def test_both_are_timed_over_the_same_bytes(grad_bytes: int) -> None:
    measured = measure_bandwidth(num_threads=2, num_parameters=1 << 18, grad_bytes=grad_bytes, num_pairs=3)
    assert measured is not None
    assert measured.adamw_bytes_per_s > 1e8 and measured.triad_bytes_per_s > 1e8
    assert 0.01 < measured.ratio < 100

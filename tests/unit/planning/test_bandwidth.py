"""The measurement that doctor and bench print."""

from __future__ import annotations

from pathlib import Path

import pytest

from horizon_server.planning.bandwidth import adamw_bytes_per_parameter, measure_bandwidth, parameters_beyond_caches
from horizon_server.store.native import kernel_info


def test_an_update_moves_26_bytes_a_parameter_with_bf16_gradients() -> None:
    assert (adamw_bytes_per_parameter(2), adamw_bytes_per_parameter(4)) == (26, 28)


@pytest.mark.parametrize(
    ("last_cache", "fewest"), [("48M", 1 << 24), ("64M", (64 << 20) * 4 // 14), ("65536K", (64 << 20) * 4 // 14)]
)
def test_what_is_measured_does_not_fit_the_caches(last_cache: str, fewest: int, tmp_path: Path) -> None:
    for number, size in enumerate(["48K", last_cache]):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(f"{size}\n", "ascii")

    assert parameters_beyond_caches(tmp_path) == fewest
    assert parameters_beyond_caches(tmp_path / "none") == 1 << 24


@pytest.mark.skipif(not kernel_info().available, reason=f"no compiled kernel: {kernel_info().reason}")
@pytest.mark.parametrize("grad_bytes", [2, 4])
def test_both_are_timed_over_the_same_bytes(grad_bytes: int) -> None:
    measured = measure_bandwidth(num_threads=2, num_parameters=1 << 18, grad_bytes=grad_bytes, num_pairs=3)
    assert measured is not None
    assert measured.adamw_bytes_per_s > 1e8 and measured.triad_bytes_per_s > 1e8
    assert 0.01 < measured.ratio < 100 and 0.01 < measured.compressed_ratio < 100

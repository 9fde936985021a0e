"""GPUs that are asked about: the table is complete, says that it estimates, and gives way to what was measured."""

from __future__ import annotations

import dataclasses

import pytest
from tests.support.rates import RATES

from horizon_server.errors import InvalidSpec
from horizon_server.planning.gpus import GPUS, estimated_rates, rates_of_machine


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_of_the_table_has_rates_below_its_data_sheet(name: str) -> None:
    gpu, rates = GPUS[name], estimated_rates(name, host_bytes_per_s=2e11)
    assert (rates.name, rates.measured, rates.adamw_bytes_per_s) == (name, False, 2e11)
    assert all(number > 0 for number in rates.numbers())
    # More parameters than with exact states, and not more than memory has the bytes for.
    assert 2e11 / 26 < rates.compressed_parameters_per_s < 2e11 / 12.25
    (width,) = rates.widths
    reached = [rate for _, rate in (*width.gemm_flops_per_s, *rates.attention_forward_flops_per_s)]
    assert max(reached) < gpu.bf16_flops_per_s == rates.peak_flops_per_s
    assert max(width.elementwise_bytes_per_s, rates.accumulate_bytes_per_s) < gpu.memory_bytes_per_s
    assert rates.h2d_bytes_per_s == rates.d2h_bytes_per_s < gpu.link_bytes_per_s


def test_a_link_that_is_given_wins_over_the_data_sheet() -> None:
    assert estimated_rates("h100", host_bytes_per_s=2e11, link_bytes_per_s=1e10).h2d_bytes_per_s == 1e10


def test_what_the_node_has_measured_on_the_same_gpu_wins_over_the_table() -> None:
    measured = dataclasses.replace(RATES, name="NVIDIA H100 80GB HBM3")
    found = rates_of_machine("H100", host_bytes_per_s=2e11, link_bytes_per_s=None, measured=measured)
    # The host is 200 times as fast as the measured one, and so are its processors.
    wanted = dataclasses.replace(measured, adamw_bytes_per_s=2e11, compressed_parameters_per_s=2e11)
    assert found == wanted
    linked = rates_of_machine("h100", host_bytes_per_s=2e11, link_bytes_per_s=3e10, measured=measured)
    assert (linked.h2d_bytes_per_s, linked.d2h_bytes_per_s, linked.measured) == (3e10, 3e10, True)
    other = rates_of_machine("h200", host_bytes_per_s=2e11, link_bytes_per_s=None, measured=measured)
    assert other == estimated_rates("h200", host_bytes_per_s=2e11)


def test_an_unknown_gpu_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidSpec, match="gpu is 'b300', which is not known; known GPUs: h100, h100-pcie, h200"):
        estimated_rates("b300", host_bytes_per_s=2e11)

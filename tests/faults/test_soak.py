"""A daemon's life at speed: what it uses stays flat. HORIZON_SOAK_S says for how many seconds (two hours: `python -m
bench.soak`)."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from bench.soak import Sample, Soak, growth, judge
from tests.support.node import Node

SOAK_S = float(os.environ.get("HORIZON_SOAK_S", "20"))


@pytest.mark.timeout(SOAK_S + 600)
@pytest.mark.skipif("HORIZON_SOAK_S" not in os.environ, reason="HORIZON_SOAK_S is not set")
def test_memory_descriptors_threads_and_disk_stay_flat(own_node: Callable[..., Node]) -> None:
    soak = Soak(own_node())
    soak.run(SOAK_S)
    grown = {
        name: f"{grew:.1f}, allowed {most:.1f}" for name, (grew, most) in judge(soak.samples).items() if grew > most
    }
    assert not soak.problems
    assert not grown, soak.samples
    assert all(soak.done.values()), soak.done


def test_growth_is_the_line_through_most_samples() -> None:
    times_s = [float(second) for second in range(20)]
    assert growth(times_s, [5.0] * 19 + [500.0]) == 0
    assert growth(times_s, [3.0 * second for second in times_s]) == pytest.approx(57)


def test_a_leak_of_one_descriptor_a_job_is_found() -> None:
    steady = {"rss_mib": 100.0, "descriptors": 40.0, "threads": 12.0, "children": 1.0, "disk_mib": 50.0}
    samples = [Sample(10.0 * i, 3 * i, {**steady, "descriptors": 40.0 + 3 * i}) for i in range(10)]
    grown = {name for name, (grew, allowed) in judge(samples).items() if grew > allowed}
    assert grown == {"descriptors"}

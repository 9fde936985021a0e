"""What one machine says of its planner is enough for another one to plan as it does."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tests.support.rates import RATES
from tests.unit.planning.test_planner import GIB, folder, planner_of, spec_of

from horizon_server.codec import from_plain, to_plain
from horizon_server.planning.machine import Gpu
from horizon_server.planning.planner import Planner, PlannerFacts

__all__ = ["folder"]  # a fixture

GPUS = tuple(Gpu(index=i, name="H100", memory_bytes=80 * GIB, uuid=f"GPU-{i}") for i in range(2))


def elsewhere(planner: Planner) -> Planner:
    """The planner that another machine has of it: one with other settings, memory and GPUs."""
    facts = from_plain(PlannerFacts, to_plain(planner.facts))
    return planner_of(arena_bytes=7 * GIB, num_threads=9, host_devices=3, host_bytes=GIB).of_facts(facts)


@pytest.mark.parametrize(
    "planner",
    [
        planner_of(),
        planner_of(rates={"host": RATES}, num_threads=4, host_devices=2, free_devices=("host:1",)),
        planner_of(accelerators=GPUS, rates={"cuda": RATES}),
        planner_of(accelerators=GPUS, rates={"cuda": RATES}, free_devices=()),
        planner_of(host_bytes=2**28),
    ],
    ids=["host", "two devices", "gpus", "no free gpu", "too small"],
)
def test_a_plan_made_elsewhere_is_the_machines_own(planner: Planner, folder: Path) -> None:
    for gpus in (1, "1-2") if planner._num_devices("host") == 2 or planner._accelerators else (1,):
        spec = spec_of(gpus=gpus)
        assert elsewhere(planner).plan(spec, folder) == planner.plan(spec, folder)


def test_the_speed_of_the_network_is_told(folder: Path) -> None:
    planner = planner_of()
    planner.network_bytes_per_s = 1.25e9
    assert elsewhere(planner).network_bytes_per_s == pytest.approx(1.25e9)
    facts = dataclasses.replace(planner.facts, free_devices=("cuda:0",))
    assert planner.of_facts(facts).facts.free_devices == ("cuda:0",)

"""The forecast for the largest open models: the page shows what the planner says today."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.giant import DENSE, outline, table

from horizon_server.planning.trainable import open_for_training
from horizon_server.spec import OptimizerStates, TrainSpec
from horizon_server.store.drive_layout import driven_planes, state_bytes
from horizon_server.store.layout import PLANE_BYTES

PAGE = Path(__file__).resolve().parents[3] / "docs" / "larger.md"


def test_the_page_shows_what_the_planner_says() -> None:
    assert "\n".join(table()) in PAGE.read_text("utf-8")


@pytest.mark.parametrize(("states", "in_memory", "on_drives"), [("exact", 12, 10), ("compressed", 5.125, 3.125)])
def test_the_page_has_the_bytes_of_a_parameter(states: OptimizerStates, in_memory: float, on_drives: float) -> None:
    page, gradient = PAGE.read_text("utf-8"), 2
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "vocab_size": 256}
    with outline({**DENSE, **sizes, "num_hidden_layers": 1}) as path:
        layout = open_for_training(path, TrainSpec(optimizer_states=states)).layout
    planes = driven_planes(layout, with_lo=True)
    states_bytes, elements = state_bytes(layout, 1, planes), layout.units[1].trained_elements
    all_bytes = states_bytes + layout.units[1].elements_in("hi") * PLANE_BYTES["hi"]
    assert all_bytes / elements == pytest.approx(in_memory, rel=1e-3)
    assert states_bytes / elements == pytest.approx(on_drives, rel=1e-3)
    assert f"| {states} states, no clipping | {in_memory:g} |" in page
    assert f"| {states} states, clipping | {in_memory + gradient:g} |" in page
    left = in_memory - on_drives
    assert f"| states on drives, no clipping | {left:g} |" in page and f"clipping | {left + gradient:g} |" in page

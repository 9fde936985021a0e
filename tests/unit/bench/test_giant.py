"""The forecast for the largest open models: the page shows what the planner says today."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from bench.giant import DENSE, outline, table

from horizon_server.planning.machine import HostMemory
from horizon_server.planning.planner import Planner
from horizon_server.planning.trainable import open_for_training
from horizon_server.records.plan import PlannedMachine
from horizon_server.settings import load_settings
from horizon_server.spec import OptimizerStates, TrainSpec, parse_job_spec
from horizon_server.store.drive_layout import driven_planes, state_bytes
from horizon_server.store.layout import PLANE_BYTES

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE = DOCS / "larger.md"
QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
SMALL_NODE = PlannedMachine(
    gpu="h100", host_gbps=300, drive_read_gbps=6.5, drive_write_gbps=3.5, drive_endurance_bytes=14 * 10**15
)


def test_the_page_shows_what_the_planner_says() -> None:
    assert "\n".join(table()) in PAGE.read_text("utf-8")


@pytest.mark.parametrize(
    ("page", "states", "host_gib"), [("larger.md", "exact", 47.5), ("drives.md", "compressed", 51.5)]
)
def test_pages_show_what_a_refused_plan_says(page: str, states: OptimizerStates, host_gib: float) -> None:
    train = {"max_steps": 1000, "tokens_per_step": 65_536, "sequence_length": 4096, "optimizer_states": states}
    spec = parse_job_spec({"name": "j", "model": "m", "dataset": "d", "device": "cuda", "train": train})
    machine = replace(SMALL_NODE, host_memory_bytes=int(host_gib * 2**30))
    planner = Planner(load_settings(), memory=lambda: HostMemory(limit_bytes=0, available_bytes=0), num_threads=32)
    with outline(QWEN_7B) as path:
        message = planner.plan_elsewhere(spec, path, machine).message
    assert message in " ".join((DOCS / page).read_text("utf-8").split())


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

"""What plans put on drives, what that costs, and what they say where it would help."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.support.rates import RATES
from tests.unit.planning.test_planner import CONFIG, GIB, H100, spec_of

from horizon_server.errors import InvalidSpec
from horizon_server.planning import drives as drives_module
from horizon_server.planning.drives import NodeDrives, drives_of, find_drives, kept_first, on_one_drive
from horizon_server.planning.machine import Accelerator, HostMemory
from horizon_server.planning.model_folder import open_model_folder
from horizon_server.planning.planner import Planner
from horizon_server.planning.play import DriveWork, Visit, play
from horizon_server.planning.rates import DeviceRates, DriveRates
from horizon_server.planning.residency import moving_units, state_units
from horizon_server.planning.step_time import predict_step
from horizon_server.planning.step_work import work_of_step
from horizon_server.planning.trainable import open_for_training
from horizon_server.records.execution import RING_SLOTS, SPAN_ELEMENTS, Execution, OnDrives, Residency
from horizon_server.records.plan import Plan, PlannedMachine
from horizon_server.settings import load_settings
from horizon_server.spec import JobSpec, parse_job_spec
from horizon_server.store.drive_files import DriveSpeed
from horizon_server.store.drive_layout import INDEX_PLANE, DriveLayout, driven_planes
from horizon_server.store.layout import build_layout

DRIVES = NodeDrives(
    folders=("/drives/a", "/drives/b"),
    rates=DriveRates(read_bytes_per_s=2e9, write_bytes_per_s=1e9),
    endurance_bytes=10**15,
)
NUM_LAYERS, HIDDEN, INNER = 40, 512, 768
MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose states are more than what drives cost in memory."""
    made = tmp_path_factory.mktemp("model")
    (made / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": HIDDEN, "intermediate_size": INNER}))
    shapes = {"model.embed_tokens.weight": (64, HIDDEN), "model.norm.weight": (HIDDEN,), "lm_head.weight": (64, HIDDEN)}
    shapes |= {f"model.layers.{index}.mlp.up_proj.weight": (INNER, HIDDEN) for index in range(NUM_LAYERS)}
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, made / "model.safetensors")
    return made


def planner_of(
    host_bytes: int,
    drives: NodeDrives | None = DRIVES,
    *,
    accelerators: tuple[Accelerator, ...] = (),
    cuda_rates: DeviceRates = RATES,
) -> Planner:
    return Planner(
        load_settings(host_memory_reserve_bytes=0, device_arena_bytes=GIB, numa_interleave=False),
        memory=lambda: HostMemory(limit_bytes=host_bytes, available_bytes=host_bytes),
        num_threads=1,
        accelerators=accelerators,
        rates=lambda: {"host": RATES, "host_bfloat16": RATES, "cuda": cuda_rates},
        drives=drives,
    )


def on_drives(spec: JobSpec, **memory: Any) -> JobSpec:
    return parse_job_spec({**spec.model_dump(mode="json"), "memory": {"tier": "drive", **memory}})


def plan(folder: Path, spec: JobSpec, host_bytes: int, **of_node: Any) -> Plan:
    return planner_of(host_bytes, **of_node).plan_to_start(spec, folder)


def needed(folder: Path, spec: JobSpec, **of_node: Any) -> int:
    return plan(folder, spec, 64 * GIB, **of_node).host_total_bytes


def test_a_job_that_fits_has_nothing_on_drives(folder: Path) -> None:
    found = plan(folder, on_drives(spec_of()), 64 * GIB)
    assert found.drives is None and not found.execution.drives.units and found.fits
    assert INDEX_PLANE not in found.plane_bytes


@pytest.mark.parametrize("train", [{}, {"max_grad_norm": None}, {"compute_dtype": "bfloat16"}])
def test_as_few_layers_as_make_it_fit_are_on_drives(folder: Path, train: dict[str, Any]) -> None:
    spec = spec_of(**train)
    whole = needed(folder, spec)
    numbers = []
    for short in (1, 10 * MIB, 40 * MIB):
        found = plan(folder, on_drives(spec), whole - short)
        assert found.fits and found.drives is not None and whole - short >= found.host_total_bytes
        units = found.execution.drives.units
        assert found.drives.num_layers == len(units) and found.drives.num_bytes == sum(found.drive_file_bytes)
        assert found.execution.drives.folders == DRIVES.folders
        assert ("lo" in found.execution.drives.planes) == (train.get("compute_dtype") == "bfloat16")
        # Evenly spread: no two gaps differ by more than one layer.
        gaps = [later - former for former, later in itertools.pairwise(units)]
        assert max(gaps) - min(gaps) <= 1
        # One layer fewer would not fit.
        of_layer = found.drives.num_bytes // len(units)
        assert found.host_total_bytes + of_layer > whole - short
        numbers.append(len(units))
    assert numbers == sorted(numbers) and numbers[0] > RING_SLOTS and numbers[-1] < NUM_LAYERS


def test_head_and_embedding_come_after_all_layers(folder: Path) -> None:
    """The smallest memory that fits, and one byte less."""
    spec = on_drives(spec_of())
    everything = plan(folder, spec, GIB // 4)
    assert everything.execution.drives.units == tuple(range(NUM_LAYERS + 2)) and everything.drives is not None
    assert everything.drives.text.startswith(f"states of {NUM_LAYERS} layers, the head and the embedding (")
    least = plan(folder, spec, everything.host_total_bytes)
    assert least.fits and least.execution.drives.units == everything.execution.drives.units
    # Their states are less than the sum of these steps.
    more = [plan(folder, spec, everything.host_total_bytes + (number << 16)).execution.drives for number in range(9)]
    ends = [tuple(unit for unit in on.units if unit in (0, NUM_LAYERS + 1)) for on in more]
    assert ends == sorted(ends, key=len, reverse=True) and {*ends} == {(0, NUM_LAYERS + 1), (NUM_LAYERS + 1,), ()}
    assert all(on.units[-NUM_LAYERS:] for on in more)


def test_the_ring_does_not_grow_with_the_layer() -> None:
    """Of a mixture of experts, whose layers are 1,000 spans."""
    shapes = {"model.embed_tokens.weight": (64, 8), "model.norm.weight": (8,)}
    shapes |= {f"model.layers.0.experts.{index}.weight": (SPAN_ELEMENTS, 8) for index in range(125)}
    layout = build_layout(shapes, num_layers=1, tied=True)
    drives = DriveLayout(layout, OnDrives(units=(1,), planes=driven_planes(layout, with_lo=True), folders=("/a",)))
    assert drives.ring_bytes == 3 * 10 * SPAN_ELEMENTS == 480 * MIB
    assert drives.num_bytes == 10_000 * SPAN_ELEMENTS and len(drives.parts(1)) == 1000


def test_a_table_on_drives_is_waited_for(folder: Path) -> None:
    """Its drive's time is in front of the next step, whatever else there is."""
    slow = dataclasses.replace(DRIVES, rates=DriveRates(read_bytes_per_s=1e6, write_bytes_per_s=1e6))
    spec = on_drives(spec_of(max_grad_norm=None))
    found = plan(folder, spec, GIB // 4, drives=slow)
    steps = {}
    for units in (found.execution.drives.units, found.execution.drives.units[1:]):
        on = dataclasses.replace(found.execution.drives, units=units)
        execution = dataclasses.replace(found.execution, drives=on)
        with_rates = dataclasses.replace(RATES, drives=slow.rates)
        opened = open_for_training(folder, spec.train)
        work = work_of_step(opened, spec.train.recipe, execution)
        steps[len(units)] = predict_step(work, with_rates, shares_processors=True).step_s
    table_bytes = 64 * HIDDEN * 8
    assert max(steps.values()) - min(steps.values()) >= 2 * table_bytes / 1e6


def test_what_no_drive_can_help_is_refused_as_without(folder: Path) -> None:
    found = plan(folder, on_drives(spec_of()), GIB // 4)
    assert not found.fits and found.message and "memory.tier" not in found.message


def test_a_job_that_does_not_fit_is_told_of_drives(folder: Path) -> None:
    # Else compressed states are what costs less.
    spec = spec_of(optimizer_states="compressed")
    found = plan(folder, spec, needed(folder, spec) - 16 * MIB)
    assert not found.fits
    assert re.search(
        r"it would fit with memory\.tier: drive \(states of \d+ layers \(.*\), written once a step, .* by the whole "
        r"job, 0\.00% of what the drives are rated for, .* s a step\)",
        found.message,
    )
    without = plan(folder, spec, needed(folder, spec) - 16 * MIB, drives=None)
    assert "drive" not in without.message


def test_a_job_that_wears_the_drives_must_say_so(folder: Path) -> None:
    spec = on_drives(spec_of(max_steps=1000))
    limit = needed(folder, spec_of()) - 20 * MIB
    num_bytes = plan(folder, spec, limit).drives.num_bytes  # type: ignore[union-attr]
    few = dataclasses.replace(DRIVES, endurance_bytes=20 * 1000 * num_bytes - 1)
    with pytest.raises(InvalidSpec, match=r"5\.00% of what the drives are rated for; that is more than 5%") as caught:
        plan(folder, spec, limit, drives=few)
    assert [violation.field for violation in caught.value.violations] == ["memory.accept_wear"]
    enough = dataclasses.replace(few, endurance_bytes=20 * 1000 * num_bytes)
    assert plan(folder, spec, limit, drives=enough).drives is not None
    assert plan(folder, on_drives(spec, accept_wear=True), limit, drives=few).fits


def test_drives_of_unknown_endurance_must_be_accepted(folder: Path) -> None:
    limit, unknown = needed(folder, spec_of()) - 20 * MIB, dataclasses.replace(DRIVES, endurance_bytes=None)
    with pytest.raises(InvalidSpec, match="tier_endurance_bytes is not set"):
        plan(folder, on_drives(spec_of()), limit, drives=unknown)
    found = plan(folder, on_drives(spec_of(), accept_wear=True), limit, drives=unknown)
    assert found.drives is not None and found.drives.endurance_share is None and found.drives.written_bytes


def test_a_drive_without_room_is_a_warning(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, drives = needed(folder, spec_of()) - 20 * MIB, dataclasses.replace(DRIVES, folders=(str(tmp_path),))
    assert not any("tier_dirs" in line for line in plan(folder, on_drives(spec_of()), limit, drives=drives).warnings)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=MIB))
    (warning,) = [line for line in plan(folder, on_drives(spec_of()), limit, drives=drives).warnings if "tier" in line]
    assert f"the job's file on {tmp_path}" in warning and "1.0 MiB are free" in warning


def test_a_node_without_drives_refuses_by_field(folder: Path) -> None:
    with pytest.raises(InvalidSpec, match="this node has no drive for it; ask an admin to set tier_dirs"):
        plan(folder, on_drives(spec_of()), 64 * GIB, drives=None)


def test_a_job_that_has_begun_continues_in_memory_where_its_drives_are_gone(folder: Path) -> None:
    spec = on_drives(spec_of())
    found = planner_of(64 * GIB, None).plan_to_start(spec, folder, has_begun=True)
    assert found.fits and found.drives is None
    refused = planner_of(needed(folder, spec_of()) - 20 * MIB, None).plan_to_start(spec, folder, has_begun=True)
    assert not refused.fits and "this node has no drive for it" in refused.message


def test_a_machine_that_is_asked_about_has_the_drives_that_are_given(folder: Path) -> None:
    planner, machine = planner_of(GIB), PlannedMachine(gpu="h100", host_gbps=300)
    # Else compressed states are what costs less.
    spec = spec_of(optimizer_states="compressed")
    need = planner.plan_elsewhere(spec, folder, machine).host_total_bytes
    short = dataclasses.replace(
        machine,
        host_memory_bytes=need - 20 * MIB,
        drive_read_gbps=27.0,
        drive_write_gbps=11.0,
        drive_endurance_bytes=10**15,
    )
    refused = planner.plan_elsewhere(spec, folder, short)
    assert not refused.fits and "memory.tier: drive" in refused.message
    # Nobody's drives are worn by a question, so nothing has to be accepted.
    planned = planner.plan_elsewhere(on_drives(spec), folder, short)
    assert planned.fits and planned.drives is not None and planned.drives.endurance_share
    slower = dataclasses.replace(short, drive_write_gbps=0.001)
    slow = planner.plan_elsewhere(on_drives(spec), folder, slower)
    assert planned.prediction is not None and slow.prediction is not None
    assert slow.prediction.step_s > planned.prediction.step_s and slow.prediction.bound == "drive"


@pytest.mark.parametrize(
    ("given", "field", "why"),
    [
        ({}, "machine.drive_read_gbps", "the machine that is asked about has no drives"),
        ({"drive_read_gbps": 2.0}, "machine.drive_write_gbps", "one of both speeds is given"),
        ({"drive_write_gbps": 2.0}, "machine.drive_read_gbps", "one of both speeds is given"),
        ({"drive_read_gbps": 0.0, "drive_write_gbps": 2.0}, "machine.drive_read_gbps", "it must be above 0"),
    ],
)
def test_drives_of_a_machine_that_cannot_be_are_refused_by_field(
    folder: Path, given: dict[str, Any], field: str, why: str
) -> None:
    machine = PlannedMachine(gpu="h100", host_gbps=300, **given)
    with pytest.raises(InvalidSpec, match=why) as caught:
        planner_of(GIB).plan_elsewhere(on_drives(spec_of()), folder, machine)
    assert [violation.field for violation in caught.value.violations] == [field]


@pytest.mark.parametrize("field", ["gpus", "nodes"])
def test_several_devices_are_refused(field: str) -> None:
    with pytest.raises(InvalidSpec, match=rf"{field} is 2, and states on drives are updated by one device"):
        parse_job_spec({"name": "j", "model": "m", "dataset": "d", field: 2, "memory": {"tier": "drive"}})


def test_on_a_gpu_low_halves_are_there_too(folder: Path) -> None:
    spec = spec_of(device="cuda")
    limit = needed(folder, spec, accelerators=(H100,)) - 20 * MIB
    found = plan(folder, on_drives(spec), limit, accelerators=(H100,))
    assert found.fits and "lo" in found.execution.drives.planes


def test_a_slow_drive_bounds_the_step_and_a_fast_one_costs_nothing(folder: Path) -> None:
    limit = needed(folder, spec_of()) - 20 * MIB
    fast, slow = (
        dataclasses.replace(DRIVES, rates=DriveRates(read_bytes_per_s=rate, write_bytes_per_s=rate))
        for rate in (1e15, 1e3)
    )
    quick, late = (plan(folder, on_drives(spec_of()), limit, drives=drives).prediction for drives in (fast, slow))
    whole = plan(folder, spec_of(), 64 * GIB).prediction
    assert quick is not None and late is not None and whole is not None
    assert quick.step_s == pytest.approx(whole.step_s) and quick.bound == whole.bound
    assert late.bound == "drive" and late.step_s > whole.step_s
    assert late.step_s >= late.parts_s["drive"], "no step is shorter than what its drives do"


@pytest.mark.parametrize("in_backward", [False, True])
def test_the_played_step_takes_what_drives_take(in_backward: bool) -> None:
    """With clipping drives have the forward and what was read ahead, without it the whole step."""
    num_layers, compute_s, drive_s = 30, 1.0, 1.5
    forward = [Visit(unit=index, ring="layer", upload_s=0.0, compute_s=compute_s) for index in range(1, num_layers + 1)]
    backward = [dataclasses.replace(visit, gradient=True, compute_s=2 * compute_s) for visit in reversed(forward)]
    updates = [(index, 0.01) for index in range(1, num_layers + 1)]
    work = DriveWork(seconds=dict.fromkeys(range(1, num_layers + 1), drive_s), num_slots=3)
    alone, driven = (
        play(forward + backward, updates, updates_in_backward=in_backward, drives=drives).step_s
        for drives in (DriveWork(), work)
    )
    assert driven >= num_layers * drive_s
    if in_backward:
        assert driven == pytest.approx(alone, rel=0.02), "45 s are hidden by 90"
    else:
        # 27 of 30 layers come after the first update, while forward is 30 s.
        assert driven - alone == pytest.approx((num_layers - 3) * drive_s - num_layers * compute_s, abs=3)


def test_drives_are_as_fast_as_the_slowest_of_them() -> None:
    speeds = [
        DriveSpeed(folder="/a", read_bytes_per_s=3.0, write_bytes_per_s=2.0, device=1),
        DriveSpeed(folder="/b", problem="it is full"),
        DriveSpeed(folder="/c", read_bytes_per_s=4.0, write_bytes_per_s=1.0, device=2),
    ]
    found = drives_of(speeds, None)
    assert found is not None and found.folders == ("/a", "/c")
    assert found.rates == DriveRates(read_bytes_per_s=6.0, write_bytes_per_s=2.0)
    assert drives_of(speeds[1:2], None) is None


def test_drives_that_cannot_be_used_are_not_worn() -> None:
    speeds = [DriveSpeed(folder="/a", problem="it is full"), DriveSpeed(folder="/b"), DriveSpeed(folder="/c")]
    found = drives_of(speeds, 300)
    assert found is not None and found.endurance_bytes == 200


def test_folders_on_one_drive_share_it(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = [
        DriveSpeed(folder="/a", read_bytes_per_s=3.0, write_bytes_per_s=2.0, device=1),
        DriveSpeed(folder="/b", read_bytes_per_s=3.0, write_bytes_per_s=2.0, device=1),
    ]
    found = drives_of(speeds, None)
    assert found is not None and found.rates == DriveRates(read_bytes_per_s=3.0, write_bytes_per_s=2.0)
    assert on_one_drive(speeds) == {"/b": "/a"}

    folders = tuple(str(tmp_path / name) for name in "ab")
    for name in folders:
        Path(name).mkdir()
    limit, drives = needed(folder, spec_of()) - 20 * MIB, dataclasses.replace(DRIVES, folders=folders)
    sizes = plan(folder, on_drives(spec_of()), limit, drives=drives).drive_file_bytes
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=sum(sizes) - 1))
    (warning,) = [line for line in plan(folder, on_drives(spec_of()), limit, drives=drives).warnings if "tier" in line]
    assert f"the job's file on {folders[1]}" in warning


def test_folders_that_cannot_be_used_are_named_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[dict[str, Any]] = []
    monkeypatch.setattr(drives_module.log, "warning", lambda _, **facts: named.append(facts))
    settings = load_settings(tier_dirs=(str(tmp_path / "gone"), "/dev/shm"))
    assert find_drives(settings) is None
    assert [facts["folder"] for facts in named] == [str(tmp_path / "gone"), "/dev/shm"]
    assert "no such folder" in named[0]["why"] and "tmpfs" in named[1]["why"]


SLOW_MEMORY = dataclasses.replace(RATES, h2d_bytes_per_s=1e4, d2h_bytes_per_s=1e4, adamw_bytes_per_s=1e4)


@pytest.mark.parametrize("is_small", [False, True], ids=["a large device", "a small one"])
@pytest.mark.parametrize("train", [{}, {"max_grad_norm": None}], ids=["clipping", "updates in backward"])
def test_what_stays_on_the_device_has_its_home_on_drives_before_others(
    train: dict[str, Any], is_small: bool, folder: Path
) -> None:
    spec = spec_of(device="cuda", sequence_length=64, **train)
    of_node: dict[str, Any] = {"accelerators": (H100,), "cuda_rates": SLOW_MEMORY}
    limit = needed(folder, spec, **of_node) - (100 if is_small else 40) * MIB
    if is_small:
        least = plan(folder, spec, 64 * GIB, accelerators=(H100,)).execution.residency
        assert not least.is_anything
        usable = plan(folder, spec, 64 * GIB, accelerators=(H100,)).device_total_bytes + 80 * MIB
        gpu = dataclasses.replace(H100, memory_bytes=int((usable / 0.95 + GIB) / 0.96))
        of_node["accelerators"] = (gpu,)
    found = plan(folder, on_drives(spec), limit, **of_node)
    execution = found.execution
    layout = open_model_folder(folder).layout
    kept = {unit.index for unit in state_units(layout, execution.residency)}
    driven = set(execution.drives.units)
    assert found.fits and kept and driven
    assert kept < driven if is_small else driven < kept, "those come first"
    moving = moving_units(layout, execution)
    assert set(moving) == driven - kept and found.drives is not None
    assert found.drives.num_layers == len(moving)
    on = dataclasses.replace(execution.drives, units=moving)
    assert found.drives.num_bytes == DriveLayout(layout, on).num_bytes
    assert found.prediction is not None
    assert ("drive" in found.prediction.parts_s) == bool(moving)
    # The files have room for all of them.
    assert sum(found.drive_file_bytes) == DriveLayout(layout, execution.drives).num_bytes


def test_drives_that_no_step_needs_do_not_wear(folder: Path) -> None:
    spec, of_node = spec_of(device="cuda", sequence_length=64), {"accelerators": (H100,), "cuda_rates": SLOW_MEMORY}
    limit = needed(folder, spec, **of_node) - 10 * MIB
    worn = dataclasses.replace(DRIVES, endurance_bytes=1)
    found = plan(folder, on_drives(spec), limit, drives=worn, **of_node)
    assert found.execution.drives.units and found.drives is not None
    assert (found.drives.num_bytes, found.drives.written_bytes) == (0, 0)
    assert "not by steps" in found.drives.text
    with pytest.raises(InvalidSpec, match="accept_wear"):
        plan(folder, on_drives(spec_of()), needed(folder, spec_of()) - 10 * MIB, drives=worn)


def test_layers_of_other_sizes_stay_where_the_plan_fits(folder: Path) -> None:
    opened = open_model_folder(folder)
    on = OnDrives(units=(1,), planes=("exp_avg", "exp_avg_sq"), folders=("/drives/a",))
    execution = Execution(residency=Residency(resident_layers=1, state_layers=1), drives=on)
    [kept] = [unit.index for unit in state_units(opened.layout, execution.residency)]
    assert kept_first(opened, execution).drives.units == (kept,) != (1,)
    first = opened.layout.units[1]
    [tensor] = first.tensors
    smaller = dataclasses.replace(first, tensors=(dataclasses.replace(tensor, num_elements=tensor.num_elements // 2),))
    units = tuple(smaller if unit is first else unit for unit in opened.layout.units)
    other = dataclasses.replace(opened, layout=dataclasses.replace(opened.layout, units=units))
    assert kept_first(other, execution) == execution

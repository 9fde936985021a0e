"""Which units' states a job has on the node's drives, what that costs, and which drives there are. Loads no torch."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from horizon_server.errors import InvalidSpec
from horizon_server.planning.model_folder import ModelFolder
from horizon_server.planning.rates import DriveRates
from horizon_server.planning.residency import moving_units, state_units
from horizon_server.records.execution import RING_SLOTS, SPAN_ELEMENTS, Execution, OnDrives
from horizon_server.records.plan import DriveUse, PlannedMachine
from horizon_server.settings import Settings
from horizon_server.spec import JobSpec
from horizon_server.store.adapters import MAGNITUDE
from horizon_server.store.drive_files import DriveSpeed, measure
from horizon_server.store.drive_layout import DriveLayout, driven_planes
from horizon_server.texts import size_text

log = structlog.get_logger(__name__)

_GIGA = 1e9

NO_DRIVES = (
    "memory.tier is drive, and this node has no drive for it; ask an admin to set tier_dirs (horizond doctor says what "
    "is wrong with a folder)"
)
ACCEPTED_SHARE = 0.05
"""Of what the drives are rated for: a job that writes more must say that it may."""
RINGS = tuple(times * RING_SLOTS for times in (1, 4, 16, 64))
"""Spans that a ring may have."""
_WORTH_WEAR = 0.95
"""Of a step's time: a larger ring that saves less is not worth the layers that go on drives for its memory."""


@dataclass(frozen=True, kw_only=True)
class NodeDrives:
    """The drives of a node that jobs may have states on, and what they may be written in their life, all of them
    together; None where that is not known."""

    folders: tuple[str, ...]
    rates: DriveRates
    endurance_bytes: int | None = None


def find_drives(settings: Settings) -> NodeDrives | None:
    """Measure the drives of `tier_dirs`, and name those that cannot be used; None where no drive can. Blocking."""
    found = [measure(Path(folder)) for folder in settings.tier_dirs]
    for speed in found:
        if speed.problem:
            log.warning("a folder of tier_dirs cannot be used", folder=speed.folder, why=speed.problem)
    for folder, former in on_one_drive(found).items():
        log.warning("two folders of tier_dirs are on one drive", folder=folder, why=f"it is on the drive of {former}")
    return drives_of(found, settings.tier_endurance_bytes)


def on_one_drive(found: Sequence[DriveSpeed]) -> dict[str, str]:
    """The folders that can be used and share their drive with an earlier one, and that one."""
    first: dict[int, str] = {}
    usable = [speed for speed in found if not speed.problem]
    return {
        speed.folder: former
        for speed in usable
        if (former := first.setdefault(speed.device, speed.folder)) != speed.folder
    }


def drives_of(found: Sequence[DriveSpeed], endurance_bytes: int | None) -> NodeDrives | None:
    """Those that can be used, as one: pieces go round them in turn, so that each does what the slowest does. Folders on
    one drive share its speed. `endurance_bytes` is that of all of them, of which each has an equal part."""
    usable = [speed for speed in found if not speed.problem]
    if not usable:
        return None
    sharing = Counter(speed.device for speed in usable)
    rates = DriveRates(
        read_bytes_per_s=len(usable) * min(speed.read_bytes_per_s / sharing[speed.device] for speed in usable),
        write_bytes_per_s=len(usable) * min(speed.write_bytes_per_s / sharing[speed.device] for speed in usable),
    )
    # What a job writes goes to these alone.
    endurance_bytes = None if endurance_bytes is None else endurance_bytes * len(usable) // len(found)
    return NodeDrives(folders=tuple(speed.folder for speed in usable), rates=rates, endurance_bytes=endurance_bytes)


def check_drives(spec: JobSpec, drives: NodeDrives | None) -> None:
    """Raises InvalidSpec where a job wants drives and the node has none."""
    if spec.memory.tier == "drive" and drives is None:
        raise InvalidSpec.of("memory.tier", f"{NO_DRIVES}, or use memory.tier: ram")


def without_drives(spec: JobSpec) -> JobSpec:
    """The same job with everything in memory, which computes the same."""
    return spec.model_copy(update={"memory": spec.memory.model_copy(update={"tier": "ram"})})


def drives_of_machine(spec: JobSpec, machine: PlannedMachine) -> NodeDrives | None:
    """Those of a machine that is asked about, as one; None where it has none. Nothing is worn there. Raises InvalidSpec
    where the job wants drives, or half of what they do is given."""
    read_gbps, write_gbps = machine.drive_read_gbps, machine.drive_write_gbps
    missing = "drive_read_gbps" if read_gbps is None else "drive_write_gbps"
    if read_gbps is not None and write_gbps is not None:
        rates = DriveRates(read_bytes_per_s=_GIGA * read_gbps, write_bytes_per_s=_GIGA * write_gbps)
        return NodeDrives(folders=("drives",), rates=rates, endurance_bytes=machine.drive_endurance_bytes)
    if read_gbps is not None or write_gbps is not None:
        problem = "drives of a machine are read and written, and one of both speeds is given"
    elif spec.memory.tier == "drive":
        problem = "memory.tier is drive, and the machine that is asked about has no drives"
    else:
        return None
    raise InvalidSpec.of(
        f"machine.{missing}",
        f"{problem}; give drive_read_gbps and drive_write_gbps, of all its drives together",
    )


def with_drives(
    folder: ModelFolder,
    execution: Execution,
    drives: NodeDrives,
    fits: Callable[[Execution], bool],
    *,
    ring_slots: int = RING_SLOTS,
) -> Execution:
    """The same with the states of as few units on drives as make it fit; of all where nothing does.

    Layers come first, and the embedding last: what the next step begins with waits for all of it, and where it is in
    memory for the rows in use alone.
    """
    layers = _trained_layers(folder)
    trained = [unit for unit in folder.layout.units if unit.trained_elements]
    ends = [unit.index for kind in ("head", "embedding") for unit in trained if unit.kind == kind]
    # The ring of small layers does not grow with what comes to them: each unit more saves memory.
    largest = max((folder.layout.units[unit].trained_elements for unit in layers or ends), default=0)
    span_elements = min(SPAN_ELEMENTS, largest)

    def with_units(number: int) -> Execution:
        of_layers = min(number, len(layers))
        units = tuple(sorted([*_spread(layers, of_layers), *ends[: number - of_layers]]))
        planes = driven_planes(folder.layout, with_lo=_leaves_lo_alone(folder, execution, units))
        on = OnDrives(
            units=units,
            planes=planes,
            folders=drives.folders,
            span_elements=span_elements,
            ring_slots=ring_slots,
        )
        return dataclasses.replace(execution, drives=on)

    few, many = 0, len(layers) + len(ends)
    if not many or fits(execution):
        return execution
    if not fits(with_units(many)):
        return with_units(many)
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if fits(with_units(middle)) else (middle, many)
    return with_units(many)


def planned_ring(num_spans: int, step_s: Callable[[int], float]) -> int:
    """How many spans the ring has where as many are on drives: of the sizes with which a step takes `step_s`, the
    fastest, where that is worth it, else the smallest. A larger one than the smallest has not room for all spans."""
    smallest, *larger = RINGS
    seconds = {slots: step_s(slots) for slots in (smallest, *(slots for slots in larger if slots < num_spans))}
    fastest = min(seconds, key=seconds.__getitem__)
    return fastest if seconds[fastest] < _WORTH_WEAR * seconds[smallest] else smallest


def kept_first(folder: ModelFolder, execution: Execution) -> Execution:
    """The same with the states of as many layers on drives, but first of those whose states stay on the device: no step
    reads these there or writes them. Where the layers that would change places differ in size, all stay in theirs: the
    plan might not fit then."""
    units, kept = _trained_layers(folder), {unit.index for unit in state_units(folder.layout, execution.residency)}
    on_drives = [unit for unit in execution.drives.units if unit in units]
    if not kept or not on_drives:
        return execution
    first, others = [unit for unit in units if unit in kept], [unit for unit in units if unit not in kept]
    of_first = min(len(first), len(on_drives))
    chosen = {*_spread(first, of_first), *_spread(others, len(on_drives) - of_first)}
    size_of = {unit.index: unit.trained_elements for unit in folder.layout.units}
    if sorted(size_of[unit] for unit in chosen) != sorted(size_of[unit] for unit in on_drives):
        return execution
    # What is not a layer stays where it is.
    chosen |= set(execution.drives.units) - set(units)
    return dataclasses.replace(execution, drives=dataclasses.replace(execution.drives, units=tuple(sorted(chosen))))


def _trained_layers(folder: ModelFolder) -> list[int]:
    return [unit.index for unit in folder.layout.units if unit.kind == "layer" and unit.trained_elements]


def _spread(units: Sequence[int], number: int) -> tuple[int, ...]:
    """This number of them, evenly spread, so that the optimizer never waits for many in a row."""
    total = len(units)
    return tuple(unit for i, unit in enumerate(units) if (i + 1) * number // total > i * number // total)


def drive_use(
    folder: ModelFolder, execution: Execution, drives: NodeDrives | None, num_steps: int | None
) -> DriveUse | None:
    """What a job on drives costs them; None where it has nothing there. What stays on the device is left out: it is
    written where it goes home, before checkpoints, evaluations and turns, and not once a step."""
    if not execution.drives.units:
        return None
    moving = dataclasses.replace(execution.drives, units=moving_units(folder.layout, execution))
    use = DriveUse(
        num_layers=sum(folder.layout.units[unit].kind == "layer" for unit in moving.units),
        num_ends=sum(folder.layout.units[unit].kind != "layer" for unit in moving.units),
        num_bytes=DriveLayout(folder.layout, moving).num_bytes,
        num_drives=len(moving.folders),
        endurance_bytes=None if drives is None else drives.endurance_bytes,
    )
    return use if num_steps is None else use.of_steps(num_steps)


def check_wear(spec: JobSpec, use: DriveUse | None, drives: NodeDrives | None) -> None:
    """Raises InvalidSpec where a job writes much of what the drives are rated for, and does not say that it may."""
    if use is None or drives is None or spec.memory.accept_wear:
        return
    if drives.endurance_bytes is None:
        problem = "what the node's drives are rated for is not known (tier_endurance_bytes is not set)"
    elif use.endurance_share is not None and use.endurance_share > ACCEPTED_SHARE:
        problem = f"that is more than {ACCEPTED_SHARE:.0%}"
    else:
        return
    raise InvalidSpec.of(
        "memory.accept_wear",
        f"the job has on drives the {use.text}; {problem}: say memory.accept_wear: true if it may wear them",
    )


def space_warnings(layout: DriveLayout) -> list[str]:
    """What the drives have no room for at the moment. Another node's folders are not looked at. Blocking."""
    warnings = []
    taken = Counter[int]()
    for folder, size in zip(layout.on.folders, layout.file_bytes, strict=True):
        with suppress(OSError):
            # Folders on one drive share its room.
            device = Path(folder).stat().st_dev
            free = max(0, shutil.disk_usage(folder).free - taken[device])
            taken[device] += size
            if size > free:
                warnings.append(
                    f"the job's file on {folder} (tier_dirs) takes {size_text(size)}, and {size_text(free)} are free: "
                    "it fails at its start unless there is room by then, or other jobs give some back"
                )
    return warnings


def _leaves_lo_alone(folder: ModelFolder, execution: Execution, units: Sequence[int]) -> bool:
    """Whether nothing is computed with the low halves of the weights of these units, and they are this job's alone."""
    if execution.compute_dtype == "float32":
        return False
    names = re.compile("|".join([*folder.shape.kept_in_fp32, re.escape(MAGNITUDE)]))
    return all(
        tensor.trained and not tensor.adapts and names.search(tensor.name) is None
        for unit in units
        for tensor in folder.layout.units[unit].tensors
    )

"""States on drives: what of a drive the ring uses, at what cost in processor time, and what a step takes over an
emulated drive.

The first table updates layers of several spans, exact and compressed, in rings as plans have them, with nothing to
compute. In turns with that, every piece of the same file is read and written back by plain O_DIRECT, on as many
threads. The second table emulates both the drive, whose calls take as long as their bytes at a rate, and the step,
whose layers sleep: so what is seen is the schedule and not a scramble for cores. Compute is the step without updates.
The prediction (`planning.play`) and the ring (`planning.drives.planned_ring`) are the planner's of the same numbers.
"""

from __future__ import annotations

import argparse
import mmap
import os
import queue
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal
from unittest import mock

import torch

from horizon_server.planning.drives import RINGS, planned_ring
from horizon_server.planning.play import DriveWork, Visit, play
from horizon_server.records.execution import SPAN_ELEMENTS, OnDrives
from horizon_server.store import drive as drive_module
from horizon_server.store.drive import DriveStates
from horizon_server.store.drive_files import THREADS_PER_DRIVE, lent_files
from horizon_server.store.drive_layout import INDEX_PLANE, PIECE_BYTES, DriveLayout, driven_planes, file_name
from horizon_server.store.layout import PLANE_BYTES, StoreLayout, TensorLayout, UnitLayout
from horizon_server.store.planes import lent_memory, map_anonymous

Form = Literal["exact", "compressed"]
_NUM_PAIRS = 7
# The last of three spans is shorter. Files of 5 and 3 GB, many times what is in the largest ring.
_USED_LAYERS: dict[Form, int] = {"exact": 12, "compressed": 24}
_USED_ELEMENTS = 5 * SPAN_ELEMENTS // 2
_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def layout_of(num_layers: int, elements: int, form: Form = "exact") -> StoreLayout:
    """Layers of one trained tensor each, between an embedding and a head that are as small."""
    tensor = TensorLayout(
        name="weight", shape=(elements,), offset=0, num_elements=elements, decay=True, compressed=form == "compressed"
    )
    kinds = ("embedding", *["layer"] * num_layers, "head")
    units = tuple(
        UnitLayout(
            name=f"unit {index}",
            kind=kind,  # type: ignore[arg-type]  # one of the three
            index=index,
            offset=index * elements,
            num_elements=elements,
            tensors=(tensor,),
        )
        for index, kind in enumerate(kinds)
    )
    return StoreLayout(units=units, num_elements=len(units) * elements, tied=False)


@contextmanager
def states_in(
    folder: str, layout: StoreLayout, *, slots: int, span: int, is_reversed: bool = False
) -> Iterator[tuple[DriveStates, DriveLayout, int]]:
    """The states of all layers on a drive, in spans of `span` elements behind a ring of as many `slots`, and the
    descriptor of their file. Updates come to the first layer first, or to the last one where `is_reversed`."""
    units = tuple(unit.index for unit in layout.units if unit.kind == "layer")
    planes = driven_planes(layout, with_lo=True)
    on = OnDrives(units=units, planes=planes, folders=(folder,), ring_slots=slots, span_elements=span)
    drives = DriveLayout(layout, on)
    order = units[::-1] if is_reversed else units
    with ExitStack() as stack:
        fds = stack.enter_context(lent_memory({INDEX_PLANE: drives.index_bytes}))
        files = stack.enter_context(lent_files(on.folders, drives.file_bytes))
        states = DriveStates(layout, on, {**fds, **files}, order=order, num_threads=1)
        stack.callback(states.close)
        yield states, drives, files[file_name(0)]


def fill(states: DriveStates, drives: DriveLayout) -> None:
    """Write to all blocks: what was never written is not read, and there are drives that compress zeros."""
    for unit in drives.on.units:
        for part in states.parts(unit):
            for plane in drives.on.planes:
                with states.opened(unit, plane, part, writes=True):
                    states.view(unit, plane, part, _DTYPES[PLANE_BYTES[plane]]).random_()
    states.flush()


def round_of(states: DriveStates, units: Sequence[int]) -> None:
    """One update of every unit, which changes nothing, until all is on the drive again."""
    states.read_ahead()
    for unit in units:
        update(states, unit)
    states.flush()


def update(states: DriveStates, unit: int) -> None:
    """Move the states of a unit, span by span, and change nothing."""
    for part in states.parts(unit):
        with states.updating(unit, part, lambda: None):
            pass


def plain(file: int, drives: DriveLayout) -> None:
    """Read every piece and write it back. All of a drive's threads always have something to do, and memory is of the
    kind that rings are: a drive is slower with small pages."""
    buffers = queue.SimpleQueue[mmap.mmap]()
    for _ in range(THREADS_PER_DRIVE):
        buffers.put(map_anonymous(PIECE_BYTES))

    def move(offset: int, num_bytes: int) -> None:
        buffer = buffers.get()
        with memoryview(buffer)[:num_bytes] as memory:
            for call in (os.preadv, os.pwritev):
                assert call(file, [memory], offset) == num_bytes, "a part of a piece alone was moved"
        buffers.put(buffer)

    pieces = list(chain.from_iterable(drives.blocks.values()))
    with ThreadPoolExecutor(max_workers=THREADS_PER_DRIVE) as pool:
        list(pool.map(move, [piece.offset for piece in pieces], [piece.num_bytes for piece in pieces]))


def measured(work: Callable[[], None]) -> tuple[float, float]:
    """Seconds, and seconds of processors."""
    before, started_s = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    work()
    seconds, after = time.perf_counter() - started_s, resource.getrusage(resource.RUSAGE_SELF)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@dataclass(frozen=True, kw_only=True)
class Use:
    """What the ring uses of a drive, pair by pair: bytes per second read and written, their ratio to plain O_DIRECT,
    and seconds of processors for each byte. `num_bytes` are read, and as many are written, in a turn."""

    num_bytes: int
    rates: Sequence[float]
    ratios: Sequence[float]
    processor_s: Sequence[float]


def use_of(folder: str, layout: StoreLayout, *, slots: int, span: int, num_pairs: int) -> Use:
    """Measure the ring and plain O_DIRECT in turns, each first in every second pair."""
    rates, ratios, processors = [], [], []
    with states_in(folder, layout, slots=slots, span=span) as (states, drives, file):
        fill(states, drives)
        round_of(states, drives.on.units)
        for pair in range(num_pairs):
            alone_s = 0.0 if pair % 2 else measured(lambda: plain(file, drives))[0]
            states.take_traffic()
            ring_s, processor_s = measured(lambda: round_of(states, drives.on.units))
            (traffic,) = states.take_traffic()
            alone_s = alone_s or measured(lambda: plain(file, drives))[0]
            moved = traffic.read_bytes + traffic.written_bytes
            rates.append(moved / ring_s)
            ratios.append((moved / ring_s) / (2 * drives.num_bytes / alone_s))
            processors.append(processor_s / moved)
        return Use(num_bytes=drives.num_bytes, rates=rates, ratios=ratios, processor_s=processors)


def bench_use(folder: str) -> None:
    """The first table."""
    print(
        "| states | spans in the ring | GB/s, read and written | of plain O_DIRECT | from, to | cores per GB/s |\n"
        "| --- | --- | --- | --- | --- | --- |"
    )
    for form, num_layers in _USED_LAYERS.items():
        layout = layout_of(num_layers, _USED_ELEMENTS, form)
        for slots in RINGS[:2]:
            use = use_of(folder, layout, slots=slots, span=SPAN_ELEMENTS, num_pairs=_NUM_PAIRS)
            print(
                f"| {form}, {use.num_bytes / 1e9:.1f} GB | {slots} | {statistics.median(use.rates) / 1e9:.2f} | "
                f"**{statistics.median(use.ratios):.2f}** | {min(use.ratios):.2f} to {max(use.ratios):.2f} | "
                f"**{1e9 * statistics.median(use.processor_s):.3f}** |",
                flush=True,
            )
    print()


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A step to emulate: seconds of forward and of backward, and of all that the drive does, for its layers."""

    name: str
    forward_s: float
    backward_s: float
    drive_s: float
    clips: bool


SHAPES = (
    Shape(name="clipping, the drive is a quarter of forward", forward_s=1.2, backward_s=2.4, drive_s=0.3, clips=True),
    Shape(name="clipping, the drive is as long as forward", forward_s=1.2, backward_s=2.4, drive_s=1.2, clips=True),
    Shape(name="clipping, the drive decides", forward_s=0.3, backward_s=0.6, drive_s=3.6, clips=True),
    Shape(name="no clipping, the drive is half of a step", forward_s=0.9, backward_s=1.8, drive_s=1.35, clips=False),
    Shape(name="no clipping, the drive decides", forward_s=0.2, backward_s=0.4, drive_s=3.6, clips=False),
)
NUM_LAYERS = 24
_ELEMENTS, _SPANS = 1 << 20, 4


def bench_steps(folder: str) -> None:
    """The second table."""
    print(
        "| step | spans in the ring | compute s | drive s | step s | step / max(compute, drive) | predicted s | "
        "step / predicted |\n| --- | --- | --- | --- | --- | --- | --- | --- |"
    )
    for shape in SHAPES:
        slots = ring_of(shape)
        # What sleeps take on this machine, which is longer than they are asked to.
        compute_s, step_s = emulated(folder, shape, slots=slots, alone=True), emulated(folder, shape, slots=slots)
        predicted_s = predicted(shape, compute_s, NUM_LAYERS, spans=_SPANS, slots=slots)
        print(
            f"| {shape.name} | {slots} | {compute_s:.2f} | {shape.drive_s:.2f} | {step_s:.2f} | "
            f"**{step_s / max(compute_s, shape.drive_s):.2f}** | {predicted_s:.2f} | **{step_s / predicted_s:.2f}** |",
            flush=True,
        )


def ring_of(shape: Shape) -> int:
    """The spans in the ring of a planned step, where memory has room for any."""
    compute_s = shape.forward_s + shape.backward_s
    return planned_ring(
        NUM_LAYERS * _SPANS, lambda slots: predicted(shape, compute_s, NUM_LAYERS, spans=_SPANS, slots=slots)
    )


@contextmanager
def emulated_drive(bytes_per_s: float) -> Iterator[None]:
    """Have drives read and write, in turn, no faster than that."""
    free_at, lock, move = [0.0], threading.Lock(), drive_module._all_of

    def slow(call: Callable[..., int], file: int, memory: memoryview, offset: int) -> int:
        with lock:
            free_at[0] = until_s = max(free_at[0], time.perf_counter()) + len(memory) / bytes_per_s
        moved = move(call, file, memory, offset)
        time.sleep(max(0.0, until_s - time.perf_counter()))
        return moved

    with mock.patch.object(drive_module, "_all_of", slow):
        yield


def emulated(folder: str, shape: Shape, *, slots: int, alone: bool = False, num_steps: int = 4) -> float:
    """The median step; `alone`, one that updates nothing."""
    layout, span = layout_of(NUM_LAYERS, _ELEMENTS), _ELEMENTS // _SPANS
    with ExitStack() as stack:
        states, drives, _ = stack.enter_context(
            states_in(folder, layout, slots=slots, span=span, is_reversed=not shape.clips)
        )
        fill(states, drives)
        stack.enter_context(emulated_drive(2 * drives.num_bytes / shape.drive_s))
        forward, backward = list(drives.on.units), list(drives.on.units[::-1])
        seconds: list[float] = []
        updated = {unit: threading.Event() for unit in forward}
        optimizer = ThreadPoolExecutor(max_workers=1)
        for event in updated.values():
            event.set()

        def update_and_tell(unit: int) -> None:
            update(states, unit)
            updated[unit].set()

        for _ in range(num_steps + 2):
            started_s = time.perf_counter()
            states.read_ahead()
            for unit in forward:
                updated[unit].wait()
                time.sleep(shape.forward_s / NUM_LAYERS)
            for unit in backward:
                time.sleep(shape.backward_s / NUM_LAYERS)
                if not shape.clips and not alone:
                    updated[unit].clear()
                    optimizer.submit(update_and_tell, unit)
            for unit in forward if shape.clips and not alone else ():
                updated[unit].clear()
                optimizer.submit(update_and_tell, unit)
            seconds.append(time.perf_counter() - started_s)
        optimizer.shutdown(wait=True)
        states.flush()
    return statistics.median(seconds[2:])


def predicted(shape: Shape, compute_s: float, num_layers: int, *, spans: int = 1, slots: int = RINGS[0]) -> float:
    """What the planner says of the same step, whose layers take that long in all and have as many `spans` each."""
    each_s = compute_s / (shape.forward_s + shape.backward_s) / num_layers
    forward = [
        Visit(unit=unit, ring="layer", upload_s=0.0, compute_s=each_s * shape.forward_s)
        for unit in range(1, num_layers + 1)
    ]
    backward = [
        Visit(unit=unit, ring="layer", upload_s=0.0, compute_s=each_s * shape.backward_s, gradient=True)
        for unit in range(num_layers, 0, -1)
    ]
    seconds = {visit.unit: shape.drive_s / num_layers for visit in forward}
    drives = DriveWork(seconds=seconds, spans=dict.fromkeys(seconds, spans), num_slots=slots)
    updates = [(visit.unit, 0.0) for visit in forward]
    return play(forward + backward, updates, updates_in_backward=not shape.clips, drives=drives).step_s


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the drive; default: a temporary one")
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as temporary:
        bench_use(str(folder or temporary))
        bench_steps(str(folder or temporary))


if __name__ == "__main__":
    main()

"""States on drives: what of a drive the ring uses, at what cost in processor time, and what a step takes over an
emulated drive.

The first table moves states of a store round its ring, with nothing to compute, and in turns as many bytes through the
same file by plain O_DIRECT on as many threads, reading and writing. The second one emulates both the drive, whose
calls take as long as their bytes at a rate, and the step, whose layers sleep: so what is seen is the schedule and not a
scramble for cores. Compute is the step without updates. The prediction is the planner's (`planning.play`) of the same
numbers.
"""

from __future__ import annotations

import argparse
import mmap
import os
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from horizon_server.planning.play import DriveWork, Visit, play
from horizon_server.records.execution import OnDrives
from horizon_server.store import drive as drive_module
from horizon_server.store.drive import DriveStates
from horizon_server.store.drive_files import THREADS_PER_DRIVE, lent_files
from horizon_server.store.drive_layout import INDEX_PLANE, PIECE_BYTES, DriveLayout, DriveSpan, driven_planes, file_name
from horizon_server.store.layout import StoreLayout, TensorLayout, UnitLayout
from horizon_server.store.planes import lent_memory

_NUM_PAIRS = 7


def layout_of(num_layers: int, elements: int) -> StoreLayout:
    """Layers of one trained tensor each, between an embedding and a head that are as small."""
    tensor = TensorLayout(name="weight", shape=(elements,), offset=0, num_elements=elements, decay=True)
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
def states_in(folder: str, num_layers: int, elements: int) -> Iterator[tuple[DriveStates, DriveLayout, int]]:
    """The states of these layers on a drive, and the descriptor of their file."""
    layout = layout_of(num_layers, elements)
    units = tuple(unit.index for unit in layout.units if unit.kind == "layer")
    on = OnDrives(units=units, planes=driven_planes(layout, with_lo=True), folders=(folder,))
    drives = DriveLayout(layout, on)
    with ExitStack() as stack:
        fds = stack.enter_context(lent_memory({INDEX_PLANE: drives.index_bytes}))
        files = stack.enter_context(lent_files(on.folders, drives.file_bytes))
        states = DriveStates(layout, on, {**fds, **files}, order=units, num_threads=1)
        stack.callback(states.close)
        yield states, drives, files[file_name(0)]


def round_of(states: DriveStates, units: Sequence[int], land: Callable[[], None] = lambda: None) -> None:
    """One update of every unit, which changes nothing."""
    states.read_ahead()
    for unit in units:
        land()
        update(states, unit)


def update(states: DriveStates, unit: int) -> None:
    """Move the states of a unit, span by span, and change nothing."""
    for part in states.parts(unit):
        with states.updating(unit, part, lambda: None):
            pass


def plain(file: int, num_bytes: int) -> None:
    """Read and write as many bytes, piece by piece: half of a drive's threads read while the others write."""
    buffers = [mmap.mmap(-1, PIECE_BYTES) for _ in range(THREADS_PER_DRIVE)]
    half = THREADS_PER_DRIVE // 2

    def move(number: int) -> None:
        call = os.preadv if number < half else os.pwritev
        for start in range(number % half * PIECE_BYTES, num_bytes - PIECE_BYTES + 1, half * PIECE_BYTES):
            call(file, [buffers[number]], start)

    with ThreadPoolExecutor(max_workers=THREADS_PER_DRIVE) as pool:
        list(pool.map(move, range(THREADS_PER_DRIVE)))


def measured(work: Callable[[], None]) -> tuple[float, float]:
    """Seconds, and seconds of processors."""
    before, started_s = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    work()
    seconds, after = time.perf_counter() - started_s, resource.getrusage(resource.RUSAGE_SELF)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def bench_use(folder: str) -> None:
    """The first table."""
    ratios, rates, cores = [], [], []
    with states_in(folder, num_layers=12, elements=8 << 20) as (states, drives, file):

        def ring() -> None:
            round_of(states, drives.on.units)
            states.flush()

        ring()
        states.take_traffic()
        for _ in range(_NUM_PAIRS):
            alone_s, _ = measured(lambda: plain(file, drives.num_bytes))
            # What plain writing has put there is not what the checksums are of.
            states.forget()
            ring()
            states.flush()
            states.take_traffic()
            ring_s, processor_s = measured(ring)
            (traffic,) = states.take_traffic()
            moved = traffic.read_bytes + traffic.written_bytes
            rates.append(moved / ring_s / 1e9)
            ratios.append((moved / ring_s) / (2 * drives.num_bytes / alone_s))
            cores.append(processor_s / (moved / 1e9))
    print("| GB/s, read and written | of plain O_DIRECT | from, to | cores per GB/s |\n| --- | --- | --- | --- |")
    print(
        f"| {statistics.median(rates):.2f} | **{statistics.median(ratios):.2f}** | {min(ratios):.2f} to "
        f"{max(ratios):.2f} | **{statistics.median(cores):.2f}** |\n"
    )


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
_NUM_LAYERS, _ELEMENTS = 24, 1 << 20


def bench_steps(folder: str) -> None:
    """The second table."""
    print("| step | compute s | drive s | step s | step / max(compute, drive) | predicted s | step / predicted |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for shape in SHAPES:
        # What sleeps take on this machine, which is longer than they are asked to.
        compute_s, step_s = emulated(folder, shape, alone=True), emulated(folder, shape)
        predicted_s = predicted(shape, compute_s / (shape.forward_s + shape.backward_s))
        print(
            f"| {shape.name} | {compute_s:.2f} | {shape.drive_s:.2f} | {step_s:.2f} | "
            f"**{step_s / max(compute_s, shape.drive_s):.2f}** | {predicted_s:.2f} | **{step_s / predicted_s:.2f}** |"
        )


def emulated(folder: str, shape: Shape, *, alone: bool = False, num_steps: int = 4) -> float:
    """The median step; `alone`, one that updates nothing."""
    free_at, lock = [0.0], threading.Lock()
    with states_in(folder, _NUM_LAYERS, _ELEMENTS) as (states, drives, _), ExitStack() as stack:
        rate = 2 * drives.num_bytes / shape.drive_s
        move = drive_module._all_of

        def slow(call: Callable[..., int], file: int, memory: memoryview, offset: int) -> int:
            with lock:
                free_at[0] = until_s = max(free_at[0], time.perf_counter()) + len(memory) / rate
            moved = move(call, file, memory, offset)
            time.sleep(max(0.0, until_s - time.perf_counter()))
            return moved

        # Zeros are not read from a drive: one round fills it.
        round_of(states, drives.on.units)
        states.flush()
        stack.enter_context(mock.patch.object(drive_module, "_all_of", slow))
        forward, backward = list(drives.on.units), list(drives.on.units[::-1])
        order = forward if shape.clips else backward
        states._order = [DriveSpan(unit, number) for unit in order for number in range(len(states.parts(unit)))]
        states._place = {span: place for place, span in enumerate(states._order)}
        seconds: list[float] = []
        updated = {unit: threading.Event() for unit in forward}
        queue = ThreadPoolExecutor(max_workers=1)
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
                time.sleep(shape.forward_s / _NUM_LAYERS)
            for unit in backward:
                time.sleep(shape.backward_s / _NUM_LAYERS)
                if not shape.clips and not alone:
                    updated[unit].clear()
                    queue.submit(update_and_tell, unit)
            for unit in forward if shape.clips and not alone else ():
                updated[unit].clear()
                queue.submit(update_and_tell, unit)
            seconds.append(time.perf_counter() - started_s)
        queue.shutdown(wait=True)
        states.flush()
    return statistics.median(seconds[2:])


def predicted(shape: Shape, times: float) -> float:
    """What the planner says of the same step, whose layers take that many times as long."""
    forward = [
        Visit(unit=unit, ring="layer", upload_s=0.0, compute_s=times * shape.forward_s / _NUM_LAYERS)
        for unit in range(1, _NUM_LAYERS + 1)
    ]
    backward = [
        Visit(unit=unit, ring="layer", upload_s=0.0, compute_s=times * shape.backward_s / _NUM_LAYERS, gradient=True)
        for unit in range(_NUM_LAYERS, 0, -1)
    ]
    each_s = shape.drive_s / _NUM_LAYERS
    drives = DriveWork(seconds={visit.unit: each_s for visit in forward}, num_slots=OnDrives().ring_slots)
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

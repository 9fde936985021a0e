"""Blocks on drives: what is read is what was written, or the job ends with the drive's name."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.drives import drive_folders, lent_planes, on_drives
from tests.support.tiny_models import config_of, template_of

from horizon_server.errors import DriveFailed, InvalidModel
from horizon_server.records.execution import SPAN_ELEMENTS, OnDrives
from horizon_server.store import checksum as checksums
from horizon_server.store import drive as drive_module
from horizon_server.store import native
from horizon_server.store.checksum import checksum
from horizon_server.store.drive import DriveStates
from horizon_server.store.drive_files import THREADS_PER_DRIVE, lent_files, measure
from horizon_server.store.drive_layout import GRAIN_BYTES, PIECE_BYTES, DriveLayout, DriveSpan, driven_planes
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import (
    COMPRESSED_GROUP,
    PLANE_BYTES,
    StoreLayout,
    build_layout,
    with_compressed_states,
    with_trained,
)

SHM = Path("/dev/shm")


@pytest.fixture(scope="module")
def layout() -> StoreLayout:
    return template_of(config_of("llama", num_hidden_layers=5)).layout


@pytest.fixture
def on(layout: StoreLayout, tmp_path: Path) -> OnDrives:
    return on_drives(layout, drive_folders(tmp_path))


@contextmanager
def opened(layout: StoreLayout, on: OnDrives, planes: dict[str, int]) -> Iterator[DriveStates]:
    states = DriveStates(layout, on, planes, order=on.units, num_threads=1)
    try:
        yield states
    finally:
        states.close()


def fill(states: DriveStates, on: OnDrives, value: float) -> None:
    for unit in on.units:
        for part in states.parts(unit):
            for plane in on.planes:
                with states.opened(unit, plane, part, writes=True):
                    states.view(unit, plane, part, torch.float32).fill_(value + unit)
    states.flush()


def values_of(states: DriveStates, unit: int, plane: str = "exp_avg") -> torch.Tensor:
    found = []
    for part in states.parts(unit):
        with states.opened(unit, plane, part, writes=False):
            found.append(states.view(unit, plane, part, torch.float32).clone())
    return torch.cat(found)


def spoil(file: int, offset: int, size: int = GRAIN_BYTES) -> None:
    buffer = mmap.mmap(-1, size)
    buffer[:] = os.urandom(size)
    os.pwritev(file, [buffer], offset)


def test_what_was_never_written_is_zero(layout: StoreLayout, on: OnDrives) -> None:
    with lent_planes(layout, on) as planes, opened(layout, on, planes) as states:
        assert not values_of(states, on.units[0]).any()
        assert not any(drive.read_bytes for drive in states.take_traffic()), "nothing had to be read"


def test_another_process_reads_what_was_written(layout: StoreLayout, on: OnDrives) -> None:
    with lent_planes(layout, on) as planes:
        with opened(layout, on, planes) as states:
            fill(states, on, 3.0)
            assert tuple(drive.written_bytes for drive in states.take_traffic()) == DriveLayout(layout, on).file_bytes
        with opened(layout, on, planes) as states:
            for unit in reversed(on.units):
                assert (values_of(states, unit) == 3.0 + unit).all()


def test_updates_in_order_are_read_ahead_and_written_behind(layout: StoreLayout, on: OnDrives) -> None:
    done: list[tuple[int, int]] = []
    with lent_planes(layout, on) as planes, opened(layout, on, planes) as states:
        for step in range(3):
            states.read_ahead()
            for unit in on.units:
                for part in states.parts(unit):
                    with states.updating(unit, part, partial(done.append, (unit, part.start))):
                        for plane in on.planes:
                            values = states.view(unit, plane, part, torch.float32)
                            assert (values == step * unit).all()
                            values += unit
        states.flush()
        assert sorted(done) == sorted(3 * [(unit, part.start) for unit in on.units for part in states.parts(unit)])
        traffic, size = states.take_traffic(), DriveLayout(layout, on).num_bytes
        assert sum(drive.written_bytes for drive in traffic) == 3 * size
        # The first step reads zeros, which no drive is asked for; after the last one a ring is read ahead.
        assert sum(drive.read_bytes for drive in traffic) <= 2 * size + DriveLayout(layout, on).ring_bytes


def test_the_ring_is_as_large_for_layers_of_any_size(layout: StoreLayout, tmp_path: Path) -> None:
    folders, wide = drive_folders(tmp_path), template_of(config_of("llama", hidden_size=128)).layout
    rings = [DriveLayout(found, on_drives(found, folders, span=2048)).ring_bytes for found in (layout, wide)]
    assert rings == [3 * 2 * 4 * 2048] * 2


@pytest.mark.parametrize("slots", [1, 2, 5])
@pytest.mark.parametrize("size", [4096, SPAN_ELEMENTS])
def test_any_mixture_of_readers_and_writers_sees_the_last_values(
    layout: StoreLayout, tmp_path: Path, slots: int, size: int
) -> None:
    on = on_drives(layout, drive_folders(tmp_path), slots=slots, span=size)
    spans = [(unit, part) for unit in on.units for part in DriveLayout(layout, on).parts(unit)]
    chance, wanted = random.Random(slots), [0.0] * len(spans)
    with lent_planes(layout, on) as planes, opened(layout, on, planes) as states:

        def values(place: int) -> torch.Tensor:
            return states.view(spans[place][0], "exp_avg", spans[place][1], torch.float32)

        for number in range(120):
            place = chance.randrange(len(spans))
            unit, part = spans[place]
            match chance.randrange(4):
                case 0:
                    with states.opened(unit, "exp_avg", part, writes=True):
                        values(place).fill_(number)
                    wanted[place] = number
                case 1:
                    with states.updating(unit, part, lambda: None):
                        values(place).fill_(number)
                    wanted[place] = number
                case 2:
                    with states.opened(unit, "exp_avg", part, writes=False):
                        assert (values(place) == wanted[place]).all()
                case _:
                    states.read_ahead()
        for place, value in enumerate(wanted):
            with states.opened(spans[place][0], "exp_avg", spans[place][1], writes=False):
                assert (values(place) == value).all()


def test_threads_share_slots(layout: StoreLayout, on: OnDrives) -> None:
    with lent_planes(layout, on) as planes, opened(layout, on, planes) as states:

        def work(unit: int) -> None:
            (part,) = states.parts(unit)
            for number in range(20):
                with states.opened(unit, "exp_avg", part, writes=True):
                    values = states.view(unit, "exp_avg", part, torch.float32)
                    assert (values == number).all()
                    values += 1

        threads = [threading.Thread(target=work, args=(unit,)) for unit in on.units]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all((values_of(states, unit) == 20).all() for unit in on.units)


def test_forgotten_states_are_zero(layout: StoreLayout, on: OnDrives) -> None:
    with lent_planes(layout, on) as planes, opened(layout, on, planes) as states:
        fill(states, on, 1.0)
        states.forget("exp_avg")
        assert not values_of(states, on.units[0]).any()
        assert values_of(states, on.units[0], "exp_avg_sq").all()
        states.forget()
        assert not values_of(states, on.units[0], "exp_avg_sq").any()


@pytest.mark.parametrize("how", ["torn", "lost", "swapped"])
def test_data_that_is_not_what_was_written_is_found(layout: StoreLayout, on: OnDrives, how: str) -> None:
    """A drive that tears, loses or mixes up writes: no step trains on what it returns."""
    drives = DriveLayout(layout, on)
    (first,), (second,) = (drives.blocks[DriveSpan(on.units[index], 0), "exp_avg"] for index in (0, 2))
    assert first.drive == second.drive
    with lent_planes(layout, on) as planes:
        file = planes[f"drive {first.drive}"]
        with opened(layout, on, planes) as states:
            fill(states, on, 1.0)
        old = mmap.mmap(-1, first.num_bytes)
        os.preadv(file, [old], first.offset)
        if how == "torn":
            spoil(file, first.offset + GRAIN_BYTES)
        elif how == "lost":
            with opened(layout, on, planes) as states:
                fill(states, on, 2.0)
            os.pwritev(file, [old], first.offset)
        else:
            os.preadv(file, [old], second.offset)
            os.pwritev(file, [old], first.offset)
        with opened(layout, on, planes) as states:
            with pytest.raises(DriveFailed, match="returned other data than was written") as raised:
                values_of(states, on.units[0])
            assert on.folders[first.drive] in raised.value.message
            with pytest.raises(DriveFailed):
                states.read_ahead()


def test_a_drive_that_cannot_be_written_is_named(layout: StoreLayout, on: OnDrives) -> None:
    with lent_planes(layout, on) as planes:
        read_only = os.open(f"/proc/self/fd/{planes['drive 1']}", os.O_RDONLY | os.O_DIRECT)
        try:
            with opened(layout, on, {**planes, "drive 1": read_only}) as states:
                with pytest.raises(DriveFailed, match="failed: Bad file descriptor") as raised:
                    fill(states, on, 1.0)
                assert on.folders[1] in raised.value.message
        finally:
            os.close(read_only)


def test_a_drive_that_does_not_answer_is_not_waited_for_without_end(
    layout: StoreLayout, on: OnDrives, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    with lent_planes(layout, on) as planes, ExitStack() as stack:
        states = stack.enter_context(opened(layout, on, planes))
        stack.callback(answers.set)
        for pool in states._pools:
            for _ in range(THREADS_PER_DRIVE):
                pool.submit(answers.wait)
        # Not of what comes before and after: on a busy machine a drive that answers may take as long.
        with monkeypatch.context() as patched, pytest.raises(DriveFailed, match="has not answered for"):
            patched.setattr(drive_module, "SILENCE_S", 0.2)
            patched.setattr(drive_module, "_POLL_S", 0.05)
            values_of(states, on.units[0])
        # A worker closes before the daemon is sent its error.
        closing = threading.Thread(target=states.close, daemon=True)
        closing.start()
        closing.join(10.0)
        assert not closing.is_alive(), "closing waits for no drive that does not answer"


def test_files_leave_nothing_behind(layout: StoreLayout, on: OnDrives) -> None:
    with lent_planes(layout, on) as planes:
        assert os.fstat(planes["drive 0"]).st_blocks * 512 >= DriveLayout(layout, on).file_bytes[0]
        assert not any(list(Path(folder).iterdir()) for folder in on.folders)


def test_files_of_another_size_are_refused(layout: StoreLayout, on: OnDrives) -> None:
    with ExitStack() as lent:
        planes = lent.enter_context(lent_planes(layout, on)) | lent.enter_context(lent_files(on.folders, [8192, 8192]))
        with pytest.raises(InvalidModel, match="submit the job again"):
            HostStore.attach(layout, planes, drives=on)


def test_pieces_cover_each_block_once_and_do_not_overlap(layout: StoreLayout, on: OnDrives) -> None:
    drives = DriveLayout(layout, on)
    taken = sorted((piece.drive, piece.offset, piece.num_bytes) for block in drives.blocks.values() for piece in block)
    for (drive, offset, size), (next_drive, next_offset, _) in itertools.pairwise(taken):
        assert drive != next_drive or offset + size == next_offset
    for pieces in drives.blocks.values():
        assert all(piece.offset % GRAIN_BYTES == 0 and piece.num_bytes <= PIECE_BYTES for piece in pieces)
    all_pieces = [piece for block in drives.blocks.values() for piece in block]
    assert drives.file_bytes == tuple(sum(p.num_bytes for p in all_pieces if p.drive == drive) for drive in range(2))
    assert drives.num_bytes == sum(drives.file_bytes) and drives.index_bytes == 8 * len(all_pieces)


@given(
    sizes=st.lists(st.integers(1, 3 * 4096), min_size=1, max_size=6),
    span=st.integers(1, 200).map(lambda groups: 32 * groups),
    kinds=st.integers(0, 2**6),
    with_lo=st.booleans(),
)
def test_spans_tile_every_unit_and_blocks_hold_what_planes_have_of_them(
    sizes: list[int], span: int, kinds: int, with_lo: bool
) -> None:
    """For units of any tensors, of which some are compressed, some exact and some frozen."""
    shapes: dict[str, tuple[int, ...]] = {f"model.layers.0.mlp.w{i}.weight": (size, 2) for i, size in enumerate(sizes)}
    shapes |= {"model.embed_tokens.weight": (64, 8), "model.norm.weight": (8,), "model.layers.0.norm.weight": (8,)}
    whole = with_trained(
        build_layout(shapes, num_layers=1, tied=True),
        lambda name: "layers" not in name or "norm" in name or bool(kinds >> int(name.split(".w")[1][0]) & 1),
        is_bfloat16=lambda _: True,
    )
    layout = with_compressed_states(whole)
    units = tuple(unit.index for unit in layout.units if unit.trained_elements)
    planes = driven_planes(layout, with_lo=with_lo)
    drives = DriveLayout(layout, OnDrives(units=units, planes=planes, folders=("/a", "/b"), span_elements=span))
    for index in units:
        unit, parts = layout.units[index], drives.parts(index)
        assert parts[0].start == 0 and parts[-1].stop == unit.trained_elements
        assert all(former.stop == later.start for former, later in itertools.pairwise(parts))
        assert all(part.start % COMPRESSED_GROUP == 0 and part.stop - part.start <= span for part in parts)
        for plane in planes:
            total = 0
            for number, part in enumerate(parts):
                held = layout.part_in(plane, unit, part)
                num_bytes = (held.stop - held.start) * PLANE_BYTES[plane]
                size = sum(piece.num_bytes for piece in drives.blocks[DriveSpan(index, number), plane])
                assert num_bytes <= size < num_bytes + GRAIN_BYTES and size <= drives.slot_bytes[plane]
                total += held.stop - held.start
            assert total == unit.elements_in(plane)


@pytest.mark.parametrize(
    ("name", "problem"),
    [("missing", "there is no such folder"), ("a file", "it is no folder"), ("shm", "it is on tmpfs, which is memory")],
)
def test_a_folder_that_cannot_be_a_drive_is_named(name: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("")
    folder = SHM if name == "shm" else tmp_path / name
    found = measure(folder)
    assert problem in found.problem and found.folder == str(folder)


def test_a_full_drive_is_named(tmp_path: Path) -> None:
    (folder,) = drive_folders(tmp_path, 1)
    with pytest.raises(DriveFailed, match="it is full") as raised, ExitStack() as stack:
        stack.enter_context(lent_files([folder], [1 << 50]))
    assert folder in raised.value.message and " free, and 1,048,576.00 GiB are needed);" in raised.value.message
    assert "make room there" in raised.value.message and "then resume the job" in raised.value.message


def test_a_good_folder_is_measured(tmp_path: Path) -> None:
    (folder,) = drive_folders(tmp_path, 1)
    found = measure(Path(folder), num_bytes=64 << 20)
    assert not found.problem and found.read_bytes_per_s > 0 and found.write_bytes_per_s > 0 and found.free_bytes > 0


def test_kernel_and_reference_give_the_same_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    data = [memoryview(random.Random(seed).randbytes(64 * rows)) for seed, rows in enumerate((1, 7, 1000))]
    one = [checksum(part, place=9) for part in data]
    checksums._kernel.cache_clear()
    monkeypatch.setattr(native, "find", lambda *_: (None, "not here"))
    assert [checksum(part, place=9) for part in data] == one
    checksums._kernel.cache_clear()


def test_a_checksum_depends_on_every_word_its_place_and_the_piece() -> None:
    data = bytearray(random.Random(1).randbytes(4096))
    found = {checksum(memoryview(bytes(data)), place=1), checksum(memoryview(bytes(data)), place=2)}
    found.add(checksum(memoryview(bytes(data[64:] + data[:64])), place=1))
    found.add(checksum(memoryview(bytes(data[8:] + data[:8])), place=1))
    for bit in range(0, 8 * len(data), 997):
        data[bit // 8] ^= 1 << bit % 8
        found.add(checksum(memoryview(bytes(data)), place=1))
        data[bit // 8] ^= 1 << bit % 8
    assert len(found) == 4 + len(range(0, 8 * len(data), 997)) and 0 not in found

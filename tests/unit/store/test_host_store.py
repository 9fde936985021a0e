"""Planes as memory: shared by descriptor, sized exactly, alive as long as somebody looks at them."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from horizon_server.errors import InvalidModel
from horizon_server.store import planes
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import build_layout, plane_sizes

SHAPES = {
    "embed_tokens.weight": (10, 6),
    "layers.0.a.weight": (6, 6),
    "layers.1.a.weight": (6, 6),
    "layers.0.b.bias": (6,),
    "layers.1.b.bias": (6,),
    "norm.weight": (6,),
}
LAYOUT = build_layout(SHAPES, num_layers=2, tied=True)


def test_a_second_store_on_the_same_memory_sees_every_write() -> None:
    first = HostStore.allocate(LAYOUT, num_threads=2)
    first.write_master("layers.1.a.weight", torch.full((6, 6), 0.1))
    first.tensor("norm.weight", "exp_avg").fill_(3)
    second = HostStore.attach(LAYOUT, first.fds)
    first.close()
    assert torch.equal(second.tensor("norm.weight", "exp_avg"), torch.full((6,), 3.0))
    out = torch.empty(LAYOUT.units[2].num_elements)
    second.merge_master(2, out)
    assert torch.equal(out[:36], torch.full((36,), 0.1))


def test_daemon_sized_files_are_mapped_whole_and_stay_the_daemons() -> None:
    sizes = plane_sizes(LAYOUT, grad_dtype_bytes=2)
    fds = {name: planes.create_memory_file(name, size) for name, size in sizes.items()}
    store = HostStore.attach(LAYOUT, fds, grad_dtype=torch.bfloat16)
    assert store.plane("grad").dtype == torch.bfloat16
    assert sum(store.host_bytes().values()) == sum(sizes.values()) == 14 * LAYOUT.num_elements
    store.close()
    for name, fd in fds.items():
        assert os.fstat(fd).st_size == sizes[name]
        os.close(fd)


def test_fresh_planes_are_zero_and_resident() -> None:
    store = HostStore.allocate(LAYOUT)
    assert all(
        int(store.plane(name).view(torch.uint8).count_nonzero()) == 0 for name in ("hi", "lo", "exp_avg", "grad")
    )


def test_touching_provides_every_page() -> None:
    size_bytes = 8 << 20
    fd = planes.create_memory_file("test", size_bytes)
    try:
        mapping = planes.map_memory_file(fd, size_bytes)
        assert os.fstat(fd).st_blocks == 0
        planes.touch(mapping, num_threads=2)
        assert os.fstat(fd).st_blocks * 512 == size_bytes
        mapping.close()
    finally:
        os.close(fd)


@pytest.fixture
def memory() -> Iterator[tuple[int, mmap.mmap]]:
    """A memory file of sixteen small pages, which no page of has memory yet."""
    fd = planes.create_memory_file("test", 16 * mmap.PAGESIZE)
    # Where the kernel gives memory files huge pages, one would be all of it.
    mapping = mmap.mmap(fd, 16 * mmap.PAGESIZE)
    yield fd, mapping
    os.close(fd)


def num_pages(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512 // mmap.PAGESIZE


def test_touching_parts_provides_their_pages_alone(memory: tuple[int, mmap.mmap]) -> None:
    fd, mapping = memory
    planes.touch(mapping, num_threads=2, parts=[])
    assert num_pages(fd) == 0
    mapping[0] = 7
    page = mmap.PAGESIZE
    planes.touch(mapping, num_threads=2, parts=[(0, page), (4 * page, 6 * page), (15 * page, 16 * page)])
    assert num_pages(fd) == 4
    assert mapping[0] == 7


def test_memory_is_given_back_in_whole_pages_and_the_edges_stay(memory: tuple[int, mmap.mmap]) -> None:
    fd, mapping = memory
    page = mmap.PAGESIZE
    mapping[:] = b"x" * len(mapping)
    view = memoryview(mapping)
    assert num_pages(fd) == 16
    planes.give_back(view[2 * page : 5 * page])
    assert num_pages(fd) == 13
    # From within a page to within another: what is between them.
    planes.give_back(view[8 * page + 1 : 11 * page - 1])
    assert num_pages(fd) == 12
    # Less than a page, and two halves.
    planes.give_back(view[12 * page + 1 : 13 * page - 1])
    planes.give_back(view[12 * page + 100 : 13 * page + 100])
    assert num_pages(fd) == 12
    gone = {2, 3, 4, 9}
    for index in range(16):
        assert mapping[index * page : (index + 1) * page] == (b"\0" if index in gone else b"x") * page, index


def test_views_outlive_the_store() -> None:
    store = HostStore.allocate(LAYOUT)
    view = store.unit(1, "exp_avg")
    view.fill_(2)
    store.close()
    assert float(view.sum()) == 2 * LAYOUT.units[1].num_elements
    with pytest.raises(KeyError):
        store.plane("exp_avg")


def test_units_and_tensors_are_views_of_the_planes() -> None:
    store = HostStore.allocate(LAYOUT)
    store.tensor("layers.1.a.weight", "lo")[5, 5] = 7
    unit, place = LAYOUT.find("layers.1.a.weight")
    assert int(store.unit(unit.index, "lo")[place.offset + 35]) == 7
    assert int(store.plane("lo")[unit.offset + place.offset + 35]) == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_masters_of_any_float_dtype_are_exact(dtype: torch.dtype) -> None:
    store = HostStore.allocate(LAYOUT)
    weight = torch.randn(6, 10, generator=torch.Generator().manual_seed(0)).to(dtype).t()
    store.write_master("embed_tokens.weight", weight)
    out = torch.empty(LAYOUT.units[0].num_elements)
    store.merge_master(0, out, num_threads=2)
    assert torch.equal(out[:60].view(10, 6), weight.float())
    assert int(out[60:].count_nonzero()) == 0


def test_without_a_gradient_plane_there_is_none() -> None:
    store = HostStore.allocate(LAYOUT, grad_dtype=None)
    assert store.host_bytes()["gradients"] == 0
    with pytest.raises(KeyError):
        store.unit(0, "grad")


def test_a_missing_or_short_file_is_refused() -> None:
    store = HostStore.allocate(LAYOUT)
    fds = store.fds
    with pytest.raises(ValueError, match="planes lo"):
        HostStore.attach(LAYOUT, {name: fd for name, fd in fds.items() if name != "lo"})
    os.ftruncate(fds["hi"], 100)
    with pytest.raises(InvalidModel, match="planned for 100 bytes of hi, but the model takes"):
        HostStore.attach(LAYOUT, fds)


def test_closing_gives_the_descriptors_back() -> None:
    def open_descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    gc.collect()  # what tests before have left, which would be closed in between
    before = open_descriptors()
    for _ in range(20):
        HostStore.allocate(LAYOUT).close()
    assert open_descriptors() == before

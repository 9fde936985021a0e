"""Stores with states on real files that are opened with O_DIRECT."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from horizon_server.records.execution import SPAN_ELEMENTS, OnDrives
from horizon_server.store.drive_files import lent_files, measure
from horizon_server.store.drive_layout import INDEX_PLANE, DriveLayout, driven_planes
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import StoreLayout, plane_sizes
from horizon_server.store.planes import lent_memory


def drive_folders(parent: Path, number: int = 2) -> tuple[str, ...]:
    """Folders on a file system with O_DIRECT; skips the test where the temporary folder's has none."""
    if problem := measure(parent, num_bytes=0).problem:
        pytest.skip(f"the folder for temporary files cannot stand for a drive: {problem}")
    folders = [parent / f"drive-{index}" for index in range(number)]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    return tuple(str(folder) for folder in folders)


def on_drives(
    layout: StoreLayout,
    folders: Sequence[str],
    *,
    with_lo: bool = False,
    units: Sequence[int] = (),
    slots: int = 3,
    span: int = SPAN_ELEMENTS,
) -> OnDrives:
    """The states of these units on drives, in spans of `span` elements; of all layers without units."""
    layers = (unit.index for unit in layout.units if unit.kind == "layer" and unit.trained_elements)
    return OnDrives(
        units=tuple(units) or tuple(layers),
        planes=driven_planes(layout, with_lo=with_lo),
        folders=tuple(folders),
        ring_slots=slots,
        span_elements=span,
    )


def values_of(store: HostStore, name: str, plane: str) -> torch.Tensor:
    """A copy of what a plane has of a parameter, wherever it is."""
    found = []
    for stretch in store.stretches(name):
        with store.reading(name, plane, stretch):
            found.append(store.flat(name, plane, stretch).clone())
    return torch.cat(found)


@contextmanager
def lent_planes(
    layout: StoreLayout, on: OnDrives, *, grad_dtype: torch.dtype | None = torch.float32
) -> Iterator[dict[str, int]]:
    """The descriptors of memory and files, as a daemon lends them."""
    drives = DriveLayout(layout, on)
    sizes = plane_sizes(layout, grad_dtype_bytes=0 if grad_dtype is None else grad_dtype.itemsize)
    memory = {**sizes, INDEX_PLANE: drives.index_bytes}
    with lent_memory(memory) as planes, lent_files(on.folders, drives.file_bytes) as files:
        yield planes | files


@contextmanager
def store_on_drives(
    layout: StoreLayout, on: OnDrives, *, grad_dtype: torch.dtype | None = torch.float32, **options: Any
) -> Iterator[HostStore]:
    """A store of its own on drives."""
    with ExitStack() as stack:
        planes = stack.enter_context(lent_planes(layout, on, grad_dtype=grad_dtype))
        store = HostStore.attach(layout, planes, grad_dtype=grad_dtype, drives=on, **options)
        stack.callback(store.close)
        yield store

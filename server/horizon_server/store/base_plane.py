"""The frozen weights under adapters, in a memory file of their own, which all jobs of a node on the same base map.
Torch-free.

A plane stays one stretch of addresses: over the frozen part of each unit, the file of the base is mapped in place of
the plane's own. Groups of tensors begin on pages, so that nothing else is on the pages that are shared, and how the
frozen part is laid out does not depend on the adapters beside it.

The first worker that needs the base loads it, and holds a lock meanwhile, which the kernel takes from a process that
dies; the others wait. The last page of the file says whether the base is there. From then on its bytes never change.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from horizon_server import progress
from horizon_server.errors import InvalidModel
from horizon_server.store import planes
from horizon_server.store.base_digest import files_identity
from horizon_server.store.cpus import available_cpus
from horizon_server.store.layout import PLANE_BYTES, UNIT_ALIGN_ELEMENTS, StoreLayout

PLANE = "base"

_LOADED = 1
# Between two looks while another worker loads the base.
_LOOK_S = 0.05


@dataclass(frozen=True, kw_only=True)
class FrozenPart:
    """A stretch of a plane whose bytes are in the file of the base, from `offset` on. Units: bytes."""

    plane: str
    start: int
    num_bytes: int
    offset: int


def can_be_shared(layout: StoreLayout) -> bool:
    """Whether a layout has a base: frozen weights under adapters, on pages of their own."""
    # Groups begin at multiples of this many elements, which is a page of most machines.
    aligned = UNIT_ALIGN_ELEMENTS * PLANE_BYTES["hi"] % mmap.PAGESIZE == 0
    return aligned and any(tensor.adapts for _, tensor in layout.tensors())


def frozen_parts(layout: StoreLayout) -> tuple[FrozenPart, ...]:
    """Where the frozen weights of a layout are, in its planes and in the file of the base."""
    parts: list[FrozenPart] = []
    end = 0

    def add(plane: str, start: int, num_bytes: int) -> None:
        nonlocal end
        if num_bytes:
            parts.append(FrozenPart(plane=plane, start=start, num_bytes=num_bytes, offset=end))
            end += _whole_pages(num_bytes)

    for plane in ("hi", "lo"):
        item_bytes = PLANE_BYTES[plane]
        for unit in layout.units:
            part = layout.part_in(plane, unit, slice(unit.trained_elements, unit.num_elements))
            add(plane, item_bytes * part.start, item_bytes * (part.stop - part.start))
    # Nothing that is packed is trained, and its units begin on no pages of their own.
    add("packed", 0, sum(unit.packed_bytes for unit in layout.units))
    return tuple(parts)


def frozen_bytes(layout: StoreLayout) -> int:
    """Bytes of the weights in the file of the base."""
    return sum(part.num_bytes for part in frozen_parts(layout))


def file_bytes(layout: StoreLayout) -> int:
    """Bytes of the file: the weights, and the page that says whether they are there."""
    return sum(_whole_pages(part.num_bytes) for part in frozen_parts(layout)) + mmap.PAGESIZE


def base_key(model: Path, layout: StoreLayout) -> str:
    """Return what names a base: equal only where the same bytes are laid out in the same way.

    The files of the model count as they are now, by inode, size and times; so no weights are read.

    Raises:
        InvalidModel: the folder has no config or no safetensors weights.
    """
    kept = [
        [unit.name, tensor.name, tensor.shape, tensor.offset - unit.trained_elements, tensor.exact, tensor.packing]
        for unit, tensor in layout.tensors()
        if not tensor.trained
    ]
    return hashlib.sha256(json.dumps([files_identity(model), kept]).encode()).hexdigest()


class BasePlane:
    """The base of one store, mapped over its planes: read-only, but for the process that loads it. Thread: one at a
    time."""

    def __init__(self, layout: StoreLayout, fd: int, *, key: str) -> None:
        """`fd` is the file that the daemon lends, and `key` what names its bytes. Raises InvalidModel: the file was not
        sized by this layout."""
        self._layout, self._fd, self._key = layout, fd, key
        if (actual_bytes := os.fstat(fd).st_size) != (size_bytes := file_bytes(layout)):
            raise InvalidModel(
                f"memory was planned for {actual_bytes} bytes of frozen weights, but the model takes {size_bytes}: "
                "its folder has changed since; submit the job again"
            )
        self._parts = frozen_parts(layout)
        self._mappings: dict[str, mmap.mmap] = {}
        self._state = mmap.mmap(fd, mmap.PAGESIZE, offset=size_bytes - mmap.PAGESIZE)

    @property
    def is_loaded(self) -> bool:
        """Whether all of the base is there."""
        return self._state[0] == _LOADED

    def lay_over(self, plane: str, mapping: mmap.mmap) -> None:
        """Map what the base has of a plane in place of the plane's own memory, which nothing has touched yet."""
        self._mappings[plane] = mapping
        for part in self._parts:
            if part.plane == plane:
                planes.map_over(mapping, part.start, part.num_bytes, fd=self._fd, offset_bytes=part.offset)

    @contextmanager
    def writable(self) -> Iterator[None]:
        """Have the base's pages writable within the block."""
        self._protect(writable=True)
        try:
            yield
        finally:
            self._protect(writable=False)

    @contextmanager
    def loading(self, model: Path) -> Iterator[bool]:
        """Yield whether the caller has to load the base from a model folder, within the block; else it is there. Waits
        for another process that loads it. A block that ends by an error leaves a base that is not there.

        Raises:
            InvalidModel: the folder is not as it was when the base was planned.
            DoesNotFit: the kernel has no memory left for it.
        """
        while not self._is_locked():
            progress.advance()
            time.sleep(_LOOK_S)
        try:
            self._check(model)
            if self.is_loaded:
                yield False
                return
            with self.writable():
                for plane, mapping in self._mappings.items():
                    parts = [(p.start, p.start + p.num_bytes) for p in self._parts if p.plane == plane]
                    planes.touch(mapping, num_threads=available_cpus(), parts=parts)
                yield True
            # What was written over while it was read is neither the old model nor the new one.
            self._check(model)
            self._state[0] = _LOADED
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def _is_locked(self) -> bool:
        """Take the lock, which belongs to this process and ends with it; False where another has it."""
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _check(self, model: Path) -> None:
        if base_key(model, self._layout) != self._key:
            raise InvalidModel(
                "its files have changed since the job was planned; resume the job, or submit it again", file=model
            )

    def _protect(self, *, writable: bool) -> None:
        for part in self._parts:
            if (mapping := self._mappings.get(part.plane)) is not None:
                planes.protect(mapping, part.start, part.num_bytes, writable=writable)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE

"""Where states that are on drives are: the one arithmetic by which the daemon makes the files and the worker finds its
data in them. Torch-free.

A unit is cut into spans of as many elements, the last one shorter, without regard to where its tensors begin. A block
is what a plane has of one span; where compressed states end in the middle of a span, planes of both forms have a block
of it. A block is cut into pieces of `PIECE_BYTES`, which go round the drives in turn, so that one span is read from all
drives at once. A piece begins on a `GRAIN_BYTES` of its file, as O_DIRECT wants it.

Units: bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import NamedTuple

from horizon_server.errors import InvalidModel
from horizon_server.records.execution import OnDrives
from horizon_server.store.layout import COMPRESSED_GROUP, PLANE_BYTES, StoreLayout

PIECE_BYTES = 8 << 20
"""Read or written at once."""
GRAIN_BYTES = 4096
"""No drive has larger sectors."""
INDEX_PLANE = "drive index"
"""The memory file with a checksum for each piece: it lives and dies with the planes that the files belong to."""
_CHECKSUM_BYTES = 8


def file_name(number: int) -> str:
    """The name of a drive's file among the descriptors that a worker is lent."""
    return f"drive {number}"


def driven_planes(layout: StoreLayout, *, with_lo: bool) -> tuple[str, ...]:
    """The planes that may be on drives: the moments, and the low halves of the weights where nothing is computed with
    them. Those that hold nothing of any unit are none."""
    wanted = [plane for plane in PLANE_BYTES if plane != "hi" and (with_lo or plane not in ("lo", "lo8"))]
    return tuple(plane for plane in wanted if any(unit.elements_in(plane) for unit in layout.units))


def state_bytes(layout: StoreLayout, unit: int, planes: tuple[str, ...]) -> int:
    """What these planes have of a unit."""
    return sum(layout.units[unit].elements_in(plane) * PLANE_BYTES[plane] for plane in planes)


class DriveSpan(NamedTuple):
    """One of the spans of a unit, which count from 0."""

    unit: int
    number: int


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One stretch of a drive's file: from `start` on of its block. `number` counts the pieces of all files."""

    number: int
    drive: int
    offset: int
    start: int
    num_bytes: int


@dataclass(frozen=True)
class DriveLayout:
    """The files of one job's store."""

    store: StoreLayout
    on: OnDrives

    @cached_property
    def blocks(self) -> Mapping[tuple[DriveSpan, str], tuple[Piece, ...]]:
        """The pieces of each block, by span and plane; none where the plane holds nothing of the span."""
        found: dict[tuple[DriveSpan, str], tuple[Piece, ...]] = {}
        ends, number = [0] * len(self.on.folders), 0
        for unit in self.on.units:
            for span_number, sizes in enumerate(self._cut(unit).sizes):
                for plane, size in zip(self.on.planes, sizes, strict=True):
                    pieces = []
                    for start in range(0, size, PIECE_BYTES):
                        num_bytes, drive = min(PIECE_BYTES, size - start), number % len(ends)
                        pieces.append(
                            Piece(number=number, drive=drive, offset=ends[drive], start=start, num_bytes=num_bytes)
                        )
                        ends[drive] += num_bytes
                        number += 1
                    found[DriveSpan(unit, span_number), plane] = tuple(pieces)
        return found

    def parts(self, unit: int) -> Sequence[slice]:
        """The elements of each span of a unit, in order: all that a plane on drives has something of."""
        size, end = self.on.span_elements, max(self.store.units[unit].held_in(plane).stop for plane in self.on.planes)
        return [slice(start, min(start + size, end)) for start in range(0, end, size)]

    def _cut(self, unit: int) -> _Cut:
        held = [self.store.units[unit].held_in(plane) for plane in self.on.planes]
        stretches = tuple((plane, part.start, part.stop) for plane, part in zip(self.on.planes, held, strict=True))
        return _cut(stretches, self.on.span_elements)

    @cached_property
    def file_bytes(self) -> tuple[int, ...]:
        """The size of each drive's file."""
        found, number = [0] * len(self.on.folders), 0
        for unit in self.on.units:
            for size in chain.from_iterable(self._cut(unit).sizes):
                for start in range(0, size, PIECE_BYTES):
                    found[number % len(found)] += min(PIECE_BYTES, size - start)
                    number += 1
        return tuple(found)

    @property
    def num_bytes(self) -> int:
        """Of all files: what a step reads, and what it writes."""
        return sum(self._cut(unit).num_bytes for unit in self.on.units)

    @property
    def index_bytes(self) -> int:
        """Of the memory file with the checksums; 0 where nothing is on drives."""
        return _CHECKSUM_BYTES * sum(self._cut(unit).num_pieces for unit in self.on.units)

    @cached_property
    def slot_bytes(self) -> Mapping[str, int]:
        """The largest block of each plane."""
        found = [self._cut(unit).largest for unit in self.on.units]
        return {plane: max(largest) for plane, *largest in zip(self.on.planes, *found, strict=True)}

    @property
    def ring_bytes(self) -> int:
        """Of the memory that blocks pass through."""
        return self.on.ring_slots * sum(self.slot_bytes.values())


def check_files(layout: DriveLayout, fds: Mapping[str, int]) -> None:
    """Let pass files that were made by a layout. Raises InvalidModel."""
    sizes = {file_name(number): size for number, size in enumerate(layout.file_bytes)}
    for name, size in {**sizes, INDEX_PLANE: layout.index_bytes}.items():
        if name not in fds or os.fstat(fds[name]).st_size != size:
            raise InvalidModel(
                f"the job's file {name!r} is not of the {size} bytes that the model takes: its folder has changed "
                "since the job was planned; submit the job again"
            )


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """The blocks of a unit: `sizes` has those of each span, in whole grains and in the planes' order, and `largest` the
    largest of each plane."""

    sizes: Sequence[tuple[int, ...]]

    @cached_property
    def largest(self) -> tuple[int, ...]:
        return tuple(map(max, zip(*self.sizes, strict=True)))

    @cached_property
    def num_bytes(self) -> int:
        return sum(chain.from_iterable(self.sizes))

    @cached_property
    def num_pieces(self) -> int:
        return sum(-(-size // PIECE_BYTES) for size in chain.from_iterable(self.sizes))


@lru_cache
def _cut(held: tuple[tuple[str, int, int], ...], span_elements: int) -> _Cut:
    """The blocks of a unit whose planes hold these elements. Most layers have them in common, and a plan with thousands
    of spans asks again and again."""
    assert span_elements > 0 and span_elements % COMPRESSED_GROUP == 0, "a span has whole groups"
    found, end = [], max((stop for _, _, stop in held), default=0)
    for begin in range(0, end, span_elements):
        sizes = []
        for plane, start, stop in held:
            count = max(0, min(stop, begin + span_elements) - max(start, begin))
            # One scale for each of the two moments of a group.
            count = 2 * -(-count // COMPRESSED_GROUP) if plane == "scales" else count
            sizes.append(-(-count * PLANE_BYTES[plane] // GRAIN_BYTES) * GRAIN_BYTES)
        found.append(tuple(sizes))
    return _Cut(sizes=found)

"""Where states that are on drives are: the one arithmetic by which the daemon makes the files and the worker finds its
data in them. Torch-free.

A block is what a plane has of one unit. It is cut into pieces of `PIECE_BYTES`, which go round the drives in turn, so
that one layer is read from all drives at once. A piece begins on a `GRAIN_BYTES` of its file, as O_DIRECT wants it.

Units: bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from horizon_server.errors import InvalidModel
from horizon_server.records.execution import OnDrives
from horizon_server.store.layout import PLANE_BYTES, StoreLayout

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
    return sum(_block_bytes(layout, unit, plane) for plane in planes)


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
    def blocks(self) -> Mapping[tuple[int, str], tuple[Piece, ...]]:
        """The pieces of each block, by unit and plane; none where the plane holds nothing of the unit."""
        found: dict[tuple[int, str], tuple[Piece, ...]] = {}
        ends, number = [0] * len(self.on.folders), 0
        for unit in self.on.units:
            for plane in self.on.planes:
                pieces, size = [], self.block_bytes(unit, plane)
                for start in range(0, size, PIECE_BYTES):
                    num_bytes, drive = min(PIECE_BYTES, size - start), number % len(ends)
                    pieces.append(
                        Piece(number=number, drive=drive, offset=ends[drive], start=start, num_bytes=num_bytes)
                    )
                    ends[drive] += num_bytes
                    number += 1
                found[unit, plane] = tuple(pieces)
        return found

    def block_bytes(self, unit: int, plane: str) -> int:
        """Of a block, in whole grains."""
        return -(-_block_bytes(self.store, unit, plane) // GRAIN_BYTES) * GRAIN_BYTES

    @cached_property
    def file_bytes(self) -> tuple[int, ...]:
        """The size of each drive's file."""
        pieces = [piece for block in self.blocks.values() for piece in block]
        return tuple(
            sum(piece.num_bytes for piece in pieces if piece.drive == drive) for drive in range(len(self.on.folders))
        )

    @property
    def num_bytes(self) -> int:
        """Of all files: what a step reads, and what it writes."""
        return sum(self.file_bytes)

    @property
    def index_bytes(self) -> int:
        """Of the memory file with the checksums; 0 where nothing is on drives."""
        return _CHECKSUM_BYTES * sum(len(block) for block in self.blocks.values())

    def slot_bytes(self, plane: str) -> int:
        """The largest block of a plane."""
        return max((self.block_bytes(unit, plane) for unit in self.on.units), default=0)

    @property
    def ring_bytes(self) -> int:
        """Of the memory that blocks pass through."""
        return self.on.ring_slots * sum(self.slot_bytes(plane) for plane in self.on.planes)


def check_files(layout: DriveLayout, fds: Mapping[str, int]) -> None:
    """Let pass files that were made by a layout. Raises InvalidModel."""
    sizes = {file_name(number): size for number, size in enumerate(layout.file_bytes)}
    for name, size in {**sizes, INDEX_PLANE: layout.index_bytes}.items():
        if name not in fds or os.fstat(fds[name]).st_size != size:
            raise InvalidModel(
                f"the job's file {name!r} is not of the {size} bytes that the model takes: its folder has changed "
                "since the job was planned; submit the job again"
            )


def _block_bytes(layout: StoreLayout, unit: int, plane: str) -> int:
    return layout.units[unit].elements_in(plane) * PLANE_BYTES[plane]

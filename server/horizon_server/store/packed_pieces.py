"""Parts of packed weights: which bytes of a unit's block of the `packed` plane hold some of its elements, so that these
can be copied and unpacked without the others.

int8 is cut between rows, nf4 between blocks of 64 elements: what belongs to a row or a block stays together. A group of
256 blocks has one scale, which pieces of the same group both get.

Units: elements of a unit, bytes of its block. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from horizon_server.store.layout import (
    BLOCKS_PER_GROUP,
    NF4_BLOCK,
    PACKED_ALIGN_BYTES,
    PackedPart,
    TensorLayout,
    UnitLayout,
)


@dataclass(frozen=True, kw_only=True)
class PackedPiece:
    """Elements of a packed tensor, from `start` of the unit on. `source` is where they are in the unit's block,
    `arrived` where they are in memory that has some pieces alone. Of nf4, `first_block` counts from the first of its
    group."""

    place: TensorLayout
    start: int
    num_elements: int
    source: PackedPart
    arrived: PackedPart
    first_block: int = 0


def can_be_cut(tensor: TensorLayout, size: int) -> bool:
    """Whether a tensor can be divided into parts of `size` elements, however it is packed."""
    grain = {"none": 1, "int8": tensor.shape[-1], "nf4": NF4_BLOCK}[tensor.packing]
    return size % grain == 0


def packed_pieces(unit: UnitLayout, spans: Iterable[tuple[int, int]]) -> list[PackedPiece]:
    """The pieces of packed tensors that are in these spans (start and stop) of a unit, in order. Each span begins where
    its tensor can be cut."""
    packed = [tensor for tensor in unit.tensors if tensor.packing != "none"]
    pieces: list[PackedPiece] = []
    end = 0

    def taken(part: slice) -> slice:
        nonlocal end
        found = slice(end, end + part.stop - part.start)
        end += -(-(part.stop - part.start) // PACKED_ALIGN_BYTES) * PACKED_ALIGN_BYTES
        return found

    for start, stop in spans:
        if stop <= unit.unpacked_elements:
            continue
        for tensor in packed:
            first, last = max(start, tensor.offset), min(stop, tensor.offset + tensor.num_elements)
            if first >= last:
                continue
            source, first_block = _part_of(tensor, unit.packed_parts[tensor.name], first - tensor.offset, last - first)
            pieces.append(
                PackedPiece(
                    place=tensor,
                    start=first,
                    num_elements=last - first,
                    source=source,
                    arrived=PackedPart(
                        codes=taken(source.codes),
                        scales=taken(source.scales),
                        group_scales=taken(source.group_scales),
                    ),
                    first_block=first_block,
                )
            )
    return pieces


def arrived_bytes(pieces: Iterable[PackedPiece]) -> int:
    """The memory that pieces take when they are alone."""
    ends = [max(piece.arrived.scales.stop, piece.arrived.group_scales.stop) for piece in pieces]
    return -(-max(ends, default=0) // PACKED_ALIGN_BYTES) * PACKED_ALIGN_BYTES


def copied_bytes(pieces: Iterable[PackedPiece]) -> int:
    """What crosses the link for pieces."""
    parts = [part for piece in pieces for part in (piece.source.codes, piece.source.scales, piece.source.group_scales)]
    return sum((part.stop or 0) - (part.start or 0) for part in parts)


def _part_of(tensor: TensorLayout, whole: PackedPart, first: int, num_elements: int) -> tuple[PackedPart, int]:
    """Where elements of a tensor are, from `first` on, and which block of its group the first one is."""
    if tensor.packing == "int8":
        width = tensor.shape[-1]
        codes = _within(whole.codes, first, first + num_elements)
        scales = _within(whole.scales, 2 * (first // width), 2 * -(-(first + num_elements) // width))
        return PackedPart(codes=codes, scales=scales, group_scales=slice(0, 0)), 0
    blocks = range(first // NF4_BLOCK, -(-(first + num_elements) // NF4_BLOCK))
    groups = range(blocks.start // BLOCKS_PER_GROUP, -(-blocks.stop // BLOCKS_PER_GROUP))
    part = PackedPart(
        codes=_within(whole.codes, first // 2, -(-(first + num_elements) // 2)),
        scales=_within(whole.scales, blocks.start, blocks.stop),
        group_scales=_within(whole.group_scales, 4 * groups.start, 4 * groups.stop),
    )
    return part, blocks.start % BLOCKS_PER_GROUP


def _within(part: slice, start: int, stop: int) -> slice:
    return slice(part.start + start, part.start + stop)

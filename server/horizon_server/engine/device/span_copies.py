"""What the copy of some spans of a unit is made of: elements that are copied as they are, and packed pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from horizon_server.store.layout import UnitLayout
from horizon_server.store.packed_pieces import PackedPiece, packed_pieces
from horizon_server.store.pages import Span


@dataclass(frozen=True, kw_only=True)
class SpanCopies:
    """`plain` are elements of the unit with the memory that they go to, and `unpacked` the memory of each of the
    `pieces`."""

    plain: Sequence[tuple[slice, Tensor]]
    pieces: Sequence[PackedPiece]
    unpacked: Sequence[Tensor]

    @classmethod
    def of(cls, unit: UnitLayout, spans: Sequence[Span], out: Tensor) -> SpanCopies:
        """The copies of spans to their places in `out`."""
        plain: list[tuple[slice, Tensor]] = []
        pieces = packed_pieces(unit, [(span.start, span.stop) for span in spans])
        unpacked: list[Tensor] = []
        following = iter(pieces)
        piece = next(following, None)
        for span in spans:
            part = slice(span.start, min(span.stop, unit.unpacked_elements))
            if part.start < part.stop:
                plain.append((part, out[span.local : span.local + part.stop - part.start]))
            while piece is not None and span.start <= piece.start < span.stop:
                start = span.local + piece.start - span.start
                unpacked.append(out[start : start + piece.num_elements])
                piece = next(following, None)
        return cls(plain=plain, pieces=pieces, unpacked=unpacked)

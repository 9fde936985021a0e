"""The experts of a layer in pages: which elements of a unit belong to which expert, and how they are divided.

The store keeps a unit as one block whatever is done here; a page is a few spans of it. A layer's unit then has a rest,
which is everything but its experts, and pages of neighbouring experts. Every element of the unit is in one of them.

Units: elements. Torch-free.
Source: MoE-Lightning (arXiv 2411.11217), weights of experts that travel in pages.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from horizon_server.store.layout import TENSOR_ALIGN_ELEMENTS, TensorLayout, UnitLayout
from horizon_server.store.packed_pieces import arrived_bytes, can_be_cut, packed_pieces

EXPERT_NAME = re.compile(r"(?:^|\.)experts(?:\.|$)|(?:^|\.)(?:block_sparse_moe|mlp)\.(?:input|output)_linear\.")
"""In names of tensors of one of many networks of a mixture. The network that all tokens visit has a name of its own
(shared_experts)."""
_NUMBERED = re.compile(r"\.experts\.(\d+)\.")
MOST_PAGE_ELEMENTS = 1 << 28
"""Of a page, unless one expert is larger."""
_VISITS_THAT_REACH_ALL = 4


def reaches_all(num_experts: int, num_visits: int) -> bool:
    """Whether all experts count as visited, and nobody asks which ones are: with four visits for each expert on
    average, less than one in fifty is expected to have none."""
    return num_visits >= _VISITS_THAT_REACH_ALL * num_experts


@dataclass(frozen=True, kw_only=True)
class Span:
    """Elements of a unit, from `start` to `stop`, which begin at `local` in memory that holds a part of the unit.
    `expert` is whose they are; -1 is the rest."""

    start: int
    stop: int
    local: int
    expert: int = -1


@dataclass(frozen=True, kw_only=True)
class UnitPart:
    """The rest of a unit, or one page of it. The spans are in the unit's order; what is trained comes first, there and
    in memory that holds the part."""

    spans: tuple[Span, ...]
    num_elements: int
    trained_elements: int
    experts: range = range(0)

    def local(self, start: int) -> int:
        """Where an element of the unit is in the part's memory. Neighbours in one run of spans stay neighbours."""
        index = bisect_right(self.spans, start, key=lambda span: span.start) - 1
        span = self.spans[index]
        assert span.start <= start < span.stop, "the part has the element"
        return span.local + start - span.start

    def runs(self, experts: Collection[int] | None = None, *, only_trained: bool = False) -> Iterator[Span]:
        """The spans, those of `experts` where they are given, with neighbours joined."""
        open_run: Span | None = None
        for span in self.spans:
            if experts is not None and span.expert not in experts:
                continue
            if only_trained and span.local >= self.trained_elements:
                break
            if open_run is None:
                open_run = span
            elif open_run.stop == span.start and span.local - open_run.local == span.start - open_run.start:
                open_run = Span(start=open_run.start, stop=span.stop, local=open_run.local)
            else:
                yield open_run
                open_run = span
        if open_run is not None:
            yield open_run


@dataclass(frozen=True, kw_only=True)
class PagedUnit:
    """A layer's unit, divided. `names` are the tensors of its experts. `packed_bytes` is the most memory that packed
    weights of a part take when they arrive."""

    rest: UnitPart
    pages: tuple[UnitPart, ...]
    names: frozenset[str]
    num_experts: int
    packed_bytes: int = 0


def paged_unit(unit: UnitLayout, most_page_elements: int = MOST_PAGE_ELEMENTS) -> PagedUnit | None:
    """A unit with its experts in pages of about equal size; None where it has none, or not all of one number, or where
    they are packed and one ends within a block of it."""
    tensors = [tensor for tensor in unit.tensors if EXPERT_NAME.search(tensor.name) and not tensor.adapts]
    owned: list[tuple[int, int, int]] = []
    counts: set[int] = set()
    highest = -1
    for tensor in tensors:
        if number := _NUMBERED.search(tensor.name):
            highest = max(highest, int(number[1]))
            owned.append((tensor.offset, _padded_end(tensor), int(number[1])))
            continue
        if not tensor.shape or tensor.num_elements % tensor.shape[0]:
            return None
        counts.add(tensor.shape[0])
        size = tensor.num_elements // tensor.shape[0]
        if not can_be_cut(tensor, size):
            return None
        owned += [(tensor.offset + e * size, tensor.offset + (e + 1) * size, e) for e in range(tensor.shape[0])]
        owned[-1] = (owned[-1][0], _padded_end(tensor), tensor.shape[0] - 1)
    if highest >= 0:
        counts.add(highest + 1)
    if len(counts) != 1:
        return None
    num_experts = counts.pop()
    sizes = [0] * num_experts
    for start, stop, expert in owned:
        sizes[expert] += stop - start
    num_pages = math.ceil(num_experts / max(1, most_page_elements // max(sizes)))
    per_page = math.ceil(num_experts / num_pages)
    pages = tuple(
        _part(
            unit,
            [one for one in owned if first <= one[2] < first + per_page],
            range(first, min(first + per_page, num_experts)),
        )
        for first in range(0, num_experts, per_page)
    )
    rest = _part(unit, list(_between(unit, owned)), range(0))
    packed_bytes = max(_packed_bytes(unit, part) for part in (rest, *pages)) if unit.packed_bytes else 0
    names = frozenset(tensor.name for tensor in tensors)
    return PagedUnit(rest=rest, pages=pages, names=names, num_experts=num_experts, packed_bytes=packed_bytes)


def _packed_bytes(unit: UnitLayout, part: UnitPart) -> int:
    return arrived_bytes(packed_pieces(unit, [(span.start, span.stop) for span in part.spans]))


def _padded_end(tensor: TensorLayout) -> int:
    """With the padding that follows it, so that it belongs to somebody."""
    return tensor.offset + -(-tensor.num_elements // TENSOR_ALIGN_ELEMENTS) * TENSOR_ALIGN_ELEMENTS


def _between(unit: UnitLayout, owned: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """What of a unit is nobody's, cut where its trained part ends."""
    end = 0
    for start, stop, _ in [*sorted(owned), (unit.num_elements, unit.num_elements, -1)]:
        cuts = [end, *([unit.trained_elements] if end < unit.trained_elements < start else []), start]
        for first, last in pairwise(cuts):
            if first < last:
                yield first, last, -1
        end = stop


def _part(unit: UnitLayout, pieces: Sequence[tuple[int, int, int]], experts: range) -> UnitPart:
    spans: list[Span] = []
    local = trained = 0
    for start, stop, expert in sorted(pieces):
        # Neighbours stay neighbours, so that what is one view in the unit is one here.
        if not spans or spans[-1].stop != start:
            local = -(-local // TENSOR_ALIGN_ELEMENTS) * TENSOR_ALIGN_ELEMENTS
        spans.append(Span(start=start, stop=stop, local=local, expert=expert))
        local += stop - start
        if stop <= unit.trained_elements:
            trained = local
    aligned = -(-local // TENSOR_ALIGN_ELEMENTS) * TENSOR_ALIGN_ELEMENTS
    return UnitPart(spans=tuple(spans), num_elements=aligned, trained_elements=trained, experts=experts)

"""One packed row of tokens, ready for the model: the only shape in which data enters the engine. And the rows of a
step, joined, and long ones divided into chunks.

Shapes: T = tokens of the row, N = tokens of the step, R = distinct ids, S = supervised tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from horizon_formats.checks import UNTRAINED
from horizon_server.engine.attention.chunked import RowChunk, chunks_of
from horizon_server.engine.device.protocol import Device
from horizon_server.errors import InvalidData

# As in the rows that users upload, and as torch's cross_entropy takes it.
IGNORED_LABEL = UNTRAINED
_ALIGNMENT_BYTES = 16

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """A row of documents, one after the other.

    `labels_T[t]` is the target of position t (already shifted, never crossing a document) or `IGNORED_LABEL`;
    `position_ids_T` restarts at 0 with each document; `document_lengths` sum to T.
    """

    input_ids_T: Tensor
    position_ids_T: Tensor
    labels_T: Tensor
    document_lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        num_tokens = self.input_ids_T.numel()
        for tensor in (self.input_ids_T, self.position_ids_T, self.labels_T):
            assert tensor.dtype == torch.int64, f"token tensors are int64, got {tensor.dtype}"
            assert tensor.shape == (num_tokens,), f"token tensors share one length, got {tuple(tensor.shape)}"
        assert num_tokens > 0, "a micro-batch holds at least one token"
        assert sum(self.document_lengths) == num_tokens, "document lengths sum to the number of tokens"

    @classmethod
    def joined(cls, rows: Sequence[MicroBatch]) -> MicroBatch:
        """The rows laid end to end."""
        return cls(
            input_ids_T=torch.cat([row.input_ids_T for row in rows]),
            position_ids_T=torch.cat([row.position_ids_T for row in rows]),
            labels_T=torch.cat([row.labels_T for row in rows]),
            document_lengths=tuple(length for row in rows for length in row.document_lengths),
        )

    @property
    def num_tokens(self) -> int:
        """Real tokens of the row; there is no padding."""
        return self.input_ids_T.numel()

    @property
    def num_targets(self) -> int:
        """Positions that are trained on."""
        return int((self.labels_T != IGNORED_LABEL).sum())

    @property
    def num_targets_of_documents(self) -> Tensor:
        """Positions that are trained on, for each document. Shapes: [documents]."""
        before = torch.cat([torch.zeros(1, dtype=torch.int64), (self.labels_T != IGNORED_LABEL).cumsum(0)])
        return before[torch.tensor([0, *accumulate(self.document_lengths)])].diff()


@dataclass(frozen=True, kw_only=True)
class StepTokens:
    """All micro-batches of a step, in parts that layers compute at once: each micro-batch whole, or a longer one in
    chunks. `rows_R` stays on the host; the rest, a copy of it included, is where compute reads it.

    `boundaries` are of each part: where its documents, or what it has of them, start and the last one ends. They stay
    on the host too. `position_ids` are of each part as well, [T], and `target_ends` where its supervised tokens end.
    `chunks` says of each part which chunk of a row it is; None is a whole micro-batch. `lanes` are the parts of each
    lane (`engine.lanes`), and `target_lanes` its part of the supervised tokens.
    """

    lanes: tuple[range, ...]
    target_lanes: tuple[slice, ...]
    spans: tuple[slice, ...]
    boundaries: tuple[Tensor, ...]
    chunks: tuple[RowChunk | None, ...]
    target_ends: tuple[int, ...]
    rows_R: Tensor
    placed_rows_R: Tensor
    row_ids_N: Tensor
    position_ids: tuple[Tensor, ...]
    supervised_S: Tensor
    targets_S: Tensor

    @classmethod
    def of(
        cls,
        lanes: Sequence[Sequence[MicroBatch]],
        device: Device,
        *,
        num_rows: int | None = None,
        chunk_tokens: int = 0,
    ) -> StepTokens:
        """Join the micro-batches of all lanes in the order given; there may be none. With `num_rows`, ids keep their
        numbers in a table of `num_rows` rows. With `chunk_tokens`, micro-batches of more tokens are divided into chunks
        of as many."""
        micro_batches = list(chain.from_iterable(lanes))
        parts_of = _parts_of(micro_batches, chunk_tokens)
        parts = list(chain.from_iterable(parts_of))
        numbers = [0, *accumulate(len(parts) for parts in parts_of)]
        ids_N = joined_tokens([m.input_ids_T for m in micro_batches])
        # A step uses few rows of a large table, so only those cross the link.
        if num_rows is None:
            rows_R, row_ids_N = torch.unique(ids_N, return_inverse=True)
        else:
            rows_R, row_ids_N = torch.arange(num_rows), ids_N
        labels_N = joined_tokens([m.labels_T for m in micro_batches])
        supervised_S = (labels_N != IGNORED_LABEL).nonzero()[:, 0]
        firsts = [0, *accumulate(len(lane) for lane in lanes)]
        targets = [0, *accumulate(sum(m.num_targets for m in lane) for lane in lanes)]
        return cls(
            lanes=tuple(range(numbers[start], numbers[stop]) for start, stop in pairwise(firsts)),
            target_lanes=tuple(slice(start, stop) for start, stop in pairwise(targets)),
            spans=tuple(part.span for part in parts),
            boundaries=tuple(part.boundaries for part in parts),
            chunks=tuple(part.chunk for part in parts),
            target_ends=_targets_before(supervised_S, [part.span.stop for part in parts]),
            rows_R=rows_R,
            placed_rows_R=device.place(rows_R),
            row_ids_N=device.place(row_ids_N),
            position_ids=_placed_apart([part.position_ids_T for part in parts], device),
            supervised_S=device.place(supervised_S),
            targets_S=device.place(labels_N[supervised_S]),
        )

    @property
    def num_targets(self) -> int:
        """Supervised tokens of these lanes."""
        return self.targets_S.numel()

    def targets_of(self, numbers: range) -> slice:
        """The supervised tokens of some parts, which are neighbours."""
        ends = (0, *self.target_ends)
        return slice(ends[numbers.start], ends[numbers.stop])

    def backward_order(self, lane: int) -> list[int]:
        """The parts of a lane in the order of backward: micro-batch by micro-batch, the chunks of one from its last."""
        order: list[int] = []
        row: list[int] = []
        for number in self.lanes[lane]:
            chunk = self.chunks[number]
            row.append(number)
            if chunk is None or chunk.is_last:
                order += reversed(row)
                row.clear()
        return order


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A micro-batch, or a chunk of it; `span` is in the step."""

    span: slice
    boundaries: Tensor
    position_ids_T: Tensor
    chunk: RowChunk | None = None


def _parts_of(micro_batches: Sequence[MicroBatch], chunk_tokens: int) -> list[list[_Part]]:
    """The parts of each micro-batch."""
    found: list[list[_Part]] = []
    start = before = 0
    for row in micro_batches:
        num_tokens, ends = row.num_tokens, [0, *accumulate(row.document_lengths)]
        size = chunk_tokens if 0 < chunk_tokens < num_tokens else num_tokens
        parts = [
            _Part(
                span=slice(start + chunk.first, start + chunk.stop),
                boundaries=boundaries,
                position_ids_T=row.position_ids_T[chunk.first : chunk.stop],
                chunk=chunk if size < num_tokens else None,
            )
            for chunk, boundaries in chunks_of(ends, size, before=before)
        ]
        found.append(parts)
        start += num_tokens
        before += num_tokens if size < num_tokens else 0
    return found


def _targets_before(supervised_S: Tensor, places: Sequence[int]) -> tuple[int, ...]:
    """How many supervised tokens are before each of these places in the step."""
    return tuple(torch.searchsorted(supervised_S, torch.tensor(places, dtype=torch.int64)).tolist())


def joined_tokens(parts: Sequence[Tensor]) -> Tensor:
    """Tokens, labels or positions one after the other; there may be none. Shapes: [sum]."""
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts])


def _placed_apart(parts: Sequence[Tensor], device: Device) -> tuple[Tensor, ...]:
    """In one copy, and each part at an address that code compiled for a GPU takes as it is: from any other it makes a
    copy first, with a warning, in each layer."""
    padded = [functional.pad(part, (0, -part.nbytes % _ALIGNMENT_BYTES // part.itemsize)) for part in parts]
    placed = torch.split(device.place(joined_tokens(padded)), [part.numel() for part in padded])
    return tuple(piece[: part.numel()] for piece, part in zip(placed, parts, strict=True))


def grouped(items: Sequence[Item], sizes: Iterable[int], limit: int) -> list[list[Item]]:
    """Neighbours in groups of at most `limit` together; a larger item is a group of its own."""
    groups: list[list[Item]] = []
    room = 0
    for item, size in zip(items, sizes, strict=True):
        if size > room:
            groups.append([])
            room = limit
        groups[-1].append(item)
        room -= size
    return groups


def check_micro_batches(
    micro_batches: Sequence[MicroBatch], *, vocab_size: int, max_document_tokens: int | None
) -> None:
    """Check the micro-batches of a step against the model, before anything is queued.

    Raises:
        InvalidData: a token or label is not in the vocabulary, a document is longer than the model has positions for,
            or no token of all the rows is trained; the violations name the fields.
    """
    if not micro_batches:
        raise refused("micro_batches", "is empty; a step needs at least one micro-batch")
    for index, row in enumerate(micro_batches):
        field = f"micro_batches[{index}]"
        longest = max(row.document_lengths)
        if max_document_tokens is not None and longest > max_document_tokens:
            raise refused(
                f"{field}.document_lengths",
                f"has a document of {longest} tokens; the model allows at most {max_document_tokens} positions",
            )
        trained = row.labels_T != IGNORED_LABEL
        for name, ids in (("input_ids_T", row.input_ids_T), ("labels_T", row.labels_T[trained])):
            wrong = ids[(ids < 0) | (ids >= vocab_size)]
            if wrong.numel():
                what = f"holds token {int(wrong[0])}; the model's vocabulary has {vocab_size} tokens, from 0"
                raise refused(f"{field}.{name}", what)
    if not any(row.num_targets for row in micro_batches):
        raise refused(
            "micro_batches.labels_T",
            f"hold no trained token, only {IGNORED_LABEL}; a batch needs at least one, so look at how its rows were "
            "masked",
        )


def refused(field: str, description: str) -> InvalidData:
    """The error for rows, or what belongs to them, that cannot be trained on."""
    return InvalidData.of(field, f"{field} {description}")

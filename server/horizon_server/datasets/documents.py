"""Documents: tokens that are trained together, and how long ones are cut into several.

Must not know rows, templates or files.
"""

from __future__ import annotations

import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Ids = array.array
"""Token ids, 4 bytes each: `array.array("i")`."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """Tokens that are trained together; `trained[t]` is 1 where token t is a target."""

    ids: Ids[int]
    trained: bytes

    @property
    def num_targets(self) -> int:
        """Targets; the first token is never one, as nothing precedes it."""
        return self.trained.count(1, 1)


def split(whole: Document, length: int) -> list[Document]:
    """Cut a document into pieces of `length` tokens. No piece has one token only, unless that is all there is."""
    begins = _piece_starts(len(whole.ids), length)
    ends = [*begins[1:], len(whole.ids)]
    return [
        Document(ids=whole.ids[begin:end], trained=whole.trained[begin:end])
        for begin, end in zip(begins, ends, strict=True)
    ]


class TextSplitter:
    """Cuts a growing list of tokens as `split` does the whole of them, all trained."""

    def __init__(self, sequence_length: int) -> None:
        self._sequence_length = sequence_length
        self._pending = array.array("i")

    def add(self, ids: Iterable[int]) -> Iterator[Document]:
        """Take more tokens and yield the documents that are full."""
        self._pending.extend(ids)
        begin, size = 0, self._sequence_length
        # Two tokens stay behind, so that the last document can be given a second one.
        while len(self._pending) - begin >= size + 2:
            yield _trained_throughout(self._pending[begin : begin + size])
            begin += size
        del self._pending[:begin]

    def finish(self) -> Iterator[Document]:
        """Yield the rest."""
        rest, self._pending = self._pending, array.array("i")
        yield from split(_trained_throughout(rest), self._sequence_length) if rest else ()


def _piece_starts(num_tokens: int, length: int) -> list[int]:
    starts = list(range(0, num_tokens, length))
    if len(starts) > 1 and num_tokens - starts[-1] == 1:
        starts[-1] -= 1
    return starts


def _trained_throughout(ids: Ids[int]) -> Document:
    return Document(ids=ids, trained=b"\1" * len(ids))

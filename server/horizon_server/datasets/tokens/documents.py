"""Documents: tokens that are trained together. How long ones are cut, and how long texts are encoded in blocks."""

from __future__ import annotations

import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Ids = array.array
"""Token ids, 4 bytes each: `array.array("i")`."""

# A block has about this many characters, and is cut where a tokenizer would cut too.
BLOCK_CHARACTERS = 64 * 1024


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
        # Two tokens are kept back, so that the last document can be given a second one.
        while len(self._pending) - begin >= size + 2:
            yield _trained_throughout(self._pending[begin : begin + size])
            begin += size
        del self._pending[:begin]

    def finish(self) -> Iterator[Document]:
        """Yield the rest."""
        rest, self._pending = self._pending, array.array("i")
        yield from split(_trained_throughout(rest), self._sequence_length) if rest else ()


def text_blocks(pieces: Iterable[str], block_characters: int = BLOCK_CHARACTERS) -> Iterator[str]:
    """Join the pieces of a text to blocks.

    The cut is before a line break that follows a letter: all tokenizers in use that split words start a new piece there.
    """
    pending: list[str] = []
    size = 0
    for piece in pieces:
        pending.append(piece)
        size += len(piece)
        if size < block_characters:
            continue
        text = "".join(pending)
        cut = _last_cut(text)
        yield text[:cut]
        pending, size = [text[cut:]], len(text) - cut
    if size:
        yield "".join(pending)


def blocks_of(text: str) -> Iterator[str]:
    """Yield a text in blocks."""
    if len(text) <= BLOCK_CHARACTERS:
        yield text
        return
    yield from text_blocks(text[at : at + BLOCK_CHARACTERS] for at in range(0, len(text), BLOCK_CHARACTERS))


def _piece_starts(num_tokens: int, length: int) -> list[int]:
    starts = list(range(0, num_tokens, length))
    if len(starts) > 1 and num_tokens - starts[-1] == 1:
        starts[-1] -= 1
    return starts


def _trained_throughout(ids: Ids[int]) -> Document:
    return Document(ids=ids, trained=b"\1" * len(ids))


def _last_cut(text: str) -> int:
    end = len(text)
    for _ in range(100):
        end = text.rfind("\n", 1, end)
        if end < 0:
            break
        if text[end - 1].isalpha():
            return end
    any_break = text.rfind("\n", 1)
    return any_break if any_break > 0 else len(text)

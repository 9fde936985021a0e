"""Long texts in blocks that encode, one by one, to the tokens of the whole: so that no text is too long for memory.

Must not know files or tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

# A block has about this many characters, and is cut where a tokenizer would cut too.
BLOCK_CHARACTERS = 64 * 1024


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

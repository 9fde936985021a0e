"""Trained characters to trained tokens, exactly.

Owns the one rule for tokens on a border. Must not know templates, roles or files.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from horizon_server.errors import InvalidData

Span = tuple[int, int]


def token_mask(text: str, encoding: Any, spans: Iterable[Span]) -> bytearray:
    """Return a byte for each token of a `tokenizers.Encoding` of `text`: 1 where it lies in a span of characters.

    A token across the border of a span belongs to the side that holds its letters; on the other side there is white space only, such
    as the line break that `<|end|>` of some vocabularies swallows. White space on both sides belongs to what comes first.

    Raises: InvalidData where a token holds letters of both sides: then no mask is exact.
    """
    mask = bytearray(len(encoding))
    for start, end in spans:
        if start < end:
            first, last = _first_token(text, encoding, start), _first_token(text, encoding, end)
            mask[first:last] = b"\1" * max(0, last - first)
    return mask


def _first_token(text: str, encoding: Any, border: int) -> int:
    """Return the first token that belongs to what follows the border."""
    token = _token_at(text, encoding, border)
    if token is None:
        return len(encoding)
    begin, end = encoding.token_to_chars(token)
    if begin == border:
        return token
    if not text[border:end].strip():
        return token + 1
    if not text[begin:border].strip():
        return token
    raise InvalidData(
        f"token {text[begin:end]!r} holds text that is trained and text that is not, so no mask is exact; put white space or a "
        "special token between the template's words and the reply's"
    )


def _token_at(text: str, encoding: Any, character: int) -> int | None:
    # A tokenizer may leave characters out, as white space at the ends.
    for index in range(character, len(text)):
        token = encoding.char_to_token(index)
        if token is not None:
            return int(token)
    return None

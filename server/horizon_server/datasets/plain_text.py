"""A plain text as a stream of pieces, in bounded memory.

Owns encodings and line numbers. Must not know JSON, formats or tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import BinaryIO

from horizon_server.datasets.data_file import DataFile, TextPiece
from horizon_server.datasets.expansion import open_expanded
from horizon_server.errors import FieldViolation

_PIECE_BYTES = 1024 * 1024


def read_text(file: DataFile) -> Iterator[TextPiece]:
    """Yield a plain text in pieces of about 1 MiB that never split a character. Line ends stay as they are.

    For a line with bytes that are not UTF-8, or with a NUL, a violation is yielded once, and the piece's text is left out.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open_expanded(file) as stream:
        offset = skip_byte_order_mark(stream)
        number, bad_line = 1, 0
        while block := stream.read(_PIECE_BYTES):
            # Whole blocks where nothing is wrong, single lines where something is: then it has a line number.
            pieces = [block] if _is_fine(decoder, block) else block.splitlines(keepends=True)
            for piece in pieces:
                text, problem = _decode(decoder, piece, offset)
                if problem is None:
                    yield TextPiece(number=number, text=text)
                elif bad_line != number:
                    yield TextPiece(number=number, text="", violation=_violation(number, problem))
                    bad_line = number
                offset += len(piece)
                number += piece.count(b"\n")
        _, problem = _decode(decoder, b"", offset, final=True)
        if problem is not None and bad_line != number:
            yield TextPiece(number=number, text="", violation=_violation(number, problem))


def skip_byte_order_mark(stream: BinaryIO) -> int:
    """Pass over a byte order mark at the beginning of the stream, and return its length."""
    head = stream.peek(len(codecs.BOM_UTF8))  # type: ignore[attr-defined]
    return len(stream.read(len(codecs.BOM_UTF8))) if head.startswith(codecs.BOM_UTF8) else 0


def not_utf8_problem(offset: int, error: UnicodeDecodeError) -> str:
    """Return the rest of the sentence about a line or row with bytes that are not UTF-8."""
    byte = error.object[error.start]
    hint = " (it looks like UTF-16)" if offset == 0 and byte in codecs.BOM_UTF16 else ""
    return f"is not UTF-8: byte 0x{byte:02x} at byte offset {offset} of the file{hint}; save the file as UTF-8"


def _is_fine(decoder: codecs.IncrementalDecoder, block: bytes) -> bool:
    state = decoder.getstate()
    try:
        return "\0" not in decoder.decode(block)
    except UnicodeDecodeError:
        return False
    finally:
        decoder.setstate(state)


def _decode(
    decoder: codecs.IncrementalDecoder, piece: bytes, offset: int, *, final: bool = False
) -> tuple[str, str | None]:
    """Return the text of the piece at `offset`, or why it cannot be read."""
    pending = len(decoder.getstate()[0])
    try:
        text = decoder.decode(piece, final)
    except UnicodeDecodeError as error:
        decoder.reset()
        return "", not_utf8_problem(offset - pending + error.start, error)
    if "\0" in text:
        return "", f"holds a NUL at byte offset {offset + piece.index(0)} of the file; a text has none, so remove it"
    return text, None


def _violation(number: int, problem: str) -> FieldViolation:
    return FieldViolation(field=f"line[{number}]", description=f"line[{number}] {problem}")

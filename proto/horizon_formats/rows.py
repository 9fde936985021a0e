"""The rows of a data file, and the pieces of plain text: read as streams, in memory bounded by the longest row."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Iterable, Iterator
from io import BufferedReader
from typing import Any, NamedTuple

from horizon_formats.files import (
    BLOCK_BYTES,
    MAX_ROW_BYTES,
    TOO_LONG,
    Container,
    DataFile,
    Row,
    Skip,
    container_of,
    open_expanded,
)
from horizon_formats.problems import FieldViolation, json_kind

_WHITESPACE = re.compile(r"[ \t\n\r]*")
# A line that begins with white space may be blank.
_MAYBE_BLANK = re.compile(rb"\n\s")
# A parser may stop this close to the end of its window, within a literal or an escape, where a value continues after
# the window.
_NEAR_END = 16


class JsonLine(NamedTuple):
    """A line that is not blank, not parsed yet: cheap to send to another process. `content` is None where it is too
    long."""

    number: int
    offset: int
    content: bytes | None

    @property
    def num_bytes(self) -> int:
        """Size of what is held."""
        return len(self.content or b"")


class TextPiece(NamedTuple):
    """A piece of a plain text; `violation` is set, and the text empty, where bytes of a line could not be read."""

    text: str
    violation: FieldViolation | None = None


class StrictDecoder:
    """Parses one JSON value at a time. After each, `problem` is what the standard forbids in it, or None. Thread: one
    at a time."""

    def __init__(self) -> None:
        self.problem: str | None = None
        # By itself the library takes NaN and Infinity, and of two equal keys keeps the last. Faster parsers do so too,
        # without hooks to see it, and differ in numbers and surrogates (ADR 0006).
        decoder = json.JSONDecoder(object_pairs_hook=self._object, parse_constant=self._constant)
        self._decode, self._raw_decode = decoder.decode, decoder.raw_decode

    def decode(self, text: str) -> Any:
        """Return the value that is all of `text`. Raises: JSONDecodeError; for long numbers and deep nesting
        ValueError, RecursionError."""
        self.problem = None
        return self._decode(text)

    def decode_at(self, text: str, start: int) -> tuple[Any, int]:
        """Return the value that begins at `start`, and where it ends. Raises: as `decode`."""
        self.problem = None
        return self._raw_decode(text, start)

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        columns = dict(pairs)
        # The hook is called for every object of every row: nothing but the two lengths is looked at where all is well.
        if len(columns) != len(pairs) and self.problem is None:
            keys = [key for key, _ in pairs]
            twice = next(key for key in columns if keys.count(key) > 1)
            self.problem = f"holds the key {twice!r:.40} twice in one object; only one of the values could be kept"
        return columns

    def _constant(self, name: str) -> float:
        self.problem = f"holds {name}, which is not JSON; write null or a number"
        return float(name)


def read_rows(file: DataFile, columns: Collection[str] | None = None, skip: Skip | None = None) -> Iterator[Row]:
    """Yield the rows of a file that is not plain text, each read or with the reason why it could not be.

    Blank lines are not rows. Of a table only `columns` are read, where they are given. The first `skip.left` rows are
    passed over.
    """
    container = container_of(file)
    skip = skip or Skip()
    if container is Container.JSON_LINES:
        return parse_json_lines(split_json_lines(file, skip), file.name)
    return file.table_rows(columns, skip) if container is Container.PARQUET else _read_json_array(file, skip)


def split_json_lines(file: DataFile, skip: Skip | None = None) -> Iterator[JsonLine]:
    """Yield every line that is not blank; lines that are passed over are not parsed and hardly looked at."""
    skip = skip or Skip()
    with open_expanded(file) as (stream, offset):
        number = 0
        by_blocks = skip.left > 0
        while True:
            if by_blocks:
                num_lines, num_bytes = _pass_block(stream, skip)
                number, offset = number + num_lines, offset + num_bytes
                # Whole lines are buffered but were not passed: the rows to pass end among them, so they are read one by
                # one.
                by_blocks = num_lines > 0 or b"\n" not in stream.peek()
            line = stream.readline(MAX_ROW_BYTES + 1)
            if not line:
                return
            number += 1
            start, size = offset, len(line)
            too_long = size > MAX_ROW_BYTES and not line.endswith(b"\n")
            # The rest is dropped in blocks: a line without an end may be as long as the file.
            rest = line
            while too_long and not rest.endswith(b"\n") and (rest := stream.readline(BLOCK_BYTES)):
                size += len(rest)
            offset += size
            if not too_long and line.isspace():
                continue
            if skip.left:
                skip.left -= 1
                continue
            yield JsonLine(number, start, None if too_long else line)


def _pass_block(stream: BufferedReader, skip: Skip) -> tuple[int, int]:
    """Pass over the whole lines that are buffered, unless they hold more rows than are to be passed; returns lines and
    bytes."""
    buffered = stream.peek()
    end = buffered.rfind(b"\n") + 1
    num_lines = num_rows = buffered.count(b"\n")
    # Counting line ends is ten times faster than parsing rows; blank lines, which are not rows, are rare.
    if buffered[:1].isspace() or _MAYBE_BLANK.search(buffered):
        num_rows = sum(1 for line in buffered[:end].split(b"\n") if line and not line.isspace())
    if num_rows > skip.left:
        return 0, 0
    stream.read(end)
    skip.left -= num_rows
    return num_lines, end


def parse_json_lines(lines: Iterable[JsonLine], file: str) -> Iterator[Row]:
    """Yield the row of every line of the file called `file`, or the reason why there is none."""
    decoder = StrictDecoder()
    for number, offset, content in lines:
        if content is None:
            yield Row.refused(file, number, TOO_LONG)
            continue
        columns: Any = None
        try:
            columns = decoder.decode(str(content, "utf-8"))
            problem = decoder.problem
            if not isinstance(columns, dict):
                problem = f"is a JSON {json_kind(columns)}; each line must be one JSON object"
        except UnicodeDecodeError as error:
            problem = _not_utf8(offset + error.start, error)
        except json.JSONDecodeError as error:
            problem = f"is not JSON: {error.msg} at column {error.colno}; write one JSON object per line"
            # Files that were joined have a mark in the middle, unseen in most editors; the parser only says that it
            # expected a value.
            if content.startswith(codecs.BOM_UTF8):
                problem = "begins with a byte order mark, which only the first line may; remove it"
        except (RecursionError, ValueError) as error:
            problem = f"is not readable JSON: {error}"
        if problem:
            yield Row.refused(file, number, problem)
        else:
            yield Row(file=file, number=number, columns=columns, num_bytes=len(content))


def _read_json_array(file: DataFile, skip: Skip) -> Iterator[Row]:
    """Yield the elements of the array, each parsed or with the reason why it could not be.

    An element whose end cannot be found is the last: what follows it was not read, and its violation says so.
    """
    with open_expanded(file) as (stream, offset):
        for row in _ArrayReader(stream, offset, file.name).rows():
            if skip.left:
                skip.left -= 1
            else:
                yield row


class _Broken(Exception):
    """The array cannot be read beyond here; the message is the part after the current row's place."""


class _ArrayReader:
    """A window on the text of an array, which moves on and grows as elements need it."""

    # The standard parser is started at each element: a streaming one sees no equal keys, and ends the file at a refused
    # element (ADR 0006).

    def __init__(self, stream: BufferedReader, offset: int, file: str) -> None:
        self._stream = stream
        self._offset = offset
        self._file = file
        self._damage = ""
        self._decoder = StrictDecoder()
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._text = ""
        self._at = 0
        self._lines_passed = 0
        self._ended = False

    def rows(self) -> Iterator[Row]:
        number, separator = 0, ","
        try:
            opening = self._take()
            assert opening == "[", "only arrays are read with this reader"
            if self._peek() == "]":
                separator = self._take()
            while separator != "]":
                if separator != ",":
                    found = repr(separator) if separator else "the end of the file"
                    raise _Broken(f"must follow a comma, but found {found} (line {self._line(self._at)})")
                yield self._element(number + 1)
                number += 1
                separator = self._take()
            if self._peek():
                raise _Broken(
                    f"follows the end of the array (line {self._line(self._at)}); a file holds one array, or one "
                    "object per line "
                    "without brackets around them"
                )
        except _Broken as error:
            yield Row.refused(self._file, number + 1, f"{error}; nothing after it was read", unit="row")

    def _element(self, number: int) -> Row:
        self._peek()
        while True:
            start = self._at
            try:
                columns, end = self._decoder.decode_at(self._text, start)
            except json.JSONDecodeError as error:
                unfinished = error.msg.startswith("Unterminated string") or error.pos + _NEAR_END > len(self._text)
                if self._ended or not unfinished:
                    raise _Broken(f"is not JSON: {error.msg} (line {self._line(error.pos)})") from None
            except (RecursionError, ValueError) as error:
                raise _Broken(f"is not readable JSON: {error}") from None
            else:
                # A number at the end of the window may continue after it.
                if self._ended or end < len(self._text) or self._text[start] == "{":
                    break
            self._grow()
        self._at = end
        problem = self._decoder.problem
        # A character is four bytes at most, so most elements need not be encoded to know that they are short enough.
        if end - start > MAX_ROW_BYTES // 4 and len(self._text[start:end].encode()) > MAX_ROW_BYTES:
            problem = TOO_LONG
        elif not isinstance(columns, dict):
            problem = f"is a JSON {json_kind(columns)}; each element of the array must be a JSON object"
        if problem:
            return Row.refused(self._file, number, problem, unit="row")
        return Row(file=self._file, number=number, columns=columns, num_bytes=end - start, unit="row")

    def _peek(self) -> str:
        """Return the next character that is not white space, or nothing at the end."""
        while True:
            match = _WHITESPACE.match(self._text, self._at)
            self._at = match.end() if match else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._grow():
                return ""

    def _take(self) -> str:
        character = self._peek()
        self._at += len(character)
        return character

    def _grow(self) -> bool:
        """Drop what is passed and read as much again as is held; False at the end."""
        held = len(self._text) - self._at
        if self._damage:
            raise _Broken(self._damage)
        if held > MAX_ROW_BYTES:
            raise _Broken(TOO_LONG)
        if self._ended:
            return False
        self._lines_passed += self._text.count("\n", 0, self._at)
        pending = len(self._utf8.getstate()[0])
        # As much again: an element that does not fit is parsed from its start again, and doubling keeps the work
        # linear.
        piece = self._stream.read(max(BLOCK_BYTES, held))
        self._ended = not piece
        try:
            text = self._utf8.decode(piece, final=self._ended)
        except UnicodeDecodeError as error:
            # The elements before the damage are still read; it is reported by the one that needs what follows.
            text = error.object[: error.start].decode("utf-8")
            self._damage = _not_utf8(self._offset - pending + error.start, error)
            self._ended = False
        self._offset += len(piece)
        self._text, self._at = self._text[self._at :] + text, 0
        return not self._ended

    def _line(self, position: int) -> int:
        return 1 + self._lines_passed + self._text.count("\n", 0, position)


def read_text(file: DataFile) -> Iterator[TextPiece]:
    """Yield a plain text in pieces of about 1 MiB that never split a character. Line ends stay as they are.

    For a line with bytes that are not UTF-8, or with a NUL, a violation is yielded once, and the piece's text is left
    out.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open_expanded(file) as (stream, offset):
        number, bad_line = 1, 0
        while True:
            block = stream.read(BLOCK_BYTES)
            # Whole blocks where nothing is wrong, single lines where something is: then it has a line number.
            pieces = [block] if not block or _is_fine(decoder, block) else block.splitlines(keepends=True)
            for piece in pieces:
                pending = len(decoder.getstate()[0])  # bytes of a character that began in the piece before
                text, problem = "", ""
                try:
                    text = decoder.decode(piece, final=not block)
                except UnicodeDecodeError as error:
                    decoder.reset()
                    problem = _not_utf8(offset - pending + error.start, error)
                if "\0" in text:
                    problem = f"holds a NUL at byte offset {offset + piece.index(0)} of the file; remove it"
                if not problem:
                    yield TextPiece(text)
                elif bad_line != number:
                    yield TextPiece("", Row.refused(file.name, number, problem).violation)
                    bad_line = number
                offset += len(piece)
                number += piece.count(b"\n")
            if not block:
                return


def _is_fine(decoder: codecs.IncrementalDecoder, block: bytes) -> bool:
    state = decoder.getstate()
    try:
        return "\0" not in decoder.decode(block)
    except UnicodeDecodeError:
        return False
    finally:
        decoder.setstate(state)


def _not_utf8(offset: int, error: UnicodeDecodeError) -> str:
    byte = error.object[error.start]
    hint = " (it looks like UTF-16)" if offset == 0 and byte in codecs.BOM_UTF16 else ""
    return f"is not UTF-8: byte 0x{byte:02x} at byte offset {offset} of the file{hint}; save the file as UTF-8"

"""Rows in JSON: one object a line, or the elements of one array, either as a stream in bounded memory.

Must not know what a row of a format must hold.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from typing import BinaryIO, NamedTuple

from horizon_server.datasets.data_file import MAX_ROW_BYTES, DataFile, Row
from horizon_server.datasets.expansion import open_expanded
from horizon_server.datasets.plain_text import not_utf8_problem, skip_byte_order_mark
from horizon_server.datasets.strict_json import StrictDecoder
from horizon_server.datasets.values import json_kind

_BLOCK_BYTES = 1024 * 1024
_WHITESPACE = re.compile(r"[ \t\n\r]*")
# Where a parser may stop in a value that goes on behind what was read: within a literal or an escape.
_NEAR_END = 16
_TOO_LONG = f"is longer than {MAX_ROW_BYTES // 2**20} MiB; split the row"


class JsonLine(NamedTuple):
    """A line that is not blank, not parsed yet: cheap to send to another process. `content` is None where it is too long."""

    number: int
    offset: int
    content: bytes | None

    @property
    def num_bytes(self) -> int:
        """Size of what is held."""
        return len(self.content or b"")


def split_json_lines(file: DataFile) -> Iterator[JsonLine]:
    """Yield every line that is not blank."""
    with open_expanded(file) as stream:
        for line in _read_lines(stream):
            if line.content is None or not line.content.isspace():
                yield line


def parse_json_lines(lines: Iterable[JsonLine]) -> Iterator[Row]:
    """Yield the row of every line, or the reason why there is none."""
    decoder = StrictDecoder()
    for number, offset, content in lines:
        yield Row.refused(number, _TOO_LONG) if content is None else _parse_line(decoder, number, offset, content)


def read_json_array(file: DataFile) -> Iterator[Row]:
    """Yield the elements of the array, each parsed or with the reason why it could not be.

    An element whose end cannot be found is the last: what follows it was not read, and its violation says so.
    """
    with open_expanded(file) as stream:
        yield from _ArrayReader(stream, skip_byte_order_mark(stream)).rows()


def _read_lines(stream: BinaryIO) -> Iterator[JsonLine]:
    offset = skip_byte_order_mark(stream)
    number = 0
    while line := stream.readline(MAX_ROW_BYTES + 1):
        number += 1
        start, size = offset, len(line)
        too_long = size > MAX_ROW_BYTES and not line.endswith(b"\n")
        while too_long and not line.endswith(b"\n") and (line := stream.readline(_BLOCK_BYTES)):
            size += len(line)
        offset += size
        yield JsonLine(number, start, None if too_long else line)


def _parse_line(decoder: StrictDecoder, number: int, offset: int, line: bytes) -> Row:
    try:
        columns = decoder.decode(str(line, "utf-8"))
    except UnicodeDecodeError as error:
        return Row.refused(number, not_utf8_problem(offset + error.start, error))
    except json.JSONDecodeError as error:
        if line.startswith(codecs.BOM_UTF8):
            return Row.refused(number, "begins with a byte order mark, which only the first line may; remove it")
        return Row.refused(number, f"is not JSON: {error.msg} at column {error.colno}; write one JSON object per line")
    except (RecursionError, ValueError) as error:
        return Row.refused(number, f"is not JSON that can be read: {error}")
    if not isinstance(columns, dict):
        return Row.refused(number, f"is a JSON {json_kind(columns)}; each line must be one JSON object")
    if decoder.problem:
        return Row.refused(number, decoder.problem)
    return Row(number=number, columns=columns, num_bytes=len(line))


class _Broken(Exception):
    """The array cannot be followed beyond here; the message is the rest of a sentence about the current row."""


class _ArrayReader:
    """A window on the text of an array, which moves on and grows as elements need it."""

    def __init__(self, stream: BinaryIO, offset: int) -> None:
        self._stream = stream
        self._offset = offset
        self._damage = ""
        self._decoder = StrictDecoder()
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._text = ""
        self._at = 0
        self._lines_passed = 0
        self._ended = False

    def rows(self) -> Iterator[Row]:
        number = 0
        try:
            for row in self._elements():
                number = row.number
                yield row
            if self._peek():
                raise _Broken(
                    f"stands behind the end of the array (line {self._line(self._at)}); a file holds one array"
                )
        except _Broken as error:
            yield Row.refused(number + 1, f"{error}; nothing behind it was read", unit="row")

    def _elements(self) -> Iterator[Row]:
        opening = self._take()
        assert opening == "[", "only arrays are read with this reader"
        if self._peek() == "]":
            self._take()
            return
        number, separator = 0, ","
        while separator != "]":
            if separator != ",":
                found = repr(separator) if separator else "the end of the file"
                raise _Broken(f"must follow a comma, but {found} stands there (line {self._line(self._at)})")
            number += 1
            yield self._element(number)
            separator = self._take()

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
                raise _Broken(f"is not JSON that can be read: {error}") from None
            else:
                # A number at the end of the window may go on behind it.
                if self._ended or end < len(self._text) or self._text[start] == "{":
                    break
            self._grow()
        self._at = end
        if end - start > MAX_ROW_BYTES // 4 and len(self._text[start:end].encode()) > MAX_ROW_BYTES:
            return Row.refused(number, _TOO_LONG, unit="row")
        if not isinstance(columns, dict):
            problem = f"is a JSON {json_kind(columns)}; each element of the array must be a JSON object"
            return Row.refused(number, problem, unit="row")
        if self._decoder.problem:
            return Row.refused(number, self._decoder.problem, unit="row")
        return Row(number=number, columns=columns, num_bytes=end - start, unit="row")

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
        """Drop what is passed and read as much again as is held, so that parsing anew stays linear; False at the end."""
        held = len(self._text) - self._at
        if self._damage:
            raise _Broken(self._damage)
        if held > MAX_ROW_BYTES:
            raise _Broken(_TOO_LONG)
        if not self._ended:
            self._lines_passed += self._text.count("\n", 0, self._at)
            self._text = self._text[self._at :] + self._read(max(_BLOCK_BYTES, held))
            self._at = 0
        return not self._ended

    def _read(self, num_bytes: int) -> str:
        pending = len(self._utf8.getstate()[0])
        piece = self._stream.read(num_bytes)
        self._ended = not piece
        try:
            text = self._utf8.decode(piece, final=self._ended)
        except UnicodeDecodeError as error:
            text = error.object[: error.start].decode("utf-8")
            self._damage = not_utf8_problem(self._offset - pending + error.start, error)
            self._ended = False
        self._offset += len(piece)
        return text

    def _line(self, position: int) -> int:
        return 1 + self._lines_passed + self._text.count("\n", 0, position)

"""The rows of a local data file looked through before a byte is sent: UTF-8, JSON, the fields that the format needs.

Everything refused here is refused by the server too. Generators yield the bytes they have worked through, so that they can be interrupted.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from horizon_client.data_fields import RowFields
from horizon_client.errors import BadFile, FieldViolation
from horizon_client.transfer.files import PIECE_BYTES

_MAX_VIOLATIONS = 100
_MAX_ROW_BYTES = 16 * 2**20
_MAX_ARRAY_BYTES = 64 * 2**20
"""A JSON array is looked into up to this size: the parser needs it whole in memory."""


def check_lines(path: Path, file: BinaryIO, fields: RowFields) -> Iterator[int]:
    """Look through JSON lines.

    Raises:
        BadFile: naming the bad lines, the first 100 of them as violations.
    """
    tally = _Tally(path)
    since_yield = num_rows = 0
    for number, line in _lines(file):
        if line is None:
            tally.add("line", number, "", f"is longer than {_MAX_ROW_BYTES // 2**20} MiB; split the row")
        elif not line.isspace():
            num_rows += 1
            row = _parsed(line)
            if isinstance(row, str):
                tally.add("line", number, "", row)
            else:
                tally.add_fields("line", number, fields, row)
            since_yield += len(line)
        if since_yield >= PIECE_BYTES:
            yield since_yield
            since_yield = 0
    tally.refuse()
    if not num_rows:
        raise BadFile(f"{path} holds no rows; it must hold at least one")
    yield since_yield


def check_array(path: Path, file: BinaryIO, fields: RowFields) -> Iterator[int]:
    """Look through a JSON array, if it is not too large to be read at once.

    Raises:
        BadFile: naming the bad rows, or the line where it is not JSON.
    """
    content = file.read(_MAX_ARRAY_BYTES + 1)
    if len(content) > _MAX_ARRAY_BYTES:
        return
    try:
        rows = json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadFile(f"{path}: not UTF-8 text at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        hint = "; one object a line is JSONL: do not begin with [" if error.msg == "Extra data" else ""
        raise BadFile(f"{path}, line {error.lineno}: not JSON: {error.msg}{hint}") from error
    except (RecursionError, ValueError) as error:
        raise BadFile(f"{path}: not readable JSON: {type(error).__name__}") from error
    if not rows:
        raise BadFile(f"{path} holds no rows; it must hold at least one")
    tally = _Tally(path)
    for number, row in enumerate(rows, start=1):
        if isinstance(row, dict):
            tally.add_fields("row", number, fields, row)
        else:
            tally.add("row", number, "", "each element of the array must be one JSON object")
    tally.refuse()
    yield len(content)


def check_text(path: Path, file: BinaryIO) -> Iterator[int]:
    """Look through a plain text.

    Raises:
        BadFile: at the first byte that is not UTF-8, or is NUL.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    line, offset = 1, 0
    while True:
        piece = file.read(PIECE_BYTES)
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(piece, final=not piece)
        except UnicodeDecodeError as error:
            line += error.object[: error.start].count(b"\n")
            at = offset - pending + error.start
            raise BadFile(
                f"{path}, line {line}: not UTF-8 text at byte offset {at} of the file; save the file as UTF-8"
            ) from error
        if "\0" in text:
            at = piece.index(0)
            line += piece[:at].count(b"\n")
            raise BadFile(f"{path}, line {line}: holds a NUL at byte offset {offset + at} of the file; a text has none")
        line += text.count("\n")
        offset += len(piece)
        if not piece:
            return
        yield len(piece)


class _Tally:
    """The first hundred bad rows of a file, and how many there are."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept: list[FieldViolation] = []
        self._total = 0

    def add(self, unit: str, number: int, column: str, problem: str) -> None:
        self._total += 1
        if len(self._kept) < _MAX_VIOLATIONS:
            field = f"{unit}[{number}]" + (f".{column}" if column else "")
            sentence = f"{unit} {number}: {column} {problem}" if column else f"{unit} {number}: {problem}"
            self._kept.append(FieldViolation(field=field, description=sentence))

    def add_fields(self, unit: str, number: int, fields: RowFields, row: dict[str, Any]) -> None:
        for column, problem in fields.problems(row):
            self.add(unit, number, column, problem)
        if not fields.decided:
            self.refuse()  # without a format no other row can be judged

    def refuse(self) -> None:
        if self._kept:
            more = f" (the first of {self._total} problems)" if self._total > 1 else ""
            raise BadFile(f"{self._path}, {self._kept[0].description}{more}", violations=self._kept)


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    number = 0
    while line := file.readline(_MAX_ROW_BYTES + 1):
        number += 1
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        too_long = len(line) > _MAX_ROW_BYTES and not line.endswith(b"\n")
        while too_long and not line.endswith(b"\n") and (line := file.readline(PIECE_BYTES)):
            pass
        yield number, None if too_long else line


def _parsed(line: bytes) -> dict[str, Any] | str:
    """Return the row of one line, or what is wrong with it."""
    try:
        row = json.loads(str(line, "utf-8"))
    except UnicodeDecodeError as error:
        return f"not UTF-8 at byte {error.start + 1} of the line"
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg} at column {error.colno}"
    except (RecursionError, ValueError) as error:
        return f"not readable JSON: {type(error).__name__}"
    return row if isinstance(row, dict) else 'each line must be one JSON object, such as {"text": "..."}'

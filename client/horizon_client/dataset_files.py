"""Which local files make a dataset, and the fast checks before a byte is sent: UTF-8, JSON, the bad lines.

The server validates every row; this only saves the upload of a file that it would refuse anyway. Knows no template and no tokenizer.
"""

from __future__ import annotations

import codecs
import gzip
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from horizon_client.errors import BadFile, Violation
from horizon_client.local_files import SourceFile
from horizon_client.progress import PIECE_BYTES, OnProgress, Progress, in_pieces

SUFFIXES = (".jsonl", ".json", ".parquet", ".txt")
COMPRESSED_SUFFIXES = (".gz", ".zst")

_MAX_VIOLATIONS = 100
_MAX_JSON_BYTES = 64 * 2**20
"""A JSON array is checked here up to this size: the parser needs it whole in memory."""


def dataset_files(sources: Sequence[str | os.PathLike[str]]) -> list[SourceFile]:
    """Return the files that `sources` (files, or folders of them) stand for, with the paths they will have.

    Raises:
        BadFile: when a source does not exist, a folder holds no data, or nothing was given.
    """
    found: list[Path] = []
    for source in sources:
        path = Path(source).expanduser()
        if not path.is_dir():
            found.append(path)
            continue
        inside = sorted(p for p in path.iterdir() if p.is_file() and _plain_suffix(p) in SUFFIXES)
        if not inside:
            raise BadFile(
                f"the folder {path} holds no data file; looked for {', '.join(SUFFIXES)}, also with .gz or .zst"
            )
        found += inside
    if not found:
        raise BadFile("no file was given")
    return [SourceFile.of(path, name) for path, name in zip(found, _names(found), strict=True)]


async def check_dataset_files(files: Sequence[SourceFile], on_progress: OnProgress) -> None:
    """Read the text files through once.

    Raises:
        BadFile: naming the file and its bad lines, the first 100 of them as violations.
    """
    total = sum(file.size_bytes for file in files)
    done = 0
    for file in files:

        def report(num_bytes: int, name: str = file.path) -> None:
            nonlocal done
            done = min(done + num_bytes, total)
            on_progress(Progress(phase="check", name=name, done_bytes=done, total_bytes=total))

        await in_pieces(_checking(file.source), report)


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the bare file names, or paths below the common folder where two names are equal."""
    names = [path.name for path in paths]
    if len(set(names)) == len(names):
        return names
    absolute = [path.absolute() for path in paths]
    if len(set(absolute)) != len(absolute):
        twice = next(path for path in paths if absolute.count(path.absolute()) > 1)
        raise BadFile(f"{twice} was given twice")
    common = Path(os.path.commonpath([path.parent for path in absolute]))
    return [path.relative_to(common).as_posix() for path in absolute]


def _plain_suffix(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED_SUFFIXES:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _checking(path: Path) -> Iterator[int]:
    kind = _plain_suffix(path)
    if kind not in (".jsonl", ".json", ".txt") or path.suffix.lower() == ".zst":
        return
    try:
        with _open(path) as file:
            if kind == ".jsonl":
                yield from _jsonl(path, file)
            elif kind == ".txt":
                yield from _utf8(path, file)
            elif path.stat().st_size <= _MAX_JSON_BYTES:
                yield from _json_array(path, file)
    except gzip.BadGzipFile as error:
        raise BadFile(f"{path} is not a gzip file: {error}") from error
    except (EOFError, zlib.error) as error:
        raise BadFile(f"{path} is a damaged gzip file; compress it again") from error
    except OSError as error:
        raise BadFile(f"cannot read {path}: {error.strerror}") from error


def _open(path: Path) -> BinaryIO:
    return cast("BinaryIO", gzip.open(path, "rb")) if path.suffix.lower() == ".gz" else path.open("rb")


def _jsonl(path: Path, file: BinaryIO) -> Iterator[int]:
    since_yield = 0
    found: list[Violation] = []
    total = 0
    for number, line in enumerate(file, start=1):
        problem = _row_problem(line, first=number == 1)
        if problem:
            total += 1
            if len(found) < _MAX_VIOLATIONS:
                found.append(Violation(field=f"line[{number}]", description=f"line {number}: {problem}"))
        since_yield += len(line)
        if since_yield >= PIECE_BYTES:
            yield since_yield
            since_yield = 0
    if found:
        more = f" (the first of {total} bad lines)" if total > 1 else ""
        raise BadFile(f"{path}, {found[0].description}{more}", violations=found)
    yield since_yield


def _row_problem(line: bytes, *, first: bool) -> str | None:
    """Return what is wrong with one JSONL line, or None. Blank lines are the server's to judge."""
    text = line.removeprefix(codecs.BOM_UTF8) if first else line
    if not text.strip():
        return None
    try:
        row = json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        return f"not UTF-8 at byte {error.start + 1} of the line"
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg} at column {error.colno}"
    except (RecursionError, ValueError) as error:
        return f"not readable JSON: {type(error).__name__}"
    return None if isinstance(row, dict) else 'each line must be one JSON object, such as {"text": "..."}'


def _utf8(path: Path, file: BinaryIO) -> Iterator[int]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    line, offset = 1, 0
    while True:
        piece = file.read(PIECE_BYTES)
        pending = len(decoder.getstate()[0])
        try:
            line_breaks = decoder.decode(piece, final=not piece).count("\n")
        except UnicodeDecodeError as error:
            line += error.object[: error.start].count(b"\n")
            at = offset - pending + error.start
            raise BadFile(
                f"{path}, line {line}: not UTF-8 text at byte offset {at} of the file; save the file as UTF-8"
            ) from error
        line += line_breaks
        offset += len(piece)
        if not piece:
            return
        yield len(piece)


def _json_array(path: Path, file: BinaryIO) -> Iterator[int]:
    content = file.read(_MAX_JSON_BYTES + 1)
    if len(content) > _MAX_JSON_BYTES:
        return
    try:
        rows = json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadFile(f"{path}: not UTF-8 text at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        hint = "; one object a line is JSONL: name the file .jsonl" if error.msg == "Extra data" else ""
        raise BadFile(f"{path}, line {error.lineno}: not JSON: {error.msg}{hint}") from error
    except (RecursionError, ValueError) as error:
        raise BadFile(f"{path}: not readable JSON: {type(error).__name__}") from error
    if not isinstance(rows, list):
        raise BadFile(f"{path} must hold a JSON array of rows; one object a line is JSONL: name the file .jsonl")
    yield len(content)

"""Which local files make a dataset, and the fast check of their rows before anything is sent. The server checks every row again."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from horizon_client.data_containers import (
    COMPRESSED_SUFFIXES,
    SUFFIXES,
    Container,
    container_of,
    open_expanded,
    plain_suffix,
)
from horizon_client.data_fields import AUTO, TEXT, RowFields
from horizon_client.data_rows import check_array, check_lines, check_text
from horizon_client.errors import BadFile
from horizon_client.transfer.files import SourceFile, in_pieces
from horizon_client.transfer.reporter import SILENT, Progress, Reporter

Sources: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""One file or folder, or several."""

_MOST_NAMED = 5


def dataset_sources(sources: Sources, reporter: Reporter = SILENT) -> list[SourceFile]:
    """Return the data files of `sources`, each with its path in the dataset; notices name what is skipped.

    A folder stands for the data files in it and in its subfolders. Skipped are hidden files, links to folders, and links to files
    outside the folder: nothing is sent that is not in the folder.

    Raises:
        BadFile: when a source does not exist or cannot be read, a folder contains no data, or a file was given twice.
    """
    # a str is also a sequence, of its letters
    given = [sources] if isinstance(sources, str | os.PathLike) else list(sources)
    found: list[tuple[Path, str]] = []
    for source in given:
        path = Path(source).expanduser()
        found += _inside(path, reporter) if path.is_dir() else [(path, path.name)]
    if not found:
        raise BadFile("no file was given")
    return [SourceFile.of(path, name) for path, name in _with_own_names(found)]


async def check_dataset_files(
    files: Sequence[SourceFile],
    on_progress: Callable[[Progress], None],
    *,
    format: str = AUTO,  # noqa: A002 - the name users know from the command and the contract
    field_map: Mapping[str, str] | None = None,
) -> None:
    """Read the files through once, those that only the server can read excepted.

    Raises:
        BadFile: naming the file and its bad rows, the first 100 of them as violations.
    """
    total = sum(file.size_bytes for file in files)
    done = 0
    formats: dict[str, Path] = {}
    for file in files:

        def report(num_bytes: int, name: str = file.path) -> None:
            nonlocal done
            done = min(done + num_bytes, total)
            on_progress(Progress(phase="check", name=name, done_bytes=done, total_bytes=total))

        fields = RowFields(format, field_map or {})
        await in_pieces(_checking(file.source, fields), report)
        if fields.decided:
            formats.setdefault(fields.format, file.source)
    if len(formats) > 1:
        found = ", ".join(f"{path} is {name}" for name, path in formats.items())
        raise BadFile(f"the files of one dataset must have one format, but {found}; push them as separate datasets")


def _checking(path: Path, fields: RowFields) -> Iterator[int]:
    try:
        container = container_of(path)
        if container is Container.UNREAD:
            return
        with open_expanded(path) as file:
            if container is Container.PLAIN_TEXT:
                if fields.format not in (AUTO, TEXT):
                    raise BadFile(f"{path} is plain text, but format {fields.format} needs rows; write JSON lines")
                fields.format = TEXT
                yield from check_text(path, file)
            elif container is Container.JSON_ARRAY:
                yield from check_array(path, file, fields)
            else:
                yield from check_lines(path, file, fields)
    except (EOFError, zlib.error) as error:
        raise BadFile(f"{path} is a damaged gzip file; compress it again") from error
    except OSError as error:
        if error.strerror is None:
            raise BadFile(f"{path} is a damaged gzip file: {error}; compress it again") from error
        raise BadFile(f"cannot read {path}: {error.strerror}") from error


def _inside(folder: Path, reporter: Reporter) -> list[tuple[Path, str]]:
    """Return the data files in a folder, each with its path in it."""
    data: list[tuple[Path, str]] = []
    others: list[str] = []
    outside: list[str] = []
    root = folder.resolve()
    for path in _entries(folder):
        name = path.relative_to(folder).as_posix()
        try:
            if not path.is_file() or plain_suffix(path) not in SUFFIXES:
                others.append(name)
            elif not path.resolve().is_relative_to(root):
                outside.append(name)
            else:
                data.append((path, name))
        except OSError as error:
            raise BadFile(f"cannot read {path}: {error.strerror}") from error
    if others:
        reporter.notice(f"skipped in {folder} (not data files): {_first_few(others)}")
    if outside:
        reporter.notice(f"skipped in {folder} (links to files outside it): {_first_few(outside)}")
    if not data:
        links = "; to push the files that its links lead to, name them one by one" if outside else ""
        endings = " or ".join(COMPRESSED_SUFFIXES)
        raise BadFile(
            f"the folder {folder} contains no data file; a data file ends in {', '.join(SUFFIXES)}, also with {endings}{links}"
        )
    return data


def _entries(folder: Path) -> Iterator[Path]:
    """Yield the files and the links to folders below `folder`, hidden ones excepted; a link to a folder may lead in a circle."""

    def refuse(error: OSError) -> None:
        raise BadFile(f"cannot read the folder {error.filename}: {error.strerror}") from error

    for place, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        yield from (Path(place) / name for name in sorted([*links, *files]) if not name.startswith("."))


def _first_few(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > _MOST_NAMED else ""
    return f"{', '.join(names[:_MOST_NAMED])}{more} ({len(names)} in all)"


def _with_own_names(found: Sequence[tuple[Path, str]]) -> list[tuple[Path, str]]:
    """Return the files with distinct names: relative to their common folder where two names are equal."""
    names = [name for _, name in found]
    if len(set(names)) == len(names):
        return list(found)
    absolute = [path.absolute() for path, _ in found]
    if len(set(absolute)) != len(absolute):
        twice = next(path for path in absolute if absolute.count(path) > 1)
        raise BadFile(f"{twice} was given twice")
    common = Path(os.path.commonpath([path.parent for path in absolute]))
    return [(path, path.relative_to(common).as_posix()) for path in absolute]

"""Which local files make a dataset, and the check of their rows before anything is sent.

The rules are those of the server, by the same code (`horizon_formats`). Parquet and zstd need Arrow and are left to the server.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from horizon_client.errors import BadFile, InvalidRequest
from horizon_client.transfer.files import SourceFile, read_through, reading
from horizon_client.transfer.reporter import SILENT, Progress, Reporter
from horizon_formats.checks import DatasetCheck
from horizon_formats.files import COMPRESSED_SUFFIXES, SENT_FROM_FOLDERS, DataFile, plain_suffix
from horizon_formats.formats import parse_format
from horizon_formats.problems import FormatError, InvalidOption, ServerOnly

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
    if len({name for _, name in found}) < len(found):
        # names must differ, so they start at the common folder
        absolute = [path.absolute() for path, _ in found]
        if len(set(absolute)) != len(absolute):
            twice = next(path for path in absolute if absolute.count(path) > 1)
            raise BadFile(f"{twice} was given twice")
        common = Path(os.path.commonpath([path.parent for path in absolute]))
        found = [(path, path.relative_to(common).as_posix()) for path in absolute]
    return [SourceFile.of(path, name) for path, name in found]


async def check_dataset_files(
    files: Sequence[SourceFile],
    on_progress: Callable[[Progress], None],
    *,
    format: str = "auto",  # noqa: A002 - the name users know from the command and the contract
    field_map: Mapping[str, str] | None = None,
) -> None:
    """Read the files through once, except those that only the server can read.

    Raises:
        BadFile: naming the first file with bad rows, the first 100 of them as violations.
        InvalidRequest: when format or map are wrong whatever the files hold.
    """

    def read(file: SourceFile) -> Iterator[int]:
        with suppress(ServerOnly):
            yield from check.read(DataFile(path=file.source, name=str(file.source)))
        check.violations.refuse()  # after each file, so that the error is about one file

    try:
        check = DatasetCheck(parse_format(format), field_map or {})
        await read_through(files, read, "check", on_progress)
        check.report()
    except FormatError as error:
        kind = InvalidRequest if isinstance(error, InvalidOption) else BadFile
        raise kind(error.message, violations=error.violations) from error


def _inside(folder: Path, reporter: Reporter) -> list[tuple[Path, str]]:
    """Return the data files in a folder, each with its path in it."""
    data: list[tuple[Path, str]] = []
    others: list[str] = []
    outside: list[str] = []
    root = folder.resolve()
    for path in _entries(folder):
        name = path.relative_to(folder).as_posix()
        with reading(path):
            if not path.is_file() or plain_suffix(path.name) not in SENT_FROM_FOLDERS:
                others.append(name)
            elif not path.resolve().is_relative_to(root):
                outside.append(name)
            else:
                data.append((path, name))
    for names, why in ((others, "not data files"), (outside, "links to files outside it")):
        if names:
            first = ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
            reporter.notice(f"skipped in {folder} ({why}): {first} ({len(names)} in all)")
    if not data:
        links = "; to push the files that its links lead to, name them one by one" if outside else ""
        endings = " or ".join(COMPRESSED_SUFFIXES)
        raise BadFile(
            f"the folder {folder} contains no data file; a data file ends in {', '.join(SENT_FROM_FOLDERS)}, also with {endings}{links}"
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

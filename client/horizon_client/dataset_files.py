"""Which local files make a dataset, and the check of their rows before a byte is sent.

The rules are those of the server, by the same code (`horizon_formats`), so that what would be refused is refused before the upload. Parquet
and zstd need Arrow and are left to the server.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from horizon_client.errors import BadFile, InvalidRequest, Violation
from horizon_client.local_files import SourceFile
from horizon_client.progress import OnNotice, OnProgress, Progress, ignore_notice, in_pieces
from horizon_formats.file_check import DatasetCheck
from horizon_formats.files import COMPRESSED_SUFFIXES, SENT_FROM_FOLDERS, DataFile, plain_suffix
from horizon_formats.formats import parse_format
from horizon_formats.problems import FormatError, InvalidOption, ServerOnly

_MAX_NAMED = 5


def dataset_sources(sources: Sequence[str | os.PathLike[str]], on_notice: OnNotice = ignore_notice) -> list[SourceFile]:
    """Return the files that `sources` stand for, with the paths they will have in the dataset.

    A folder stands for the data files in it and in the folders below, hidden ones excepted; other files are skipped with a notice.

    Raises:
        BadFile: when a source does not exist, a folder holds no data, a file was given twice, or nothing was given.
    """
    found: list[tuple[Path, str]] = []
    for source in sources:
        path = Path(source).expanduser()
        found += _inside(path, on_notice) if path.is_dir() else [(path, path.name)]
    if not found:
        raise BadFile("no file was given")
    return [SourceFile.of(path, name) for path, name in _with_own_names(found)]


async def check_dataset_files(
    files: Sequence[SourceFile],
    on_progress: OnProgress,
    *,
    format: str = "auto",  # noqa: A002 - the name users know from the command and the contract
    field_map: Mapping[str, str] | None = None,
) -> None:
    """Read the files through once, except those that only the server can read.

    Raises:
        BadFile: naming the first file with bad rows, the first 100 of them as violations.
        InvalidRequest: when format or map are wrong whatever the files hold.
    """
    total = sum(file.size_bytes for file in files)
    done = 0
    try:
        check = DatasetCheck(parse_format(format), field_map or {})
        for file in files:

            def report(num_bytes: int, name: str = file.path) -> None:
                nonlocal done
                done = min(done + num_bytes, total)
                on_progress(Progress(phase="check", name=name, done_bytes=done, total_bytes=total))

            await in_pieces(_checking(check, file.source), report)
            check.violations.refuse()
        check.report()
    except FormatError as error:
        violations = [Violation(field=v.field, description=v.description) for v in error.violations]
        kind = InvalidRequest if isinstance(error, InvalidOption) else BadFile
        raise kind(error.message, violations=violations) from error


def _checking(check: DatasetCheck, path: Path) -> Iterator[int]:
    try:
        yield from check.read(DataFile(path=path, name=str(path)))
    except ServerOnly:
        return
    except OSError as error:
        raise BadFile(f"cannot read {path}: {error.strerror}") from error


def _inside(folder: Path, on_notice: OnNotice) -> list[tuple[Path, str]]:
    data: list[tuple[Path, str]] = []
    others: list[str] = []
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        links = [name for name in folders if (Path(place) / name).is_symlink()]  # which may lead in a circle
        for name in sorted([*links, *(file for file in files if not file.startswith("."))]):
            path = Path(place) / name
            inner = path.relative_to(folder).as_posix()
            if path.is_file() and plain_suffix(name) in SENT_FROM_FOLDERS:
                data.append((path, inner))
            else:
                others.append(inner)
    if not data:
        looked_for, endings = ", ".join(SENT_FROM_FOLDERS), " or ".join(COMPRESSED_SUFFIXES)
        raise BadFile(f"the folder {folder} holds no data file; looked for {looked_for}, also with {endings}")
    if others:
        named = ", ".join(others[:_MAX_NAMED]) + (", ..." if len(others) > _MAX_NAMED else "")
        on_notice(f"skipped in {folder} (not data files): {named} ({len(others)} in all)")
    return data


def _with_own_names(found: Sequence[tuple[Path, str]]) -> list[tuple[Path, str]]:
    """Return the files with names that are all different: below their common folder where two were equal."""
    names = [name for _, name in found]
    if len(set(names)) == len(names):
        return list(found)
    absolute = [path.absolute() for path, _ in found]
    if len(set(absolute)) != len(absolute):
        twice = next(path for path in absolute if absolute.count(path) > 1)
        raise BadFile(f"{twice} was given twice")
    common = Path(os.path.commonpath([path.parent for path in absolute]))
    return [(path, path.relative_to(common).as_posix()) for path in absolute]

"""Which local files make a dataset: those named, and those below the folders named. Opens none of them but to see that it can."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from horizon_client.data_containers import COMPRESSED_SUFFIXES, SUFFIXES, plain_suffix
from horizon_client.errors import BadFile
from horizon_client.local_files import SourceFile
from horizon_client.progress import OnNotice, ignore_notice

_MOST_NAMED = 5


def dataset_sources(sources: Sequence[str | os.PathLike[str]], on_notice: OnNotice = ignore_notice) -> list[SourceFile]:
    """Return the files that `sources` stand for, with the paths they will have; what a folder holds besides is told, not sent.

    A folder stands for the data files in it and in the folders below, hidden ones excepted.

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


def _inside(folder: Path, on_notice: OnNotice) -> list[tuple[Path, str]]:
    data: list[tuple[Path, str]] = []
    others: list[str] = []
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        links = [name for name in folders if (Path(place) / name).is_symlink()]  # which may lead in a circle
        for name in sorted([*links, *(file for file in files if not file.startswith("."))]):
            path = Path(place) / name
            inner = path.relative_to(folder).as_posix()
            if path.is_file() and plain_suffix(path) in SUFFIXES:
                data.append((path, inner))
            else:
                others.append(inner)
    if not data:
        endings = " or ".join(COMPRESSED_SUFFIXES)
        raise BadFile(f"the folder {folder} holds no data file; looked for {', '.join(SUFFIXES)}, also with {endings}")
    if others:
        named = ", ".join(others[:_MOST_NAMED]) + (", ..." if len(others) > _MOST_NAMED else "")
        on_notice(f"left out of {folder}, as their names are no data files': {named} ({len(others)} in all)")
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

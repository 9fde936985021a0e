"""Folders that exist whole or not at all: written under a temporary name, flushed to disk, then renamed.

Owns fsync, rename and what happens when the disk is full. Knows nothing of what is written.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from horizon_server.errors import AlreadyExists, DiskFull

PARTIAL_SUFFIX = ".partial"
"""A folder of this suffix is unfinished: no listing shows it, and the next write to the same name removes it."""

_OUT_OF_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextmanager
def durable_folder(target: Path, *, needed_bytes: int) -> Iterator[Path]:
    """Yield an empty folder to fill; on leaving, flush it to disk and rename it to `target`.

    On any error the unfinished folder is removed, and `target` never appears.

    Raises:
        AlreadyExists: `target` is there already.
        DiskFull: fewer than `needed_bytes` are free, or the space ran out while writing.
    """
    if target.exists():
        raise AlreadyExists(f"{target} exists already; choose another name or delete it first")
    target.parent.mkdir(parents=True, exist_ok=True)
    _require_space(target, needed_bytes)
    partial = target.parent / f".{target.name}{PARTIAL_SUFFIX}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        _flush(partial)
        partial.rename(target)
        _flush_folder(target.parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        if error.errno not in _OUT_OF_SPACE:
            raise
        raise DiskFull(
            f"the disk of {target.parent} ran full while {target.name} was written ({error.strerror}); what was written "
            f"is gone again; free at least {needed_bytes} bytes and retry"
        ) from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def remove_unfinished(parent: Path) -> list[str]:
    """Remove what killed writers left in `parent`, and return the names. Nobody may be writing there."""
    unfinished = sorted(path for path in parent.glob(f".*{PARTIAL_SUFFIX}") if path.is_dir())
    for path in unfinished:
        shutil.rmtree(path)
    return [path.name for path in unfinished]


def _require_space(target: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(target.parent).free
    if free_bytes < needed_bytes:
        raise DiskFull(
            f"{target.name} needs {needed_bytes} bytes, but {target.parent} has {free_bytes} free; "
            f"delete old checkpoints or lower checkpoint.keep_last"
        )


def _flush(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_dir():
            _flush_folder(path)
            continue
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

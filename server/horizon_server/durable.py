"""Files and folders that exist whole or not at all: written under a temporary name, flushed to disk, then renamed."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeGuard

from horizon_server import progress
from horizon_server.errors import AlreadyExists, DiskFull

# A folder of this suffix is unfinished: no listing shows it, and the next write to the same name removes it.
PARTIAL_SUFFIX = ".partial"
# Of the calls of this process. Taking the next one is one operation of the interpreter, also among threads.
_NUMBERS = itertools.count()

_MAX_KEPT_FREE_BYTES = 2 * 2**30
# EFBIG comes from a process's own limit on the size of files (RLIMIT_FSIZE), which child processes have.
_OUT_OF_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def is_out_of_space(error: BaseException | None) -> TypeGuard[OSError]:
    """Whether an error says that the disk or a quota is full."""
    return isinstance(error, OSError) and error.errno in _OUT_OF_SPACE


def replace_file(target: Path, text: str) -> None:
    """Write a small file in place of what was there: a reader sees the old content or the new one, and a crash leaves
    one of them.

    Raises:
        OSError: it cannot be written; what was there stays.
    """
    # The call's number and the process id, so that no two writers share a temporary file.
    partial = target.with_name(f".{target.name}.{next(_NUMBERS)}.{os.getpid()}{PARTIAL_SUFFIX}")
    try:
        with partial.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            # Before the rename: otherwise a power cut can leave the new name with no content.
            os.fsync(stream.fileno())
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def remove_half_files(folder: Path) -> None:
    """Remove what processes that were killed inside `replace_file` have left in the folder."""
    for partial in folder.glob(f".*.*{PARTIAL_SUFFIX}"):
        pid = partial.name.removesuffix(PARTIAL_SUFFIX).rpartition(".")[2]
        # A command that runs beside the daemon may be writing right now.
        if partial.is_file() and pid.isdecimal() and not Path("/proc", pid).exists():
            partial.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    """Make the content of a file durable."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def kept_free_bytes(folder: Path) -> int:
    """Return how much of a folder's disk is left free for the daemon's database where no setting says otherwise."""
    return min(_MAX_KEPT_FREE_BYTES, shutil.disk_usage(folder).total // 100)


@contextmanager
def durable_folder(target: Path, *, needed_bytes: int, min_free_bytes: int | None = None) -> Iterator[Path]:
    """Yield an empty folder to fill; on leaving, flush it to disk and rename it to `target`.

    On any error the unfinished folder is removed, and `target` never appears.

    Raises:
        AlreadyExists: `target` is there already.
        DiskFull: fewer than `needed_bytes` are free besides `min_free_bytes` (None: `kept_free_bytes`), or the space
            ran out while writing.
    """
    if target.exists():
        raise AlreadyExists("exists already; choose another name or delete it first", file=target)
    target.parent.mkdir(parents=True, exist_ok=True)
    kept_bytes = kept_free_bytes(target.parent) if min_free_bytes is None else min_free_bytes
    free_bytes = max(0, shutil.disk_usage(target.parent).free - kept_bytes)
    if free_bytes < needed_bytes:
        raise DiskFull(
            f"needs {needed_bytes} bytes, but its disk has {free_bytes} free besides {kept_bytes} that are kept for "
            "the daemon; delete old checkpoints or lower checkpoint.keep_last",
            file=target,
        )
    # In the same folder, because a rename works within one file system only.
    partial = target.parent / f".{target.name}{PARTIAL_SUFFIX}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        # Contents and names first: a rename that is durable before they are would show an incomplete folder after a
        # power cut.
        for path in partial.rglob("*"):
            if path.is_dir():
                sync_folder(path)
                continue
            sync_file(path)
            progress.advance()
        sync_folder(partial)
        partial.rename(target)
        sync_folder(target.parent)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if not is_out_of_space(error):
            raise
        raise DiskFull(
            f"is not complete, because its disk ran full ({error.strerror}); what was written has been removed; "
            f"free at least {needed_bytes} bytes and retry",
            file=target,
        ) from error


def remove_unfinished(parent: Path) -> list[str]:
    """Remove what killed writers left in `parent`, and return the names. No writer may be at work there."""
    unfinished = sorted(path for path in parent.glob(f".*{PARTIAL_SUFFIX}") if path.is_dir())
    for path in unfinished:
        shutil.rmtree(path)
    return [path.name for path in unfinished]

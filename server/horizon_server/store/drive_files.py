"""The files of jobs on the node's drives, and whether a folder of `tier_dirs` can have them.

Files have no name: the kernel frees one when the last process that has it open is gone, so nothing is left behind,
whichever of them is killed. The daemon makes them and lends them to workers by descriptor, like planes of memory. Their
space is allocated when they are made: a drive does not become full in the middle of a step.

Source: open(2), O_TMPFILE and O_DIRECT.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from horizon_server.errors import DriveFailed
from horizon_server.store import planes
from horizon_server.store.drive_layout import PIECE_BYTES, file_name
from horizon_server.texts import size_text

THREADS_PER_DRIVE = 6
"""Four keep a drive busy; those of jobs also compute checksums, with two more meanwhile."""
_MOUNTS = Path("/proc/self/mountinfo")
# File systems in memory: they would take what they are to spare.
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
_MEASURED_BYTES = 256 << 20
_WHY = {
    errno.ENOENT: "there is no such folder; create it or mount the drive",
    errno.ENOTDIR: "it is no folder",
    errno.EACCES: "the daemon's user may not write there",
    errno.EPERM: "the daemon's user may not write there",
    errno.EROFS: "its file system is mounted read-only, or the daemon's service may not write there "
    "(ReadWritePaths= of its systemd unit)",
    errno.EDQUOT: "it is full (its quota is used up)",
    errno.EINVAL: "its file system does not allow O_DIRECT; use ext4, XFS or another one on a local drive",
    errno.EOPNOTSUPP: "its file system has no unnamed files (O_TMPFILE); use ext4, XFS or another one on a local drive",
    errno.EISDIR: "its file system has no unnamed files (O_TMPFILE); use ext4, XFS or another one on a local drive",
}


@dataclass(frozen=True, kw_only=True)
class DriveSpeed:
    """What a folder of `tier_dirs` is good for: `problem` says why it cannot be used, else its drive was measured with
    O_DIRECT. Units: bytes per second, bytes."""

    folder: str
    problem: str = ""
    read_bytes_per_s: float = 0.0
    write_bytes_per_s: float = 0.0
    free_bytes: int = 0
    device: int = 0
    """The number of its file system: folders on one share a drive."""


@contextmanager
def lent_files(folders: Sequence[str], sizes: Sequence[int]) -> Iterator[dict[str, int]]:
    """Make a file of this size in each folder, and give them back at the end: name -> descriptor.

    Raises:
        DriveFailed: a folder cannot have its file; it is named.
    """
    files: dict[str, int] = {}
    try:
        for number, (folder, size) in enumerate(zip(folders, sizes, strict=True)):
            try:
                files[file_name(number)] = _unnamed_file(Path(folder), size)
            except OSError as error:
                raise DriveFailed(
                    f"{folder} (tier_dirs) cannot be used: {_problem(error)}; repair it or make room there, or take it "
                    "out of tier_dirs and restart the daemon; then resume the job"
                ) from error
        yield files
    finally:
        for descriptor in files.values():
            os.close(descriptor)


def measure(folder: Path, *, num_bytes: int = _MEASURED_BYTES) -> DriveSpeed:
    """Say whether a folder can be used, and how fast its drive is: that many bytes are written once and read once, on
    as many threads as jobs use. Blocking."""
    try:
        if (kind := _file_system(folder)) in _IN_MEMORY:
            return DriveSpeed(folder=str(folder), problem=f"it is on {kind}, which is memory and not a drive")
        file = _unnamed_file(folder, num_bytes)
        try:
            written_s = _seconds(partial(_move, os.pwritev, file), num_bytes)
            read_s = _seconds(partial(_move, os.preadv, file), num_bytes)
        finally:
            os.close(file)
        room, device = os.statvfs(folder), folder.stat().st_dev
    except OSError as error:
        return DriveSpeed(folder=str(folder), problem=_problem(error))
    return DriveSpeed(
        folder=str(folder),
        read_bytes_per_s=num_bytes / read_s,
        write_bytes_per_s=num_bytes / written_s,
        free_bytes=room.f_bavail * room.f_frsize,
        device=device,
    )


def _unnamed_file(folder: Path, num_bytes: int) -> int:
    """An unnamed file of this size with its space allocated, opened with O_DIRECT; the caller closes it."""
    file = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    try:
        room = os.fstatvfs(file)
        if num_bytes > room.f_bavail * room.f_frsize:
            # Asked for more, some file systems take all there is before they refuse.
            raise _full(file, num_bytes)
        if num_bytes:
            os.posix_fallocate(file, 0, num_bytes)
    except OSError as error:
        problem = _full(file, num_bytes) if error.errno == errno.ENOSPC else error
        os.close(file)
        raise problem from None
    return file


def _full(file: int, num_bytes: int) -> OSError:
    room = os.fstatvfs(file)
    free = size_text(room.f_bavail * room.f_frsize)
    return OSError(errno.ENOSPC, f"it is full ({free} free, and {size_text(num_bytes)} are needed)")


def _file_system(folder: Path) -> str:
    """The kind of file system that a folder is on, as the kernel names it; empty where it does not say."""
    device = folder.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in _MOUNTS.read_text("utf-8").splitlines():
        mount, _, file_system = line.partition(" - ")
        if mount.split()[2] == wanted:
            return file_system.split()[0]
    return ""


def _seconds(move: Callable[[mmap.mmap, int], None], num_bytes: int) -> float:
    """The time that moving that many bytes takes, piece by piece, on the threads of a drive."""
    # Rings are of such memory, and a drive is slower with small pages.
    buffers = [planes.map_anonymous(PIECE_BYTES) for _ in range(THREADS_PER_DRIVE)]
    for buffer in buffers:
        # The kernel provides the pages now, and drives that compress zeros show nothing.
        buffer[:] = os.urandom(PIECE_BYTES)

    def all_of(number: int) -> None:
        for start in range(number * PIECE_BYTES, num_bytes, THREADS_PER_DRIVE * PIECE_BYTES):
            move(buffers[number], start)

    started_s = time.perf_counter()
    with ThreadPoolExecutor(max_workers=THREADS_PER_DRIVE) as pool:
        list(pool.map(all_of, range(THREADS_PER_DRIVE)))
    return time.perf_counter() - started_s


def _move(call: Callable[[int, list[mmap.mmap], int], int], file: int, buffer: mmap.mmap, offset: int) -> None:
    if call(file, [buffer], offset) != len(buffer):
        raise OSError(errno.EIO, "a part of a piece alone was moved")


def _problem(error: OSError) -> str:
    return _WHY.get(error.errno or 0, error.strerror or str(error))

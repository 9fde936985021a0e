"""What may still be written to the disk of the state folder, so that the database always has space left.

Uploads, preparations and checkpoints end before `min_free_bytes` are touched. The file `reserve` is given up when the
database itself needs space: with it, users can still cancel jobs and delete what they do not need, and the daemon can
start.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import structlog

from horizon_server.durable import kept_free_bytes
from horizon_server.errors import DiskFull
from horizon_server.texts import size_text

log = structlog.get_logger(__name__)

RESERVE_FILE = "reserve"
MAX_RESERVE_BYTES = 16 * 2**20


class Space:
    """The disk of one state folder. Thread: any."""

    def __init__(self, state_dir: Path, min_free_bytes: int | None = None) -> None:
        self._state_dir = state_dir
        self._min_free_bytes = min_free_bytes
        self._reserve = state_dir / RESERVE_FILE

    @property
    def kept_bytes(self) -> int:
        """Bytes that uploads, preparations and checkpoints leave free."""
        return kept_free_bytes(self._state_dir) if self._min_free_bytes is None else self._min_free_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that may still be written."""
        return max(0, shutil.disk_usage(self._state_dir).free - self.kept_bytes)

    def require(self, needed_bytes: int, what: str) -> None:
        """Let pass what fits. Raises DiskFull, with the numbers, for what would take the space that is kept for the
        daemon."""
        free_bytes = self.free_bytes
        if needed_bytes > free_bytes or free_bytes == 0:
            raise DiskFull(
                f"{what} needs {size_text(needed_bytes)}, but the node's disk has {size_text(free_bytes)} left besides "
                f"{size_text(self.kept_bytes)} that are kept for the daemon; delete jobs, checkpoints or datasets that "
                "you do not need "
                "(horizon job delete --help), or ask an admin to free space, then try again",
                retry_after_s=60.0,
            )

    def tend_reserve(self) -> None:
        """Give the reserve up where the disk is nearly full, and make it again once there is space for more than it."""
        free_bytes = shutil.disk_usage(self._state_dir).free
        size = min(MAX_RESERVE_BYTES, shutil.disk_usage(self._state_dir).total // 100)
        if self._reserve.exists():
            # A quarter: the database is to find the space before it needs it, and other files are not to use it up.
            if free_bytes < size // 4:
                self.give_up_reserve()
        elif free_bytes > self.kept_bytes + 2 * size:
            descriptor = os.open(self._reserve, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, max(1, size))
            except OSError:
                # Without it, a full disk stops the database a little sooner.
                with contextlib.suppress(OSError):
                    self._reserve.unlink()
            finally:
                os.close(descriptor)

    def give_up_reserve(self) -> bool:
        """Remove the reserve; return whether there was one. Called when the database finds the disk full, too."""
        try:
            self._reserve.unlink()
        except OSError:
            return False
        log.warning("the disk is full: the reserve is given up, so that users can delete what they do not need")
        return True

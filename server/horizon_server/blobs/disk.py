"""The file system calls that fail on a full disk, and the message for that."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from horizon_server.durable import is_out_of_space
from horizon_server.errors import DiskFull, HorizonError


class Disk:
    """What uploads need from the disk; a test gives one that fails."""

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write some of `data` and return how much."""
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        """Make what was written durable."""
        os.fsync(descriptor)

    def free_bytes(self, folder: Path) -> int:
        """Return what can still be written below `folder`."""
        return shutil.disk_usage(folder).free


_OF_UPLOADS = "what is durable of this upload is kept: free space there, then push again to continue"


@contextmanager
def disk_full_reported(then: str = _OF_UPLOADS) -> Iterator[None]:
    """Turn the system's "no space left" into an error that says what the caller can do.

    Raises:
        DiskFull: when the block failed for lack of space.
    """
    try:
        yield
    except HorizonError:
        raise
    except OSError as error:
        if not is_out_of_space(error):
            raise
        raise DiskFull(f"the node's disk is full; {then}", retry_after_s=60.0) from error

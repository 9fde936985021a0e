"""The state folder: made private, held by one daemon at a time, and where the addresses of the running daemon are found."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from horizon_server.durable import replace_file
from horizon_server.errors import BadSetting, InUse


@contextmanager
def held_state_dir(path: Path) -> Iterator[Path]:
    """Make `path` where it is missing and hold it against other daemons until the end of the block.

    Raises:
        InUse: when another daemon holds it.
        BadSetting: when it cannot be made or written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BadSetting(
            f"state folder {path} cannot be used: {error.strerror}; choose another with --state-dir"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        raise InUse(
            f"state folder {path} is held by another horizond (pid {holder}); stop it, or choose another with --state-dir"
        ) from error
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield path
    finally:
        (path / "endpoints.json").unlink(missing_ok=True)
        os.close(descriptor)


def write_endpoints(path: Path, *, grpc: str, http: str, authority: Path | None) -> None:
    """Say where the running daemon listens, for scripts and for the other horizond commands."""
    document = {"grpc": grpc, "http": http, "authority": str(authority) if authority else None, "pid": os.getpid()}
    replace_file(path / "endpoints.json", json.dumps(document) + "\n")

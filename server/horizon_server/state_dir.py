"""The state folder: private, of one account, held by one daemon at a time. The running daemon writes its addresses
there."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import pwd
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from horizon_server.durable import remove_half_files, replace_file
from horizon_server.errors import BadSetting, InUse

log = logging.getLogger(__name__)

# Set by every horizond command: weights, logs and tokens' hashes are for the daemon's account alone.
PRIVATE_UMASK = 0o077

# There from the start of `horizond restore` to its end: what is in the folder then is not whole.
UNFINISHED_RESTORE_FILE = "restore-unfinished"
_DATABASE = "horizon.db"


def private_state_dir(path: Path) -> None:
    """Make `path` where it is missing; take away what other accounts may do there, and refuse to put files into another
    account's.

    Raises:
        BadSetting: when it cannot be made, or belongs to another account.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        database = path / _DATABASE
        owner, own = (database if database.exists() else path).stat().st_uid, os.geteuid()
        # The daemon could not write what root leaves in its folder. Other accounts can write only where they may.
        if own == 0 and owner != 0:
            raise BadSetting(
                f"state folder {path} belongs to {_account(owner)}, and this command runs as {_account(own)}, whose "
                f"files the daemon could not write; run it as {_account(owner)}: sudo -u {_account(owner)} horizond "
                "..., or choose another with "
                "--state-dir"
            )
        for place in (path, *path.glob(f"{_DATABASE}*")):
            found = place.stat()
            mode = found.st_mode & 0o777
            # What belongs to another account, such as a volume that a container shares by its group, is that account's
            # to close.
            if mode & PRIVATE_UMASK and found.st_uid == own:
                place.chmod(mode & ~PRIVATE_UMASK)
                log.warning("other accounts could read %s; its mode %04o is repaired", place, mode)
    except OSError as error:
        raise _unusable(path, error) from error


def require_state(path: Path) -> None:
    """Let pass a folder that a daemon has been started on. Raises BadSetting, so that a wrong --state-dir makes
    none."""
    try:
        is_there = (path / _DATABASE).exists()
    except OSError as error:
        raise _unusable(path, error) from error
    if not is_there:
        raise BadSetting(
            f"{path} holds no daemon's state: give the daemon's own folder with --state-dir or --config, or start a "
            "daemon on it first: "
            "horizond serve"
        )


def existing_state_dir(path: Path) -> None:
    """Make the state folder of a daemon private. Raises BadSetting as `require_state` and `private_state_dir` do."""
    require_state(path)
    private_state_dir(path)


@contextmanager
def idle_state_dir(path: Path) -> Iterator[Path]:
    """Keep daemons from starting on `path` until the end of the block, for one who only looks. Raises InUse: one runs
    on it."""
    try:
        descriptor = os.open(path / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # no daemon has run since it was restored or copied
        yield path
        return
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield path
    except BlockingIOError as error:
        raise InUse(f"state folder {path} is held by a running horizond") from error
    finally:
        os.close(descriptor)


@contextmanager
def held_state_dir(path: Path, *, may_be_unfinished: bool = False) -> Iterator[Path]:
    """Make `path` private and hold it against other daemons until the end of the block.

    Raises:
        InUse: when another daemon holds it.
        BadSetting: when it cannot be made or written, belongs to another account, or a restore into it was interrupted
            and `may_be_unfinished` is not set.
    """
    private_state_dir(path)
    if not may_be_unfinished and (path / UNFINISHED_RESTORE_FILE).exists():
        raise BadSetting(
            f"a restore into state folder {path} was interrupted; run it again: horizond restore BACKUP_DIR"
        )
    try:
        descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        # The kernel gives the lock back however the daemon ends, which a file with a pid would not.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        raise InUse(
            f"state folder {path} is held by another horizond (pid {holder}); stop it, or choose another with "
            "--state-dir"
        ) from error
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        remove_half_files(path)
        yield path
    finally:
        (path / "endpoints.json").unlink(missing_ok=True)
        os.close(descriptor)


def write_endpoints(path: Path, *, grpc: str, http: str, authority: Path | None) -> None:
    """Write where the running daemon listens, for scripts and for the other horizond commands."""
    document = {"grpc": grpc, "http": http, "authority": str(authority) if authority else None, "pid": os.getpid()}
    replace_file(path / "endpoints.json", json.dumps(document) + "\n")


def _account(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"#{uid}"  # as sudo -u takes it


def _unusable(path: Path, error: OSError) -> BadSetting:
    return BadSetting(f"state folder {path} cannot be used: {error.strerror}; choose another with --state-dir")

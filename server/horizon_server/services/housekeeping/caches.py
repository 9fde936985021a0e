"""What can be made again: prepared data and compiled layers that no job has used for long, and the files of old
attempts."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from horizon_server.blobs.trash import size_of
from horizon_server.jobs.folders import JobFolders
from horizon_server.records.housekeeping import Garbage

KEPT_ATTEMPTS = 3
"""Of a job, the newest; of older ones only the logs of those that failed are kept."""
# Of a log that is cut, what stays of its beginning: the versions, the plan and the first error are there.
_HEAD_BYTES = 2**20
_NOTE_BYTES = 128
HUB_FOLDER = "hub"
"""In the state folder: what `horizond model add` has fetched, of models that are not whole yet."""
_JOURNAL_FILE = "journal.jsonl"
_LOG_FILE = "worker.log"


def used_data(folders: JobFolders, job_ids: Iterable[tuple[str, int]]) -> list[Path]:
    """Return the prepared data of these attempts (job and number). Blocking."""
    found: list[str | None] = []
    for job_id, attempt in job_ids:
        request = folders.log(job_id, attempt).with_name("request.json")
        with contextlib.suppress(OSError, ValueError):
            plain = json.loads(request.read_bytes())
            # The rows held out are inside the folder of the others, and theirs then.
            found += [plain.get("prepared"), *plain.get("evaluations", {}).values()]
    return [Path(folder) for folder in found if folder]


def mark_used(folders: Iterable[Path]) -> None:
    """Note that these are in use now. Blocking."""
    for folder in folders:
        with contextlib.suppress(OSError):
            os.utime(folder)


def unused_tokens(root: Path, max_age_s: float) -> list[Path]:
    """Return the folders of prepared data that no job has used for that long. Blocking."""
    before = time.time() - max_age_s
    # A name with a dot is one of a preparation that is running.
    folders = [path for path in root.glob("*/*") if path.is_dir() and "." not in path.name]
    return [path for path in folders if path.stat().st_mtime < before]


def given_up_fetches(root: Path, max_age_s: float) -> list[Path]:
    """Return the folders of models of a hub of which nothing has arrived for that long. Blocking."""
    before = time.time() - max_age_s
    folders = [path for path in root.glob("*") if path.is_dir()]
    return [path for path in folders if max(file.stat().st_mtime for file in (path, *path.rglob("*"))) < before]


def unused_code(root: Path, max_age_s: float) -> list[Path]:
    """Return the facts of compiled layers, and of requests for them, that no job has used for that long. Blocking."""
    before, found = time.time() - max_age_s, []
    for facts in (*root.glob("*.json"), *root.glob("made/*.json")):
        code = facts.with_suffix(".pt2")
        # A use touches the code; of a layer that cannot be compiled there are only the facts.
        with contextlib.suppress(OSError):
            if (code if code.exists() else facts).stat().st_mtime < before:
                found.append(facts)
    return found


def remove_code(facts: Path) -> bool:
    """Remove one compiled layer, unless a worker is making it at this moment. Blocking."""
    lock = facts.with_suffix(".lock")
    try:
        with lock.open("w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The facts first: code without facts is never loaded.
            for path in (facts, facts.with_suffix(".pt2"), lock):
                path.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    return True


def old_attempts(folders: JobFolders, job_id: str, *, current: int, failed: Collection[int]) -> list[Path]:
    """Return the files of old attempts that may go: all but the logs of those that failed. Blocking."""
    found: list[Path] = []
    for number in folders.attempts(job_id):
        folder = folders.log(job_id, number).parent
        if number > current - KEPT_ATTEMPTS or is_alive(folder):
            continue
        if number not in failed:
            found.append(folder)
        else:
            found += [path for path in folder.iterdir() if path.name != _LOG_FILE]
    return found


def stored_journals(folders: JobFolders, job_id: str) -> list[Path]:
    """Return the workers' journals of an ended job: all that they hold is in the database. Blocking."""
    journals = [folders.log(job_id, number).with_name(_JOURNAL_FILE) for number in folders.attempts(job_id)]
    return [path for path in journals if path.exists() and not is_alive(path.parent)]


def long_logs(folders: JobFolders, job_id: str, max_bytes: int) -> list[Path]:
    """Return the logs of a job's attempts that are longer than that. Blocking."""
    logs = [folders.log(job_id, number) for number in folders.attempts(job_id)]
    return [path for path in logs if path.exists() and path.stat().st_size > max_bytes]


def cut_log(path: Path, max_bytes: int) -> None:
    """Leave the beginning and the end of a log, `max_bytes` in all, and say in between what is missing. Blocking.

    Of an attempt that is alive only the beginning stays, as its worker appends to the same file.
    """
    with path.open("r+b") as log:
        size = log.seek(0, os.SEEK_END)
        head_bytes = min(_HEAD_BYTES, max_bytes // 2)
        tail = b""
        if not is_alive(path.parent):
            log.seek(size - (max_bytes - head_bytes - _NOTE_BYTES))
            tail = log.read()
            tail = tail[tail.find(b"\n") + 1 :]
        log.truncate(head_bytes)
        log.seek(head_bytes)
        log.write(
            f"\n... {size - head_bytes - len(tail)} bytes were removed, as the log was too long ...\n".encode() + tail
        )


def is_alive(attempt: Path) -> bool:
    """Whether a process of an attempt is alive: it holds the lock of the attempt's file `alive`."""
    try:
        descriptor = os.open(attempt / "alive", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def remove_all(paths: Iterable[Path]) -> None:
    """Remove files and folders that may be gone already. Blocking."""
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def garbage(kind: str, paths: Iterable[Path], why: str, *, root: Path) -> list[Garbage]:
    """Return what these files are as garbage, with their sizes. Blocking."""
    return [Garbage(kind=kind, place=str(path.relative_to(root)), size_bytes=size_of(path), why=why) for path in paths]

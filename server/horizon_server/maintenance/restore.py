"""Puts a backup into a state folder: into an empty one, or into one whose database or files are damaged or lost."""

from __future__ import annotations

import datetime
import fcntl
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from horizon_server.blobs.parts import disk_full_reported
from horizon_server.blobs.store import link_folder
from horizon_server.db.database_file import opened_file, requeue_resident
from horizon_server.db.existing import insert_entry
from horizon_server.db.pairing import STATE_ID_FILE, pair
from horizon_server.durable import PARTIAL_SUFFIX, sync_file, sync_folder
from horizon_server.errors import BadSetting, InUse
from horizon_server.jobs.folders import JobFolders, link_or_copy
from horizon_server.maintenance.backup import BACKUP_IN_STATE, DATABASE_ENTRY, Backup, file_problem, read_backup
from horizon_server.records.audit import AuditEntry
from horizon_server.state_dir import UNFINISHED_RESTORE_FILE, held_state_dir
from horizon_server.store.manifest import MANIFEST_FILE, is_complete
from horizon_server.texts import size_text
from horizon_server.worker_link.protocol import JOURNAL_FILE, LOG_FILE

# The worker of an attempt holds a lock on this file of its folder for as long as a process of it lives.
_ALIVE_FILES = "jobs/*/attempt-*/alive"
_DATABASE_FILES = (DATABASE_ENTRY, f"{DATABASE_ENTRY}-wal", f"{DATABASE_ENTRY}-shm")
_MAX_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class RestoreResult:
    """What was put into the state folder, what was there already, and where the database that was there is now."""

    backup: Backup
    num_restored: int
    num_kept: int
    num_requeued: int
    """Jobs that ran when the backup was made, and are queued again."""
    old_database: Path | None


def restore(
    source: Path,
    state_dir: Path,
    *,
    replace: bool = False,
    entry: AuditEntry | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> RestoreResult:
    """Put the backup in the folder `source` into `state_dir`. Every byte of it is read and compared before anything is
    changed.

    With `replace` the folder may have contents: its database is replaced and kept under another name, files that are
    missing or damaged are put back, and everything else stays. The daemon moves what the restored database does not
    list to the trash. `entry` is written into the audit log of the restored database, where it has one.

    Raises:
        InUse: a daemon, or the worker of one, runs on the state folder.
        NotFound: `source` holds no complete backup.
        BadSetting: the state folder is not empty, a file of the backup is missing or damaged, or a newer version made
            it.
        DiskFull: there is no space for it; the same call continues once there is.
    """
    backup = read_backup(source)
    with (
        disk_full_reported(f"free space for {state_dir}, then restore again: it continues"),
        held_state_dir(state_dir, may_be_unfinished=True),
    ):
        _require_no_worker(state_dir)
        unfinished = state_dir / UNFINISHED_RESTORE_FILE
        found = sorted({entry.name for entry in state_dir.iterdir()} - {"lock", BACKUP_IN_STATE})
        if found and not replace and not unfinished.exists():
            raise BadSetting(
                f"state folder {state_dir} is not empty ({', '.join(found[:5])}{', ...' if len(found) > 5 else ''}); "
                "restore into an empty "
                "one with --state-dir, or put the backup's database and its files back into this one with --replace"
            )
        on_progress(f"reading {len(backup.files)} files of {size_text(backup.size_bytes)}")
        _require_good(source, backup)
        unfinished.write_text(f"{backup.made}\n", "ascii")
        sync_folder(state_dir)
        restoring = _Restoring(source, backup, state_dir, entry)
        on_progress(f"putting them into {state_dir}")
        restoring.files()
        # Last: until it is there, no daemon starts on the folder.
        old_database = restoring.database()
        unfinished.unlink()
        sync_folder(state_dir)
    return RestoreResult(
        backup=backup,
        num_restored=restoring.num_restored,
        num_kept=restoring.num_kept,
        num_requeued=restoring.num_requeued,
        old_database=old_database,
    )


def _require_no_worker(state_dir: Path) -> None:
    for file in state_dir.glob(_ALIVE_FILES):
        with file.open("rb") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise InUse(
                    f"a worker of job {file.parent.parent.name} still runs and writes to {state_dir}; start the daemon "
                    "and end it with "
                    "SIGINT or Ctrl-C, which checkpoints its jobs, or kill the worker"
                ) from error


def _require_good(source: Path, backup: Backup) -> None:
    problems = [
        f"{path} {problem}"
        for path, record in backup.files.items()
        if (problem := file_problem(source / path, record, full=True))
    ]
    if problems:
        more = f", and {len(problems) - _MAX_NAMED} more" if len(problems) > _MAX_NAMED else ""
        raise BadSetting(
            f"backup {source} is damaged: {'; '.join(problems[:_MAX_NAMED])}{more}; nothing was restored: take these "
            "files from another "
            "copy ('horizond check --backup-dir DIR --full' lists all)"
        )


class _Restoring:
    """One backup while it is put into a state folder."""

    def __init__(self, source: Path, backup: Backup, state_dir: Path, entry: AuditEntry | None) -> None:
        self._source = source
        self._backup = backup
        self._state_dir = state_dir
        self._entry = entry
        self.num_restored = self.num_kept = self.num_requeued = 0

    def files(self) -> None:
        """Put everything back but the database."""
        paths = [path for path in self._backup.files if path != DATABASE_ENTRY]
        checkpoints = [path.removesuffix(MANIFEST_FILE) for path in paths if path.endswith(f"/{MANIFEST_FILE}")]
        whole = tuple(inner for inner in checkpoints if is_complete(self._state_dir / inner))
        for inner in checkpoints:
            if inner not in whole:
                shutil.rmtree(self._state_dir / inner, ignore_errors=True)
        # The list of a checkpoint last: without it the checkpoint is not whole, and a restore that continues puts it
        # back again.
        for path in sorted(paths, key=lambda path: path.endswith(MANIFEST_FILE)):
            if path.startswith(whole) or self._keeps(path):
                self.num_kept += 1
            else:
                self._put(path)
        for folder in {folder for path in paths for folder in (self._state_dir / path).parents}:
            if folder.is_relative_to(self._state_dir):
                sync_folder(folder)

    def database(self) -> Path | None:
        """Put the database in place, and the folders of its models; return the new path of the one that was there."""
        partial = self._state_dir / f".{DATABASE_ENTRY}{PARTIAL_SUFFIX}"
        partial.unlink(missing_ok=True)
        shutil.copyfile(self._source / DATABASE_ENTRY, partial)
        partial.chmod(0o600)
        with opened_file(partial) as database:
            identity = database.identity
            models = [pushed for pushed in database.pushed() if pushed.kind == "model" and pushed.is_ready]
        for model in models:
            there = [file for file in model.files if self._blob(file.sha256).exists()]
            link_folder(self._blob, there, self._state_dir / "models" / model.resource_id)
        message = f"the node was restored from a backup of {self._backup.made}; it continues from its newest checkpoint"
        if self._entry is not None:
            insert_entry(partial, self._entry, is_in_place=False)
        self.num_requeued = requeue_resident(partial, self._has_reports, message)
        sync_file(partial)
        old_database = None
        # Its journals with it: SQLite would apply one that is left to the new database.
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
        for name in _DATABASE_FILES:
            if (place := self._state_dir / name).exists():
                kept = self._state_dir / f"before-restore-{stamp}.db{name.removeprefix(DATABASE_ENTRY)}"
                place.rename(kept)
                old_database = old_database or kept
        if identity is None:
            (self._state_dir / STATE_ID_FILE).unlink(missing_ok=True)
        else:
            # The daemon then takes this database for the folder's own, although the folder may have seen a newer one.
            pair(self._state_dir, *identity)
        partial.rename(self._state_dir / DATABASE_ENTRY)
        sync_folder(self._state_dir)
        self.num_restored += 1
        return old_database

    def _has_reports(self, job_id: str, attempt: int) -> bool:
        """Whether the worker of that attempt has left its reports, as where only the database is put back."""
        return JobFolders(self._state_dir).log(job_id, attempt).with_name(JOURNAL_FILE).exists()

    def _keeps(self, path: str) -> bool:
        """Whether the file that is there stays: it is whole, or nobody can say what it should be."""
        place = self._state_dir / path
        if path.startswith("blobs/"):
            return file_problem(place, self._backup.files[path], full=True) is None
        return place.exists()  # a log that has grown, a certificate that clients trust

    def _put(self, path: str) -> None:
        source, place = self._source / path, self._state_dir / path
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The same name each time: a restore that continues a killed one removes what that one has left.
        partial = place.with_name(f".{place.name}{PARTIAL_SUFFIX}")
        partial.unlink(missing_ok=True)
        if path.startswith(("blobs/", "jobs/")) and not path.endswith(LOG_FILE):
            link_or_copy(source, partial)
        else:
            shutil.copyfile(source, partial)
        # Contents are read-only: folders of models are hard links to them.
        partial.chmod(0o444 if path.startswith("blobs/") else 0o600)
        sync_file(partial)
        partial.replace(place)
        self.num_restored += 1

    def _blob(self, sha256: str) -> Path:
        return self._state_dir / "blobs" / sha256[:2] / sha256

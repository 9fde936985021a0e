"""Puts a backup into a state folder: into an empty one, or into one whose database or files are damaged or lost."""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from horizon_server.blobs.parts import disk_full_reported
from horizon_server.db.database_file import known_schemas, opened_file, requeue_resident
from horizon_server.db.existing import insert_entry
from horizon_server.db.pairing import STATE_ID_FILE, pair
from horizon_server.durable import PARTIAL_SUFFIX, durable_folder, sync_folder
from horizon_server.errors import BadSetting, DiskFull, InUse
from horizon_server.jobs.folders import JobFolders
from horizon_server.maintenance.backup_folder import DATABASE_ENTRY, Backup, BackupFolder, Entry, copy_hashed
from horizon_server.records.audit import AuditEntry
from horizon_server.state_dir import UNFINISHED_RESTORE_FILE, held_state_dir
from horizon_server.store.manifest import is_complete
from horizon_server.texts import size_text
from horizon_server.worker_link.protocol import JOURNAL_FILE

# The worker of an attempt holds a lock on this file of its folder for as long as a process of it lives.
_ALIVE_FILES = "jobs/*/attempt-*/alive"
_CHECKPOINT_DEPTH = 4  # jobs/<id>/checkpoints/<step>
_DATABASE_FILES = (DATABASE_ENTRY, f"{DATABASE_ENTRY}-wal", f"{DATABASE_ENTRY}-shm")


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
    name: str | None = None,
    replace: bool = False,
    entry: AuditEntry | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> RestoreResult:
    """Put the newest backup of `source`, or the named one, into `state_dir`.

    With `replace` the folder may have contents: its database is replaced and kept under another name, files that are missing or damaged
    are put back, and everything else stays. The daemon moves what the restored database does not list to the trash. `entry` is written
    into the audit log of the restored database, where it has one.

    Raises:
        InUse: a daemon, or the worker of one, runs on the state folder.
        BadSetting: the state folder is not empty, a content of the backup is missing, or a newer version made it.
        DiskFull: there is no space for it; the same call continues once there is.
    """
    folder = BackupFolder(source)
    backup = folder.read(name)
    if backup.schema not in known_schemas():
        raise BadSetting(
            f"backup {backup.name} was made by a newer version of horizon-train ({backup.version}; format {backup.schema}, this one knows "
            f"up to {known_schemas()[-1]}); update horizon-train"
        )
    with (
        disk_full_reported(f"free space for {state_dir}, then restore again: it continues"),
        held_state_dir(state_dir, may_be_unfinished=True),
    ):
        _require_no_worker(state_dir)
        unfinished = state_dir / UNFINISHED_RESTORE_FILE
        found = sorted(entry.name for entry in state_dir.iterdir() if entry.name != "lock")
        if found and not replace and not unfinished.exists():
            raise BadSetting(
                f"state folder {state_dir} is not empty ({', '.join(found[:5])}{', ...' if len(found) > 5 else ''}); restore into an empty "
                "one with --state-dir, or put the backup's database and its files back into this one with --replace"
            )
        unfinished.write_text(f"{backup.name}\n", "ascii")
        sync_folder(state_dir)
        restoring = _Restoring(folder, backup, state_dir, entry, on_progress)
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
                    f"a worker of job {file.parent.parent.name} still runs and writes to {state_dir}; start the daemon and end it with "
                    "SIGINT or Ctrl-C, which checkpoints its jobs, or kill the worker"
                ) from error


class _Restoring:
    """One backup while it is put into a state folder."""

    def __init__(
        self,
        folder: BackupFolder,
        backup: Backup,
        state_dir: Path,
        entry: AuditEntry | None,
        on_progress: Callable[[str], None],
    ) -> None:
        self._entry = entry
        self._folder = folder
        self._backup = backup
        self._state_dir = state_dir
        self._on_progress = on_progress
        self.num_restored = self.num_kept = self.num_requeued = 0

    def files(self) -> None:
        """Put everything back but the database."""
        checkpoints: dict[str, list[Entry]] = {}
        wanted: list[Entry] = []
        for entry in self._backup.entries:
            parts = PurePosixPath(entry.path).parts
            if parts[0] == "jobs" and len(parts) > _CHECKPOINT_DEPTH:
                checkpoints.setdefault("/".join(parts[:_CHECKPOINT_DEPTH]), []).append(entry)
            elif entry.path != DATABASE_ENTRY and not self._keeps(entry, parts):
                wanted.append(entry)
        whole = [inner for inner in checkpoints if is_complete(self._state_dir / inner)]
        self.num_kept += sum(len(checkpoints.pop(inner)) for inner in whole)
        self._require_space([*wanted, *(entry for entries in checkpoints.values() for entry in entries)])
        # Contents before the models that are made of them.
        for entry in sorted(wanted, key=lambda entry: entry.path):
            self._put(entry)
        for inner, entries in checkpoints.items():
            self._on_progress(f"{inner}, {size_text(sum(entry.size_bytes for entry in entries))}")
            self._put_checkpoint(self._state_dir / inner, inner, entries)
        for place in {(self._state_dir / entry.path).parent for entry in wanted}:
            sync_folder(place)

    def database(self) -> Path | None:
        """Put the database in place; return the new path of the one that was there."""
        partial = self._state_dir / f".{DATABASE_ENTRY}{PARTIAL_SUFFIX}"
        partial.unlink(missing_ok=True)
        [entry] = [entry for entry in self._backup.entries if entry.path == DATABASE_ENTRY]
        self._copy(entry, partial)
        with opened_file(partial) as database:
            identity = database.identity
        made = datetime.datetime.strptime(self._backup.name[:16], "%Y%m%dT%H%M%SZ")
        message = f"the node was restored from a backup of {made:%Y-%m-%d %H:%M:%S} UTC; it continues from its newest checkpoint"
        if self._entry is not None:
            insert_entry(partial, self._entry, is_in_place=False)
        self.num_requeued = requeue_resident(partial, self._has_reports, message)
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

    def _keeps(self, entry: Entry, parts: tuple[str, ...]) -> bool:
        """Whether the file that is there stays: it is whole, or nobody can say what it should be."""
        place = self._state_dir / entry.path
        if parts[0] == "models":
            blob = self._state_dir / "blobs" / entry.sha256[:2] / entry.sha256
            stays = place.exists() and blob.exists() and place.samefile(blob)
        elif parts[0] == "blobs":
            stays = place.exists() and place.stat().st_size == entry.size_bytes and _sha256(place) == entry.sha256
        else:  # a log that has grown, a certificate that clients trust
            stays = place.exists()
        self.num_kept += stays
        return stays

    def _require_space(self, entries: Iterable[Entry]) -> None:
        needed = sum(entry.size_bytes for entry in entries if not entry.path.startswith("models/"))
        free = shutil.disk_usage(self._state_dir).free
        self._on_progress(f"{size_text(needed)} to restore, {size_text(free)} free")
        if needed > free:
            raise DiskFull(
                f"the backup needs {size_text(needed)} in {self._state_dir}, which has {size_text(free)} free; free space there"
            )

    def _put(self, entry: Entry) -> None:
        place = self._state_dir / entry.path
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The same name each time: a restore that continues a killed one removes what that one has left.
        partial = place.with_name(f".{entry.sha256}{PARTIAL_SUFFIX}")
        partial.unlink(missing_ok=True)
        if entry.path.startswith("models/"):
            os.link(self._state_dir / "blobs" / entry.sha256[:2] / entry.sha256, partial)
        else:
            self._copy(entry, partial)
        partial.replace(place)
        self.num_restored += 1

    def _put_checkpoint(self, target: Path, inner: str, entries: list[Entry]) -> None:
        # What is there is not a whole checkpoint.
        shutil.rmtree(target, ignore_errors=True)
        with durable_folder(target, needed_bytes=sum(entry.size_bytes for entry in entries)) as folder:
            for entry in entries:
                place = folder / PurePosixPath(entry.path).relative_to(inner)
                place.parent.mkdir(parents=True, exist_ok=True)
                self._copy(entry, place)
        self.num_restored += len(entries)

    def _copy(self, entry: Entry, target: Path) -> None:
        try:
            found, _ = copy_hashed(self._folder.content(entry.sha256), target)
        except FileNotFoundError as error:
            raise BadSetting(f"backup {self._backup.name} lacks the content of {entry.path}; {_ANOTHER}") from error
        if found != entry.sha256:
            target.unlink()
            raise BadSetting(f"backup {self._backup.name} has a damaged content of {entry.path}; {_ANOTHER}")
        # Contents are read-only: folders of models are hard links to them.
        target.chmod(0o444 if entry.path.startswith("blobs/") else entry.mode)


_ANOTHER = "use another backup with --backup ('horizond check --backup-dir DIR --full' finds what is damaged)"


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

"""Makes a backup of a state folder, also while the daemon runs."""

from __future__ import annotations

import datetime
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from horizon_server.blobs.parts import disk_full_reported
from horizon_server.db.database_file import PushedFiles, copy_database, opened_file
from horizon_server.durable import PARTIAL_SUFFIX
from horizon_server.errors import BadSetting, DiskFull, InvalidModel
from horizon_server.jobs.folders import JobFolders
from horizon_server.maintenance.backup_folder import DATABASE_ENTRY, Backup, BackupFolder, Content, Damaged, Entry
from horizon_server.planning.machine import RATES_FILE
from horizon_server.records.job import CheckpointRecord
from horizon_server.store.manifest import read_manifest
from horizon_server.texts import size_text
from horizon_server.version import VERSION

CHECKPOINTS = ("none", "newest", "all")

# How often the database is copied again because a content that it lists was deleted meanwhile.
_MAX_ROUNDS = 5
# Left for the list of files, and for what the file system needs itself.
_SPARE_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class BackupResult:
    """A backup that was made, what had to be copied for it, and the bytes of older backups that were removed."""

    backup: Backup
    num_copied: int
    copied_bytes: int
    removed_bytes: int


def make_backup(
    state_dir: Path,
    target: Path,
    *,
    checkpoints: str = "newest",
    keep: int = 7,
    hard_links: bool = False,
    on_progress: Callable[[str], None] = lambda _: None,
) -> BackupResult:
    """Back up the state folder into the folder `target`, and remove all but the newest `keep` backups there.

    Raises:
        BadSetting: `target` is in the state folder or cannot be written, or the state folder has no readable database.
        DiskFull: `target` has no space for what is to be copied; what was copied stays for the next try.
        InUse: another backup into `target` is being made.
    """
    assert checkpoints in CHECKPOINTS and keep >= 1
    if target.absolute().resolve().is_relative_to(state_dir.absolute().resolve()):
        raise BadSetting(
            f"backup folder {target} is inside the state folder {state_dir}; choose one outside, best on another disk"
        )
    folder = BackupFolder(target)
    # Before the folder is made: a wrong --state-dir must leave nothing.
    with opened_file(state_dir / DATABASE_ENTRY):
        pass
    with (
        folder.held(),
        disk_full_reported(f"free space for {target}, then back up again: it continues with what is copied"),
    ):
        return _Making(state_dir, folder, checkpoints, hard_links, on_progress).make(keep)


class _Making:
    """One backup while it is made."""

    def __init__(
        self,
        state_dir: Path,
        folder: BackupFolder,
        checkpoints: str,
        hard_links: bool,
        on_progress: Callable[[str], None],
    ) -> None:
        self._state_dir = state_dir
        self._folder = folder
        self._checkpoints = checkpoints
        self._hard_links = hard_links
        self._on_progress = on_progress
        names = folder.names()
        # What has neither another size nor another time than in the last backup is not read again.
        self._earlier = {entry.path: entry for entry in folder.read(names[-1]).entries} if names else {}
        self._entries: dict[str, Entry] = {}
        self._problems: list[str] = []
        self._num_copied = self._copied_bytes = 0

    def make(self, keep: int) -> BackupResult:
        """Copy everything, write the list, and remove what is older than the newest `keep`."""
        copy = self._folder.path / f".database{PARTIAL_SUFFIX}"
        try:
            pushed = self._copy_database(copy)
            self._require_space(pushed)
            self._copy_contents(pushed)
            self._copy_jobs()
            # The database last: it then knows at least what the checkpoints are of, as after a crash of the daemon.
            missing: list[str] = []
            for _ in range(_MAX_ROUNDS):
                pushed = self._copy_database(copy)
                before, missing = missing, self._copy_contents(pushed)
                # Missing twice is not deleted meanwhile: it is lost.
                if missing == before:
                    break
            self._problems += missing
            self._copy_small_files(copy)
            with opened_file(copy) as database:
                schema = database.schema
                self._problems += [f"database: {text}" for text in database.damage()]
        finally:
            copy.unlink(missing_ok=True)
        backup = Backup(
            name=_free_name(self._folder), version=VERSION, schema=schema, checkpoints=self._checkpoints,
            entries=tuple(self._entries[path] for path in sorted(self._entries)), problems=tuple(self._problems),
        )  # fmt: skip
        self._folder.write(backup)
        # After problems the older backups may be the only good ones.
        old = [] if backup.problems else self._folder.names()[:-keep]
        removed_bytes = self._folder.remove(old) if old else 0
        return BackupResult(
            backup=backup, num_copied=self._num_copied, copied_bytes=self._copied_bytes, removed_bytes=removed_bytes
        )

    def _copy_database(self, copy: Path) -> list[PushedFiles]:
        # With the journal that a killed backup may have left: SQLite would apply it to the new copy.
        for leftover in self._folder.path.glob(f"{copy.name}*"):
            leftover.unlink()
        copy_database(self._state_dir / DATABASE_ENTRY, copy)
        with opened_file(copy) as database:
            return [pushed for pushed in database.pushed() if pushed.is_ready]

    def _require_space(self, pushed: list[PushedFiles]) -> None:
        new = {
            file.sha256: file.size_bytes
            for each in pushed
            for file in each.files
            if not self._folder.has(file.sha256, file.size_bytes)
        }
        for _, record in self._chosen_checkpoints():
            new |= {
                file.sha256: file.size_bytes
                for file in record.files
                if not self._folder.has(file.sha256, file.size_bytes)
            }
        database_bytes = 2 * (self._state_dir / DATABASE_ENTRY).stat().st_size
        needed = database_bytes + _SPARE_BYTES + (0 if self._hard_links else sum(new.values()))
        free = shutil.disk_usage(self._folder.path).free
        self._on_progress(f"{size_text(sum(new.values()))} to copy, {size_text(free)} free")
        if needed > free:
            raise DiskFull(
                f"the backup needs {size_text(needed)} in {self._folder.path}, which has {size_text(free)} free; free space there, or back "
                "up fewer checkpoints with --with-checkpoints newest or none"
            )

    def _copy_contents(self, pushed: list[PushedFiles]) -> list[str]:
        """Copy what datasets and models are made of; return what is missing. The list of entries has exactly those of `pushed` then."""
        missing = []
        for path in [path for path in self._entries if path.startswith(("blobs/", "models/"))]:
            del self._entries[path]
        for each in pushed:
            for file in each.files:
                blob = f"blobs/{file.sha256[:2]}/{file.sha256}"
                if blob not in self._entries and (
                    problem := self._copy_never_changing(blob, file.sha256, file.size_bytes)
                ):
                    missing.append(f"{blob}, of {each}: {problem}")
                if each.kind == "model" and blob in self._entries:
                    path = f"models/{each.resource_id}/{file.path}"
                    self._entries[path] = _renamed(self._entries[blob], path)
        return missing

    def _copy_never_changing(self, path: str, sha256: str, size_bytes: int) -> str | None:
        """Copy a file whose content is known; return why the backup has no good copy of it, or None."""
        source = self._state_dir / path
        try:
            found = source.stat()
            if found.st_size != size_bytes:
                raise Damaged(f"has {found.st_size} bytes, not {size_bytes}")
            self._enter(path, self._folder.store(source, expected=sha256, hard_link=self._hard_links), found)
        except (FileNotFoundError, Damaged) as error:
            why = str(error) if isinstance(error, Damaged) else "is missing"
            if not self._folder.has(sha256, size_bytes):
                return why
            self._entries[path] = Entry(path=path, sha256=sha256, size_bytes=size_bytes, mode=0o600, mtime_ns=0)
            return f"{why}; this backup has it from an earlier one"
        return None

    def _chosen_checkpoints(self) -> Iterator[tuple[Path, CheckpointRecord]]:
        folders = JobFolders(self._state_dir)
        for job in sorted((self._state_dir / "jobs").glob("*")):
            checkpoints = folders.checkpoints(job.name)
            try:
                records = [] if self._checkpoints == "none" else checkpoints.all()
            except (InvalidModel, OSError):  # one was deleted while they were listed
                records = checkpoints.all()
            for record in records:
                if self._checkpoints == "all" or record.last or record.best:
                    yield checkpoints.of_step(record.step), record

    def _copy_jobs(self) -> None:
        for folder, record in self._chosen_checkpoints():
            self._on_progress(f"checkpoint of step {record.step} of {record.job_id}, {size_text(record.size_bytes)}")
            self._problems += self._copy_checkpoint(folder, str(folder.relative_to(self._state_dir)))
        for log in sorted((self._state_dir / "jobs").glob("*/attempt-*/worker.log")):
            self._copy_changing(log)

    def _copy_checkpoint(self, folder: Path, inner: str) -> list[str]:
        """Copy one checkpoint whole or not at all; return what is wrong with it."""
        # Twice, as it may be deleted, or reduced to its weights, while it is read.
        for _ in range(2):
            try:
                known = read_manifest(folder).files
                problems = [
                    f"{inner}/{name}: {problem}"
                    for name, file in known.items()
                    if (problem := self._copy_never_changing(f"{inner}/{name}", file.sha256, file.size_bytes))
                ]
                for path in folder.rglob("*"):
                    if path.is_file() and str(path.relative_to(folder)) not in known:
                        self._copy_changing(path)
                if all(f"{inner}/{name}" in self._entries for name in known) and read_manifest(folder).files == known:
                    return problems
            except (InvalidModel, FileNotFoundError):
                problems = []
            for name in [name for name in self._entries if name.startswith(f"{inner}/")]:
                del self._entries[name]
        return problems

    def _copy_small_files(self, database: Path) -> None:
        for source in (self._state_dir / RATES_FILE, *sorted((self._state_dir / "tls").glob("*"))):
            self._copy_changing(source)
        self._enter(DATABASE_ENTRY, self._folder.store(database), database.stat())

    def _copy_changing(self, source: Path) -> None:
        path = str(source.relative_to(self._state_dir))
        try:
            found, earlier = source.stat(), self._earlier.get(path)
            is_unchanged = earlier and (earlier.size_bytes, earlier.mtime_ns) == (found.st_size, found.st_mtime_ns)
            if earlier and is_unchanged and self._folder.has(earlier.sha256, earlier.size_bytes):
                self._entries[path] = earlier
                return
            self._enter(path, self._folder.store(source), found)
        except FileNotFoundError:
            return  # deleted meanwhile, or this folder never had it

    def _enter(self, path: str, content: Content, found: os.stat_result) -> None:
        """Take a file into the list. `found` is of before it was read, so that what is written meanwhile counts as a change."""
        self._entries[path] = Entry(
            path=path,
            sha256=content.sha256,
            size_bytes=content.size_bytes,
            mode=found.st_mode & 0o777,
            mtime_ns=found.st_mtime_ns,
        )
        self._num_copied += content.is_new
        self._copied_bytes += content.size_bytes if content.is_new else 0


def _renamed(entry: Entry, path: str) -> Entry:
    return Entry(path=path, sha256=entry.sha256, size_bytes=entry.size_bytes, mode=entry.mode, mtime_ns=entry.mtime_ns)


def _free_name(folder: BackupFolder) -> str:
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    names, number = set(folder.names()), 0
    while (name := f"{stamp}-{number}" if number else stamp) in names:
        number += 1
    return name

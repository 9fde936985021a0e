"""Backups: a folder that restic, borg or rsync can take as it is, made while the daemon runs (ADR 0014).

It has a consistent copy of the database, hard links to contents and checkpoints, which nobody writes to again, and
copies of the small files that may change. What the daemon deletes afterwards stays in it. `backup.json` comes last and
lists every file with its sha256, so a backup that was interrupted is none.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from horizon_server.blobs.parts import disk_full_reported
from horizon_server.codec import from_plain, to_plain
from horizon_server.db.database_file import PushedFiles, copy_database, known_schemas, opened_file
from horizon_server.durable import replace_file, sync_file
from horizon_server.errors import BadSetting, InUse, InvalidModel, NotFound
from horizon_server.jobs.folders import CheckpointFolder, JobFolders
from horizon_server.planning.machine import RATES_FILE
from horizon_server.store.manifest import MANIFEST_FILE, FileRecord, read_manifest, record_file
from horizon_server.version import VERSION

CHECKPOINTS = ("none", "newest", "all")
DATABASE_ENTRY = "horizon.db"
BACKUP_FILE = "backup.json"
BACKUP_IN_STATE = "backup"
"""The name of the only folder inside the state folder that a backup may be made in."""

# Says that an emptied folder, or one with a half backup, is for backups.
_UNFINISHED_FILE = "backup-unfinished"
_LINK = ".link"
# How often what is deleted or pushed meanwhile is looked at again.
_MAX_ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class Backup:
    """When and by which version a backup was made, its files by path, and what was wrong with the state folder then."""

    made: str
    version: str
    schema: str
    files: Mapping[str, FileRecord]
    problems: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of all its files."""
        return sum(record.size_bytes for record in self.files.values())


def make_backup(state_dir: Path, target: Path, *, checkpoints: str = "newest") -> Backup:
    """Make the folder `target` a backup of the state folder, in place of an earlier one.

    Raises:
        BadSetting: `target` cannot be used for it, or the state folder has no readable database.
        DiskFull: there is no space for the copy of the database and the logs.
        InUse: another backup into `target` is being made.
    """
    assert checkpoints in CHECKPOINTS
    # Before the folder is made: a wrong --state-dir must leave nothing.
    with opened_file(state_dir / DATABASE_ENTRY):
        pass
    with _held_empty(target, state_dir), disk_full_reported(f"free space for {target}, then back up again"):
        backup = _Making(state_dir, target).make(checkpoints)
        replace_file(target / BACKUP_FILE, json.dumps(to_plain(backup), indent=1) + "\n")
        (target / _UNFINISHED_FILE).unlink()
    return backup


def read_backup(source: Path) -> Backup:
    """Return what a backup lists. Raises NotFound: `source` has none; BadSetting: its list is damaged, or a newer
    version made it."""
    file = source / BACKUP_FILE
    if not file.is_file():
        raise NotFound(
            f"{source} holds no complete backup: it has no {BACKUP_FILE}; give a folder that 'horizond backup' has made"
        )
    try:
        backup = from_plain(Backup, json.loads(file.read_bytes()))
    except (OSError, ValueError, RecursionError) as error:
        raise BadSetting(
            f"{file} cannot be read as the list of a backup ({type(error).__name__}); {_ANOTHER}"
        ) from error
    for path in backup.files:
        # Paths are joined to the state folder.
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise BadSetting(f"{file} names {path!r:.100}, which is outside the state folder; {_ANOTHER}")
    if DATABASE_ENTRY not in backup.files:
        raise BadSetting(f"{file} names no {DATABASE_ENTRY}; {_ANOTHER}")
    if backup.schema not in known_schemas():
        raise BadSetting(
            f"{source} was made by a newer version of horizon-train ({backup.version}; format {backup.schema}, this "
            f"one knows up to {known_schemas()[-1]}); update horizon-train"
        )
    return backup


_ANOTHER = "take the folder from another copy"


def file_problem(path: Path, record: FileRecord, *, full: bool) -> str | None:
    """Return what is wrong with a file, or None; without `full` its size is compared only."""
    try:
        size = path.stat().st_size
        if size != record.size_bytes:
            return f"has {size} bytes, not {record.size_bytes}"
        if full and record_file(path) != record:
            return "has other bytes than when it was written"
    except FileNotFoundError:
        return "is missing"
    return None


class _Making:
    """One backup while it is made."""

    def __init__(self, state_dir: Path, target: Path) -> None:
        self._state_dir = state_dir
        self._target = target
        self._files: dict[str, FileRecord] = {}
        self._problems: list[str] = []

    def make(self, which: str) -> Backup:
        # The database after the checkpoints: it then knows at least what they are of, as after a crash of the daemon.
        if which != "none":
            for job_id in sorted(JobFolders(self._state_dir).ids()):
                self._link_checkpoints(JobFolders(self._state_dir).checkpoints(job_id), which)
        for source in (
            self._state_dir / RATES_FILE,
            *sorted((self._state_dir / "tls").glob("*")),
            *sorted((self._state_dir / "jobs").glob("[!.]*/attempt-*/worker.log")),
        ):
            self._copy(str(source.relative_to(self._state_dir)), self._files)
        # A content that is deleted after the database was copied is missing: a new copy does not name it. Missing twice
        # is lost.
        missing: list[str] = []
        for _ in range(_MAX_ROUNDS):
            pushed = self._copy_database()
            contents, before, missing = {}, missing, []
            for each in pushed:
                for file in each.files:
                    blob = f"blobs/{file.sha256[:2]}/{file.sha256}"
                    contents[blob] = FileRecord(size_bytes=file.size_bytes, sha256=file.sha256)
                    if problem := self._link(blob, contents[blob]):
                        missing.append(f"{blob}, of {each}: {problem}")
                        del contents[blob]
            if missing == before:
                break
        self._files |= contents
        self._files[DATABASE_ENTRY] = record_file(self._target / DATABASE_ENTRY)
        with opened_file(self._target / DATABASE_ENTRY) as database:
            schema, damage = database.schema, [f"database: {text}" for text in database.damage()]
        return Backup(
            made=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
            version=VERSION,
            schema=schema,
            files=dict(sorted(self._files.items())),
            problems=(*self._problems, *missing, *damage),
        )

    def _link_checkpoints(self, checkpoints: CheckpointFolder, which: str) -> None:
        for _ in range(_MAX_ROUNDS):
            try:
                for record in checkpoints.all():
                    if which == "all" or record.last or record.best or record.kept:
                        self._link_checkpoint(checkpoints, record.step)
                return
            except (NotFound, InvalidModel, FileNotFoundError):
                continue  # one was deleted meanwhile; another may be the newest now
        self._problems.append(f"{checkpoints.path.relative_to(self._state_dir)}: changes all the time; back up again")

    def _link_checkpoint(self, checkpoints: CheckpointFolder, step: int) -> None:
        folder = checkpoints.of_step(step)
        inner = str(folder.relative_to(self._state_dir))
        # All of it or nothing, and nobody removes it or its optimizer meanwhile. Its list first, which may get another
        # one's place.
        with checkpoints.reading(step):
            found: dict[str, FileRecord] = {}
            self._copy(f"{inner}/{MANIFEST_FILE}", found)
            for name, record in read_manifest(self._target / inner).files.items():
                found[f"{inner}/{name}"] = record
                if problem := self._link(f"{inner}/{name}", record):
                    raise FileNotFoundError(f"{inner}/{name} {problem}")
        self._files |= found

    def _link(self, inner: str, record: FileRecord) -> str | None:
        """Give a file that nobody writes to again a name in the backup; return why that is not the file of the record,
        or None."""
        place = self._target / inner
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(self._state_dir / inner, place)
        except FileNotFoundError:
            return "is missing"
        except FileExistsError:
            pass  # of an earlier round, or another dataset's too
        return file_problem(place, record, full=False)

    def _copy(self, inner: str, found: dict[str, FileRecord]) -> None:
        place = self._target / inner
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            # With its time, by which copying programs see what is unchanged.
            shutil.copy2(self._state_dir / inner, place)
        except FileNotFoundError:
            return  # deleted meanwhile, or this folder never had it
        sync_file(place)
        found[inner] = record_file(place)

    def _copy_database(self) -> list[PushedFiles]:
        copy = self._target / DATABASE_ENTRY
        copy.unlink(missing_ok=True)
        copy_database(self._state_dir / DATABASE_ENTRY, copy)
        sync_file(copy)
        with opened_file(copy) as database:
            return [pushed for pushed in database.pushed() if pushed.is_ready]


@contextmanager
def _held_empty(target: Path, state_dir: Path) -> Iterator[None]:
    """Empty the folder of an earlier backup, make it private, and hold it against other backups into it."""
    try:
        _require_usable(target, state_dir)
        descriptor = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise BadSetting(f"backup folder {target} cannot be used: {error.strerror}; choose another") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InUse(f"another backup is being made in {target}; wait for it to end") from error
        # Keys, tokens' hashes and users' data are in here.
        target.chmod(0o700)
        (target / _UNFINISHED_FILE).touch(mode=0o600)
        # Its list first: without it, what is left is no backup.
        for entry in sorted(target.iterdir(), key=lambda entry: entry.name != BACKUP_FILE):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name != _UNFINISHED_FILE:
                entry.unlink()
        yield
    finally:
        os.close(descriptor)


def _require_usable(target: Path, state_dir: Path) -> None:
    place, state = target.absolute().resolve(), state_dir.absolute().resolve()
    inside = state / BACKUP_IN_STATE
    if place.is_relative_to(state) and not place.is_relative_to(inside):
        raise BadSetting(
            f"backup folder {target} is inside the state folder {state_dir}; choose {inside}, or one outside"
        )
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    names = {entry.name for entry in target.iterdir()}
    if names and not names & {BACKUP_FILE, _UNFINISHED_FILE, _LINK}:
        raise BadSetting(f"backup folder {target} has contents and is no backup; choose an empty one")
    # Tried, as nothing else shows it: there are no links between two mounts of one file system.
    link = target / _LINK
    link.unlink(missing_ok=True)
    try:
        os.link(state_dir / DATABASE_ENTRY, link)
    except OSError as error:
        raise BadSetting(
            f"backup folder {target} cannot have hard links to the files of {state_dir} ({error.strerror}); choose one "
            f"on the same file system, such as {inside}, and copy that with restic, borg or rsync"
        ) from error
    link.unlink()

"""The folder that backups are kept in: what was backed up is a list of files, and contents are stored once for all backups.

`DIR/<time>.json` lists the files of one backup; `DIR/contents/<aa>/<sha256>` is a content. A list is written last, so a backup that was
interrupted does not exist, and the next one continues with what it has copied.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from horizon_server.durable import PARTIAL_SUFFIX, replace_file, sync_folder
from horizon_server.errors import BadSetting, InUse, NotFound

FORMAT_VERSION = 1
DATABASE_ENTRY = "horizon.db"

_NAME = re.compile(r"\d{8}T\d{6}Z(-\d+)?")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_BLOCK_BYTES = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One file: its path in the state folder, and its content. `mtime_ns` says whether it has changed since, without reading it."""

    path: str
    sha256: str
    size_bytes: int
    mode: int
    mtime_ns: int


@dataclass(frozen=True, kw_only=True)
class Backup:
    """One backup: when and by which version it was made, what it holds, and what was wrong with the state folder then."""

    name: str
    version: str
    schema: str
    checkpoints: str
    entries: tuple[Entry, ...]
    problems: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of all its files; backups share what has not changed."""
        return sum(entry.size_bytes for entry in self.entries)


@dataclass(frozen=True, kw_only=True)
class Content:
    """A content that was stored: its hash, its size, and whether it was copied now or was there already."""

    sha256: str
    size_bytes: int
    is_new: bool


class Damaged(Exception):
    """A file does not have the content that its name or its list says. For callers in this package."""


class BackupFolder:
    """The backups below `path`. Blocking."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._contents = path / "contents"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Make the folder private and hold it against other backups into it. Raises InUse; BadSetting: it cannot be made or written."""
        try:
            self._contents.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Keys, tokens' hashes and users' data are in here.
            self.path.chmod(0o700)
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise BadSetting(f"backup folder {self.path} cannot be used: {error.strerror}; choose another") from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise InUse(f"another backup is being made in {self.path}; wait for it to end") from error
            for leftover in self._contents.glob(f".*{PARTIAL_SUFFIX}"):  # of a backup that was killed
                leftover.unlink()
            yield
        finally:
            os.close(descriptor)

    def names(self) -> list[str]:
        """Return the names of all backups, oldest first."""
        found = self.path.glob("*.json") if self.path.is_dir() else ()
        return sorted((file.stem for file in found if _NAME.fullmatch(file.stem)), key=_age)

    def read(self, name: str | None = None) -> Backup:
        """Return the newest backup, or the named one. Raises NotFound; BadSetting: its list is damaged, or a newer version made it."""
        names = self.names()
        if not names:
            raise NotFound(f"{self.path} has no backup; give the folder that 'horizond backup' was given")
        if name is not None and name not in names:
            raise NotFound(f"{self.path} has no backup {name}; it has: {', '.join(names)}")
        file = self.path / f"{name or names[-1]}.json"
        try:
            document: dict[str, Any] = json.loads(file.read_bytes())
            if document.pop("format_version") != FORMAT_VERSION:
                raise BadSetting(f"{file} was made by a newer version of horizon-train; update it")
            entries = tuple(Entry(**entry) for entry in document.pop("files"))
            backup = Backup(**document | {"entries": entries, "problems": tuple(document["problems"])})
        except BadSetting:
            raise
        except RecursionError as error:
            raise BadSetting(
                f"{file} cannot be read (it is nested too deep); use another backup with --backup"
            ) from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadSetting(f"{file} cannot be read ({error}); use another backup with --backup") from error
        for entry in backup.entries:
            # Paths are joined to the state folder, hashes to the folder of contents.
            if Path(entry.path).is_absolute() or ".." in Path(entry.path).parts or not _SHA256.fullmatch(entry.sha256):
                raise BadSetting(
                    f"{file} names {entry.path!r:.100}, which is outside the state folder; use another backup"
                )
        return backup

    def content(self, sha256: str) -> Path:
        """Return the place of a content, whether or not it is there."""
        return self._contents / sha256[:2] / sha256

    def has(self, sha256: str, size_bytes: int) -> bool:
        """Whether a content is here, by its size; its bytes are not read."""
        with contextlib.suppress(OSError):
            return self.content(sha256).stat().st_size == size_bytes
        return False

    def store(self, source: Path, *, expected: str | None = None, hard_link: bool = False) -> Content:
        """Store the content of a file, durably; `hard_link` stores a name of the same file, for files that never change.

        Raises:
            FileNotFoundError: the file is gone.
            Damaged: its sha256 is not `expected`.
        """
        if expected is not None and self.has(expected, size := source.stat().st_size):
            return Content(sha256=expected, size_bytes=size, is_new=False)
        partial = self._contents / f".{os.getpid()}{PARTIAL_SUFFIX}"
        partial.unlink(missing_ok=True)
        try:
            if hard_link and expected is not None:
                _link(source, partial)
                found, size = expected, partial.stat().st_size
            else:
                found, size = copy_hashed(source, partial)
                if expected not in (None, found):
                    raise Damaged(f"has sha256 {found}, not {expected}")
            target, is_new = self.content(found), not self.has(found, size)
            target.parent.mkdir(mode=0o700, exist_ok=True)
            partial.replace(target)
            sync_folder(target.parent)
        finally:
            partial.unlink(missing_ok=True)
        return Content(sha256=found, size_bytes=size, is_new=is_new)

    def write(self, backup: Backup) -> None:
        """Write the list of a backup, with which it exists."""
        sync_folder(self._contents)
        document = {"format_version": FORMAT_VERSION} | asdict(backup)
        document["files"] = document.pop("entries")
        replace_file(self.path / f"{backup.name}.json", json.dumps(document, indent=1) + "\n")

    def remove(self, names: Sequence[str]) -> int:
        """Remove backups, and the contents that no other one needs. Return how many bytes that were."""
        needed = {entry.sha256 for name in self.names() if name not in names for entry in self.read(name).entries}
        for name in names:
            (self.path / f"{name}.json").unlink()
        sync_folder(self.path)
        num_bytes = 0
        for content in self._contents.glob("*/*"):
            if content.name not in needed:
                num_bytes += content.stat().st_size
                content.unlink()
        return num_bytes


def copy_hashed(source: Path, target: Path) -> tuple[str, int]:
    """Copy a file durably; return the sha256 of what was copied and its size."""
    digest, size = hashlib.sha256(), 0
    with source.open("rb") as reader, target.open("xb") as writer:
        while block := reader.read(_BLOCK_BYTES):
            digest.update(block)
            size += writer.write(block)
        writer.flush()
        os.fsync(writer.fileno())
    return digest.hexdigest(), size


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        raise BadSetting(
            f"{target.parent} is on another file system than the state folder, so it cannot have hard links to its files; leave out "
            "--hard-links"
        ) from error


def _age(name: str) -> tuple[str, int]:
    # Of several backups of one second, the later ones have a number.
    time, _, number = name.partition("-")
    return time, int(number or 0)

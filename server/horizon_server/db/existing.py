"""A database that is there already, for commands: any version's is read, only the one of this version is changed.

Only `horizond serve` migrates, after a copy: a command of a newer version leaves the way back open.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import shutil
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from horizon_server.db.audit import printable
from horizon_server.db.database import BUSY_TIMEOUT_MS, Database, migrate
from horizon_server.db.database_file import copy_database, known_schemas, opened_file
from horizon_server.durable import PARTIAL_SUFFIX, sync_file, sync_folder
from horizon_server.errors import BadSetting, DiskFull
from horizon_server.records.audit import AuditEntry
from horizon_server.texts import size_text

_log = logging.getLogger(__name__)

_COPY_NAME = "before-migration-{schema}.db"
# Of the folders of copies for reading, below that for temporary files; the process id follows.
_COPY_PREFIX = "horizond-read-"
# Of as many earlier schemas.
MAX_COPIES = 3


@asynccontextmanager
async def database_to_read(path: Path, *, always_copy: bool = False) -> AsyncIterator[Database]:
    """Open the database at `path` for a command that changes nothing.

    One of an earlier version is migrated as a copy, which is gone at the end of the block; where the command is killed,
    the next one or the daemon's next start removes it. With `always_copy` nothing at all is written.

    Raises BadSetting: there is no database, or a newer version made it.
    """
    if await asyncio.to_thread(_is_newest, path) and not always_copy:
        async with _opened(path) as database:
            yield database
        return
    await asyncio.to_thread(remove_left_copies)
    with tempfile.TemporaryDirectory(prefix=f"{_COPY_PREFIX}{os.getpid()}-") as folder:
        copy = Path(folder) / path.name
        await asyncio.to_thread(copy_database, path, copy)
        await asyncio.to_thread(migrate, copy)
        async with _opened(copy) as database:
            yield database


@asynccontextmanager
async def database_to_change(path: Path) -> AsyncIterator[Database]:
    """Open the database at `path` for a command that changes it. Raises BadSetting: there is none, or another version
    made it."""
    if not await asyncio.to_thread(_is_newest, path):
        raise _of_an_earlier_version(path)
    async with _opened(path) as database:
        yield database


def remove_left_copies() -> None:
    """Remove the copies that commands which were killed while they read one have left. Blocking."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_COPY_PREFIX}*-*"):
        pid = folder.name.removeprefix(_COPY_PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):  # another command removes it too
            is_own = not folder.is_symlink() and folder.is_dir() and folder.stat().st_uid == os.geteuid()
            if is_own and pid.isdecimal() and not Path("/proc", pid).exists():
                shutil.rmtree(folder, ignore_errors=True)


def keep_before_migration(path: Path) -> Path | None:
    """Copy a database that is about to be migrated, durably, and return the copy; None where there is nothing to
    migrate.

    The copies of the newest few schemas are kept.

    Raises:
        BadSetting: it cannot be read, or a newer version made it.
        DiskFull: there is no space for the copy.
    """
    if not path.exists() or path.stat().st_size == 0 or _is_newest(path):
        return None
    with opened_file(path) as file:
        schema = file.schema
    copy = path.with_name(_COPY_NAME.format(schema=schema))
    partial = path.with_name(f".{copy.name}{PARTIAL_SUFFIX}")
    needed, free = path.stat().st_size, shutil.disk_usage(path.parent).free
    if needed > free:
        raise DiskFull(
            f"the database is copied before it is migrated, which needs {size_text(needed)} in {path.parent}, which "
            f"has {size_text(free)} "
            "free; free space there, then start again"
        )
    for leftover in path.parent.glob(f"{partial.name}*"):  # of a daemon that was killed
        leftover.unlink()
    copy_database(path, partial)
    sync_file(partial)
    partial.replace(copy)
    sync_folder(path.parent)
    for old in sorted(path.parent.glob(_COPY_NAME.format(schema="*")))[:-MAX_COPIES]:
        old.unlink()
    return copy


def insert_entry(path: Path, entry: AuditEntry, *, is_in_place: bool = True) -> int:
    """Add an entry to the audit log of a database of any version; return its number, or 0 where there is no
    database."""
    values = printable(dataclasses.asdict(entry))
    del values["number"]
    names = ", ".join(f'"{name}"' for name in values)
    with _audit_of(path, entry) as database:
        if database is not None:
            if not is_in_place:
                # In memory: a journal file that a killed restore leaves would be applied to the next copy of this name.
                database.execute("PRAGMA journal_mode=MEMORY")
            query = f"INSERT INTO audit ({names}) VALUES ({', '.join('?' * len(values))})"
            return database.execute(query, list(values.values())).lastrowid or 0
    return 0


def complete_entry(path: Path, entry: AuditEntry) -> None:
    """Write how the change ended that `insert_entry` has given a number; without one, nothing is written."""
    values = printable({"outcome": entry.outcome, "detail": entry.detail})
    with _audit_of(path, entry) as database:
        if database is not None and entry.number:
            query = "UPDATE audit SET outcome = ?, detail = ? WHERE number = ?"
            database.execute(query, [*values.values(), entry.number])


@contextmanager
def _audit_of(path: Path, entry: AuditEntry) -> Iterator[sqlite3.Connection | None]:
    """A connection for the block, which is committed at its end; None where the database is missing."""
    if not path.exists():
        yield None
        return
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=BUSY_TIMEOUT_MS / 1000)) as database, database:
            yield database
    except sqlite3.Error as error:
        _log.error("the audit log cannot be written (%s): %s", error, entry)


@asynccontextmanager
async def _opened(path: Path) -> AsyncIterator[Database]:
    database = Database(path)
    try:
        yield database
    finally:
        await database.close()


def _is_newest(path: Path) -> bool:
    with opened_file(path) as file:
        return file.schema == known_schemas()[-1]


def _of_an_earlier_version(path: Path) -> BadSetting:
    with opened_file(path) as file:
        schema = file.schema
    return BadSetting(
        f"the database {path} is of an earlier version of horizon-train (format {schema}; this one's is "
        f"{known_schemas()[-1]}), and only "
        "'horizond serve' brings it to this one's; restart the daemon with this version first, or use the horizond of "
        "the version that runs"
    )

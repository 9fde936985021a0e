"""One SQLite file in WAL mode: opening it, migrating it, and giving out sessions."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import alembic.command
import alembic.config
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy import Connection, create_engine, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.pool import NullPool

from horizon_server.errors import BadSetting, DatabaseUnavailable, DiskFull

# How long a write waits for another process (`horizond user add`) to finish its own.
BUSY_TIMEOUT_MS = 10_000
# Reads at once. Each is a connection with a thread of its own; more of them only take processor time from the worker.
NUM_READERS = 4
# What SQLite answers where the disk has no room: for the journal, the file, or the index of the journal.
# A full disk stops readers too: they share the index.
_FULL = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE})


class Database:
    """The open database. Thread: belongs to one event loop."""

    def __init__(self, path: Path) -> None:
        # A connection of its own: no number of reads can keep the journal of a running job waiting.
        self._writer = self._engine(path, 1)
        self._reader = self._engine(path, NUM_READERS)
        self._write_sessions = async_sessionmaker(self._writer, expire_on_commit=False)
        self._read_sessions = async_sessionmaker(self._reader, expire_on_commit=False)
        self._writing = asyncio.Lock()
        # Reads wait here, in the order of their arrival, and not at the pool, which gives up after 30 s. How many a user may have
        # waiting is bounded above, by `services.accounts.UserTurns`.
        self._reading = asyncio.Semaphore(NUM_READERS)
        self._stopping: dict[asyncio.Future[Any], object] = {}

    @classmethod
    @asynccontextmanager
    async def opened(cls, path: Path) -> AsyncIterator[Database]:
        """Open it as `open` does, for a block."""
        database = await cls.open(path)
        try:
            yield database
        finally:
            await database.close()

    @classmethod
    async def open(cls, path: Path) -> Database:
        """Migrate the file at `path` to the newest schema, creating it when missing, and open it. Raises as `migrate` does."""
        await asyncio.to_thread(migrate, path)
        return cls(path)

    def _engine(self, path: Path, num_connections: int) -> AsyncEngine:
        engine = create_async_engine(f"sqlite+aiosqlite:///{path}", pool_size=num_connections, max_overflow=0)
        event.listen(engine.sync_engine, "connect", _configure)
        event.listen(engine.sync_engine, "begin", _begin)
        engine.sync_engine.dialect.do_terminate = self._stop_at_once  # type: ignore[method-assign, assignment]
        return engine

    @asynccontextmanager
    async def session(self) -> AsyncIterator[AsyncSession]:
        """A write transaction: committed at the end of the block, rolled back when it raises.

        Raises:
            DiskFull: when there is no space to write; nothing of the block is kept.
            DatabaseUnavailable: when it cannot be written for another reason, such as a long write of another process.
        """
        with _explained():
            async with self._writing, self._write_sessions() as session, session.begin():
                # BEGIN IMMEDIATE: a transaction never fails half way because another process wrote in between.
                await session.connection(execution_options={"immediate": True})
                yield session

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncSession]:
        """A read transaction: a consistent view that blocks no writer. Raises DiskFull or DatabaseUnavailable."""
        with _explained():
            async with self._reading, self._read_sessions() as session, session.begin():
                yield session

    async def close(self) -> None:
        """Give every connection back."""
        await self._reader.dispose()
        await self._writer.dispose()
        await asyncio.gather(*self._stopping, return_exceptions=True)

    def _stop_at_once(self, connection: DBAPIConnection) -> None:
        """Drop a connection whose caller was cancelled, as any client can do at any time, without waiting for it."""
        # SQLAlchemy would wait for a graceful close. Where that is cancelled too, it waits forever for a thread that has ended, and the
        # event loop waits for it at its end: a daemon that cannot stop.
        driver: Any = connection.driver_connection
        # First an end to its transaction: a closed connection keeps the lock of a write until the last cursor is collected, and the
        # traceback of the cancelled call holds on to one. Sent to the connection's thread without waiting for the answer.
        with contextlib.suppress(ValueError):  # it is closed already
            rollback = driver.rollback()
            rollback.send(None)
            rollback.close()
        stopped = driver.stop()
        if stopped is not None:
            self._stopping[stopped] = driver  # kept until its thread has closed it
            stopped.add_done_callback(self._stopping.pop)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except OperationalError as error:
        if getattr(error.orig, "sqlite_errorcode", None) in _FULL:
            raise DiskFull(
                "the node's disk is full, so the daemon cannot use its database; free space there, then try again",
                retry_after_s=60.0,
            ) from error
        raise DatabaseUnavailable(
            f"the daemon cannot use its database right now ({error.orig}); try again in a moment", retry_after_s=5.0
        ) from error


def _configure(connection: DBAPIConnection, _record: object) -> None:
    connection.isolation_level = None  # SQLAlchemy's `begin` event sends BEGIN, not sqlite3
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON", f"busy_timeout={BUSY_TIMEOUT_MS}"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin(connection: Connection) -> None:
    immediate = connection.get_execution_options().get("immediate", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


def migrate(path: Path, revision: str = "head") -> None:
    """Bring the file at `path` to the newest schema, or to the named one. Of two processes that do so at the same time one waits.

    Raises:
        BadSetting: when the file cannot be made, is not a database, or was made by a newer version.
        DiskFull: when there is no space for it.
    """
    engine = create_engine(f"sqlite:///{path}", poolclass=NullPool)
    event.listen(engine, "connect", _configure)
    event.listen(engine, "begin", _begin)
    config = alembic.config.Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    try:
        with _explained():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)  # SQLite gives its other files the same mode
            # One transaction over all migrations: a process that is killed half way leaves the old schema whole.
            with engine.connect().execution_options(immediate=True) as connection, connection.begin():
                attributes: dict[str, Any] = config.attributes
                attributes["connection"] = connection
                alembic.command.upgrade(config, revision)
    except CommandError as error:
        newest = ScriptDirectory.from_config(config).get_current_head()
        raise BadSetting(
            f"the database {path} was made by a newer version of horizon-train (this one knows its format up to {newest}); "
            "update horizon-train, or choose another folder with --state-dir"
        ) from error
    except (DatabaseUnavailable, DBAPIError, OSError) as error:
        if isinstance(error, DiskFull):
            raise
        # Of a daemon that starts nothing is "right now": what SQLite says is the reason.
        cause = error.__cause__ if isinstance(error, DatabaseUnavailable) else error
        why = cause.orig if isinstance(cause, DBAPIError) else getattr(cause, "strerror", error)
        raise BadSetting(
            f"state folder {path.parent} cannot be used: {why}; choose another with --state-dir"
        ) from error

"""One SQLite file in WAL mode: opening it, migrating it, and giving out sessions. Knows no table's meaning."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import alembic.command
import alembic.config
from sqlalchemy import Connection, create_engine, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.pool import NullPool

from horizon_server.errors import BadSetting, DiskFull

BUSY_TIMEOUT_MS = 10_000
"""How long a call waits for another process (`horizond user add`) to finish its write."""


class Database:
    """The open database.

    Thread: belongs to one event loop. Writers in this process queue on one lock, and each write transaction starts with BEGIN
    IMMEDIATE, so a transaction never fails half way because somebody else wrote in between.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._sessions = async_sessionmaker(engine, expire_on_commit=False)
        self._writing = asyncio.Lock()
        self._stopping: dict[asyncio.Future[Any], object] = {}

    @classmethod
    async def open(cls, path: Path) -> Database:
        """Migrate the file at `path` to the newest schema, creating it when missing, and open it.

        Raises:
            BadSetting: when the file cannot be made, or is no database.
            DiskFull: when there is no space for it.
        """
        try:
            with _told_when_full():
                await asyncio.to_thread(migrate, path)
        except (OSError, DBAPIError) as error:
            why = error.orig if isinstance(error, DBAPIError) else error.strerror
            raise BadSetting(
                f"state folder {path.parent} cannot be used: {why}; choose another with --state-dir"
            ) from error
        engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
        event.listen(engine.sync_engine, "connect", _configure)
        event.listen(engine.sync_engine, "begin", _begin)
        database = cls(engine)
        engine.sync_engine.dialect.do_terminate = database._stop_at_once  # type: ignore[method-assign, assignment]
        return database

    @asynccontextmanager
    async def session(self) -> AsyncIterator[AsyncSession]:
        """A write transaction: committed at the end of the block, rolled back when it raises.

        Raises:
            DiskFull: when there is no space to write; nothing of the block is kept.
        """
        with _told_when_full():
            async with self._writing, self._sessions() as session, session.begin():
                await session.connection(execution_options={"immediate": True})
                yield session

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncSession]:
        """A read transaction: a consistent view that blocks no writer."""
        async with self._sessions() as session, session.begin():
            yield session

    async def close(self) -> None:
        """Give every connection back."""
        await self._engine.dispose()
        await asyncio.gather(*self._stopping, return_exceptions=True)

    def _stop_at_once(self, connection: DBAPIConnection) -> None:
        """Drop a connection whose caller was cancelled, as any client can do at any time, without waiting for it.

        SQLAlchemy would wait for a graceful close. Where that is cancelled too, it waits for ever for a thread that has ended, and the
        event loop waits for it at its end: a daemon that cannot stop.
        """
        driver: Any = connection.driver_connection
        stopped = driver.stop()
        if stopped is not None:
            self._stopping[stopped] = driver  # kept until its thread has closed it
            stopped.add_done_callback(self._stopping.pop)


_FULL = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE})
"""What SQLite answers where the disk has no room: for the journal, the file, or the index of the journal."""


@contextmanager
def _told_when_full() -> Iterator[None]:
    try:
        yield
    except DBAPIError as error:
        if getattr(error.orig, "sqlite_errorcode", None) not in _FULL:
            raise
        raise DiskFull(
            "the node's disk is full, so the daemon can note nothing; free space there, then try again",
            retry_after_s=60.0,
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


def migrate(path: Path) -> None:
    """Bring the file at `path` to the newest schema. Two processes may do so at the same time: one waits for the other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(f"sqlite:///{path}", poolclass=NullPool)
    event.listen(engine, "connect", _configure)
    event.listen(engine, "begin", _begin)
    config = alembic.config.Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    with engine.connect().execution_options(immediate=True) as connection, connection.begin():
        attributes: dict[str, Any] = config.attributes
        attributes["connection"] = connection
        alembic.command.upgrade(config, "head")
    engine.dispose()

"""One SQLite file in WAL mode: opening it, migrating it, and giving out sessions."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import alembic.command
import alembic.config
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.pool import NullPool

from horizon_server.errors import BadSetting, DatabaseUnavailable, DiskFull

Result = TypeVar("Result")

MIGRATIONS = Path(__file__).parent / "migrations"

# How long a write waits for another process (`horizond user add`) to finish its own.
BUSY_TIMEOUT_MS = 10_000
# Reads at once. Each is a connection with a thread of its own; more of them only take processor time from the worker.
NUM_READERS = 4
# What SQLite answers where the disk has no room: for the journal, the file, or the index of the journal.
# A full disk stops readers too: they share the index.
_FULL = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE})
# Values that one query may name. SQLite takes 32,766.
_VARIABLES_PER_QUERY = 10_000


class Database:
    """The open database. Thread: belongs to one event loop."""

    def __init__(self, path: Path) -> None:
        # A connection of its own: no number of reads can keep the journal of a running job waiting.
        self._writer = self._engine(path, 1)
        self._reader = self._engine(path, NUM_READERS)
        # For what is read and written all the time, without SQLAlchemy's bridge to asyncio: that changes threads for
        # every statement, and for the begin and the end of a transaction, which took most of the processor time of a
        # poll. One thread more than there are reads at once: a write never waits for reads.
        self._plain = _plain_engine(path, pool_size=NUM_READERS + 2, max_overflow=0)
        self._looking: Connection | None = None
        self._answers = _Answers()
        self._gave_way_s = float("-inf")
        self._threads = ThreadPoolExecutor(NUM_READERS + 1, thread_name_prefix="database")
        self._write_sessions = async_sessionmaker(self._writer, expire_on_commit=False)
        self._read_sessions = async_sessionmaker(self._reader, expire_on_commit=False)
        # Called when a write finds the disk full; it may make space for the next.
        self.when_full: Callable[[], object] = lambda: None
        self._writing = asyncio.Lock()
        # Reads wait here, in the order of their arrival, and not at the pool, which gives up after 30 s. How many a
        # user may have waiting is bounded above, by `services.accounts.UserLocks`.
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
        """Migrate the file at `path` to the newest schema, creating it when missing, and open it. Raises as `migrate`
        does."""
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
        with _explained(self.when_full):
            async with self._writing, _ended(self._write_sessions()) as session:
                # BEGIN IMMEDIATE: a transaction never fails half way because another process wrote in between.
                await session.connection(execution_options={"immediate": True})
                yield session

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncSession]:
        """A read transaction: a consistent view that blocks no writer. Raises DiskFull or DatabaseUnavailable."""
        with _explained():
            async with self._reading, _ended(self._read_sessions()) as session:
                yield session

    async def look_up(self, key: Hashable, call: Callable[[Connection], Result]) -> Result:
        """Return what `call` reads, on the event loop: for a few rows by a key, in tables or rows that are in memory as
        they are read all the time. Every statement sees what is committed then. Raises as `reading`.

        `key` says all that the answer depends on but the database. The answer is kept until anything is committed: it
        must not be changed.
        """
        # A change of threads and back takes ten times as long as such a read; without a processor that is free, a
        # hundred times. A caller that does nothing else must not keep the loop to itself. Not every time: a turn of the
        # loop costs more than most answers.
        if time.monotonic() - self._gave_way_s > _LONGEST_WITHOUT_WAY_S:
            await asyncio.sleep(0)
            self._gave_way_s = time.monotonic()
        try:
            connection = self._look()
            if (answer := self._answers.get(key)) is _NONE:
                answer = call(connection)
                self._answers.keep(key, answer)
        except (
            OperationalError,
            sqlite3.OperationalError,
        ):  # locked, or the disk is full: waited for, and explained, in a thread
            if self._looking is not None:  # the next look-up has a new one, whatever this one has left
                self._looking.invalidate()
                self._looking.close()
                self._looking = None
            answer = await self.read(call)
        return cast(Result, answer)

    def _look(self) -> Connection:
        """Return the connection of the event loop, after a look at whether anything was committed since the last
        one."""
        if self._looking is None:
            self._looking = self._plain.connect().execution_options(begins=False)
            self._looking.exec_driver_sql("PRAGMA busy_timeout = 0")  # the loop waits for nobody
            self._answers = _Answers()  # the numbers of two connections are not comparable
        driver: Any = self._looking.connection.driver_connection
        self._answers.hold_for(driver.execute("PRAGMA data_version").fetchone()[0])
        return self._looking

    async def read(self, call: Callable[[Connection], Result]) -> Result:
        """Return what `call` reads in one transaction, in a thread; it must not use what belongs to the event loop.
        Raises as `reading`."""
        with _explained():
            async with self._reading:
                return await self._in_thread(call, immediate=False)

    async def write(self, call: Callable[[Connection], Result]) -> Result:
        """Return what `call` gives after a write transaction, which runs in a thread. Raises as `session`.

        It is carried out even if the caller is cancelled meanwhile.
        """
        with _explained():
            async with self._writing:
                return await self._in_thread(call, immediate=True)

    async def _in_thread(self, call: Callable[[Connection], Result], *, immediate: bool) -> Result:
        def run() -> Result:
            with self._plain.connect() as connection:
                connection.execution_options(immediate=immediate)
                with connection.begin():
                    return call(connection)

        # A place is free only when its thread is, so that there are never more calls than threads.
        return await _to_its_end(asyncio.get_running_loop().run_in_executor(self._threads, run))

    async def close(self) -> None:
        """Give every connection back."""
        await asyncio.to_thread(self._threads.shutdown)
        if self._looking is not None:
            self._looking.close()
        self._plain.dispose()
        await self._reader.dispose()
        await self._writer.dispose()
        await asyncio.gather(*self._stopping, return_exceptions=True)

    def _stop_at_once(self, connection: DBAPIConnection) -> None:
        """Drop a connection whose caller was cancelled, as any client can do at any time, without waiting for it."""
        # SQLAlchemy would wait for a graceful close. Where that is cancelled too, it waits forever for a thread that
        # has ended, and the event loop waits for it at its end: a daemon that cannot stop.
        driver: Any = connection.driver_connection
        # First an end to its transaction: a closed connection keeps the lock of a write until the last cursor is
        # collected, and the traceback of the cancelled call holds on to one. Sent to the connection's thread without
        # waiting for the answer.
        with contextlib.suppress(ValueError):  # it is closed already
            rollback = driver.rollback()
            rollback.send(None)
            rollback.close()
        stopped = driver.stop()
        if stopped is not None:
            self._stopping[stopped] = driver  # kept until its thread has closed it
            stopped.add_done_callback(self._stopping.pop)


_NONE = object()
# Look-ups one after another hold the event loop this long at most.
_LONGEST_WITHOUT_WAY_S = 0.002
# Of the largest answer, a page of jobs, a few users look at a few pages.
_MOST_ANSWERS = 500


class _Answers:
    """Answers of look-ups, which hold while nothing is committed. Commits are a few per second, polls of users can be a
    hundred."""

    def __init__(self) -> None:
        self._version = -1
        self._kept: dict[Hashable, object] = {}

    def hold_for(self, version: int) -> None:
        """Forget them all where this is not SQLite's `data_version` of the last call: another connection has
        committed."""
        if version != self._version or len(self._kept) > _MOST_ANSWERS:
            self._version = version
            self._kept.clear()

    def get(self, key: Hashable) -> object:
        """Return the answer that is kept, or _NONE."""
        return self._kept.get(key, _NONE)

    def keep(self, key: Hashable, answer: object) -> None:
        """Keep an answer that was read after the last `hold_for`."""
        self._kept[key] = answer


@asynccontextmanager
async def _ended(session: AsyncSession) -> AsyncIterator[AsyncSession]:
    """Commit at the end of the block, or roll back when it raises, and give the connection back."""

    async def commit() -> None:
        async with session:
            await session.commit()

    # SQLAlchemy logs a traceback and drops the connection where a caller is cancelled just while it goes back to the
    # pool.
    try:
        yield session
    except BaseException:
        await _to_its_end(asyncio.ensure_future(session.close()))
        raise
    await _to_its_end(asyncio.ensure_future(commit()))


async def _to_its_end(work: asyncio.Future[Result]) -> Result:
    """Wait for work that is not given up when its caller is cancelled; the caller is cancelled after it."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


def parts(values: Collection[str]) -> Iterator[list[str]]:
    """Yield the values in as many lists as queries need that name them."""
    listed = list(values)
    for start in range(0, len(listed), _VARIABLES_PER_QUERY):
        yield listed[start : start + _VARIABLES_PER_QUERY]


@contextmanager
def _explained(when_full: Callable[[], object] = lambda: None) -> Iterator[None]:
    try:
        yield
    except OperationalError as error:
        if getattr(error.orig, "sqlite_errorcode", None) in _FULL:
            when_full()
            raise DiskFull(
                "the node's disk is full, so the daemon cannot use its database; free space there, then try again",
                retry_after_s=60.0,
            ) from error
        raise DatabaseUnavailable(
            f"the daemon cannot use its database right now ({error.orig}); try again in a moment", retry_after_s=5.0
        ) from error


def _plain_engine(path: Path, **options: Any) -> Engine:
    engine = create_engine(f"sqlite:///{path}", **options)
    event.listen(engine, "connect", _configure)
    event.listen(engine, "begin", _begin)
    return engine


def _configure(connection: DBAPIConnection, _record: object) -> None:
    connection.isolation_level = None  # SQLAlchemy's `begin` event sends BEGIN, not sqlite3
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON", f"busy_timeout={BUSY_TIMEOUT_MS}"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin(connection: Connection) -> None:
    options = connection.get_execution_options()
    if options.get("begins", True):
        connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get("immediate") else "BEGIN")


def migrations() -> alembic.config.Config:
    """Where Alembic finds the migrations."""
    config = alembic.config.Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    return config


def migrate(path: Path) -> None:
    """Bring the file at `path` to the newest schema. Of two processes that do so at the same time one waits.

    Raises:
        BadSetting: when the file cannot be made, is not a database, or was made by a newer version.
        DiskFull: when there is no space for it.
    """
    engine, config = _plain_engine(path, poolclass=NullPool), migrations()
    try:
        with _explained():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)  # SQLite gives its other files the same mode
            # One transaction over all migrations: a process that is killed half way leaves the old schema whole.
            with engine.connect().execution_options(immediate=True) as connection, connection.begin():
                attributes: dict[str, Any] = config.attributes
                attributes["connection"] = connection
                alembic.command.upgrade(config, "head")
    except CommandError as error:
        newest = ScriptDirectory.from_config(config).get_current_head()
        raise BadSetting(
            f"the database {path} was made by a newer version of horizon-train (this one knows its format up to "
            f"{newest}); "
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

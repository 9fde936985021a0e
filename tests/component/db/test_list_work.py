"""A page of a list takes the same work however many there are: counted in instructions of SQLite's machine, as times
depend on the node."""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event
from tests.conftest import MakeDaemon
from tests.daemon_parts import ROOT, DaemonParts, blob_file

from horizon_server.records.account import Principal

ADA = Principal(name="ada", role="user", project="ada")
PAGE = 20
FEW, MANY = 100, 1000


class Work:
    """Counts statements, and the instructions that SQLite needs for them."""

    def __init__(self, database_path: Path) -> None:
        self._path = database_path
        self._statements: list[tuple[str, Any]] = []

    async def of(self, call: Callable[[], Awaitable[Any]]) -> tuple[int, int]:
        """Return how many statements a call executes, and their instructions in units of ten."""
        with sqlite3.connect(self._path) as connection:  # else what was looked up before is answered again
            assert connection.execute("UPDATE users SET created_s = created_s + 1").rowcount
        connection.close()
        self._statements = []
        await call()
        statements, self._statements = self._statements, []
        return len(statements), sum(self._instructions(*statement) for statement in statements)

    def note(self, _connection: object, _cursor: object, statement: str, parameters: Any, *_: object) -> None:
        self._statements.append((statement, parameters))

    def _instructions(self, statement: str, parameters: Any) -> int:
        count = 0

        def progress() -> None:
            nonlocal count
            count += 1

        connection = sqlite3.connect(self._path)
        try:
            connection.set_progress_handler(progress, 10)
            connection.execute(statement, parameters).fetchall()
        finally:
            connection.close()
        return count


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Work]:
    """Before the daemon: a connection reports to those who listened when it was opened."""
    made = Work(tmp_path / "state" / "horizon.db")
    event.listen(Engine, "before_cursor_execute", made.note)
    yield made
    event.remove(Engine, "before_cursor_execute", made.note)


@pytest.fixture
async def daemon(work: Work, make_daemon: MakeDaemon, tmp_path: Path) -> AsyncIterator[DaemonParts]:
    """A daemon without a queue, whose own looks would be counted too."""
    async with make_daemon(tmp_path / "state", queue=False) as made:
        await made.services.accounts.add_user(ADA.name)
        yield made


def copy(daemon: DaemonParts, table: str, key: str, numbers: range) -> None:
    """Copy the one row of a table with other ids and names, each newer than the one before."""
    with sqlite3.connect(daemon.settings.database_path) as connection:
        connection.row_factory = sqlite3.Row
        row = dict(connection.execute(f"SELECT * FROM {table} LIMIT 1").fetchone())
        row.pop("number", None)
        for number in numbers:
            row |= {key: f"copy_{number:06d}", "name": f"copy-{number}", "created_s": row["created_s"] + 1}
            if table == "jobs":
                row |= {"queue_order": number}
            connection.execute(
                f"INSERT INTO {table} ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", list(row.values())
            )
    connection.close()


async def job(daemon: DaemonParts) -> None:
    await daemon.dataset(ADA)
    submitted = await daemon.submit(ADA)
    await daemon.services.jobs.cancel(ADA, submitted.job_id)


async def dataset(daemon: DaemonParts) -> None:
    files = [blob_file("a.jsonl", b"{}")]
    await daemon.services.datasets.create(
        ADA, request_id=str(uuid.uuid4()), name="one", format="auto", field_map={}, files=files
    )


async def model(daemon: DaemonParts) -> None:
    await daemon.model(ADA)


@pytest.mark.parametrize("viewer", [ADA, ROOT], ids=["owner", "admin"])
@pytest.mark.parametrize(
    ("table", "key", "make"),
    [("jobs", "job_id", job), ("datasets", "dataset_id", dataset), ("models", "model_id", model)],
)
async def test_a_page_takes_the_same_work_however_many_there_are(
    work: Work,
    daemon: DaemonParts,
    table: str,
    key: str,
    make: Callable[[DaemonParts], Awaitable[None]],
    viewer: Principal,
) -> None:
    await make(daemon)
    service: Any = getattr(daemon.services, table)
    taken = []
    for numbers in (range(1, FEW), range(FEW, MANY)):
        copy(daemon, table, key, numbers)
        _, token = await service.list(viewer, page_size=PAGE)
        # The first page, and the one after it.
        for page_token in ("", token):
            list_page = partial(service.list, viewer, page_size=PAGE, page_token=page_token)
            assert len((await list_page())[0]) == PAGE
            taken.append(await work.of(list_page))
    for (few_statements, few_instructions), (statements, instructions) in zip(taken[:2], taken[2:], strict=True):
        assert statements == few_statements
        assert 0 < instructions < 1.5 * few_instructions

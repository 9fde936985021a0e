"""What commands do to a state folder that is none, or that another version of horizond has made."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.later_schemas import NEWEST, later_migrations, later_schemas

from horizon_server.cli import run
from horizon_server.db import database as database_module
from horizon_server.db.database import Database, migrate
from horizon_server.db.database_file import opened_file
from horizon_server.db.existing import (
    MAX_COPIES,
    database_to_read,
    insert_entry,
    keep_before_migration,
    remove_left_copies,
)
from horizon_server.records.audit import UNKNOWN, AuditEntry
from horizon_server.services.accounts import Accounts

Command = Callable[..., tuple[int, str, str]]

READING = (
    ("user", "list"),
    ("token", "list"),
    ("project", "list"),
    ("project", "member", "list"),
    ("audit",),
    ("gc", "--dry-run"),
    ("check",),
)
CHANGING = (
    ("user", "add", "eve"),
    ("user", "set", "ada", "--weight", "2"),
    ("user", "remove", "ada", "--yes"),
    ("token", "create", "ada"),
    ("token", "revoke", "tok_1"),
    ("project", "add", "lab"),
    ("project", "member", "add", "ada", "ada"),
    ("gc",),
)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    def invoke(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["horizond", *map(str, arguments), "--state-dir", str(tmp_path / "state")])
        code = run()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return invoke


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database with a user, and commands of a later version for which it is of an earlier one."""
    path = tmp_path / "state" / "horizon.db"

    async def make() -> None:
        async with Database.opened(path) as database:
            await Accounts(database).add_user("ada")

    asyncio.run(make())
    monkeypatch.setattr("horizon_server.db.database.MIGRATIONS", later_migrations(tmp_path))
    return path


def schema_of(path: Path) -> str:
    with opened_file(path) as file:
        return file.schema


def tree(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mode,
            path.stat().st_mtime_ns,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in sorted(folder.rglob("*"))
        if not path.name.endswith(("-wal", "-shm"))  # SQLite's own, which readers make too
    }


@pytest.mark.parametrize("words", [*READING, *CHANGING, ("backup", "BACKUP")], ids=" ".join)
def test_a_folder_that_holds_no_daemons_state_is_refused_and_not_made(
    command: Command, tmp_path: Path, words: tuple[str, ...]
) -> None:
    code, out, said = command(*words)
    assert (code, out, said.count("\n")) == (2, "", 1), said
    assert "holds no daemon's state" in said and "horizond serve" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", READING, ids=" ".join)
def test_a_command_that_reads_reads_an_earlier_database_and_changes_nothing(
    command: Command, earlier: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    (tmp_path / "state").chmod(0o700)
    (tmp_path / "state" / "horizon.db").chmod(0o600)
    (tmp_path / "state" / "prepared" / ".half.partial").mkdir(parents=True)
    for name in ("blobs", "uploads", "jobs", "models", "trash"):
        (tmp_path / "state" / name).mkdir()
    before = tree(tmp_path / "state")
    code, _, said = command(*words)
    assert (code, "error" in said) in ((0, False), (1, False)), said
    assert tree(tmp_path / "state") == before


def test_users_of_an_earlier_database_are_listed(command: Command, earlier: Path) -> None:
    assert "ada" in command("user", "list", "-o", "name")[1].split()


@pytest.mark.parametrize("words", CHANGING, ids=" ".join)
def test_a_command_that_changes_something_leaves_an_earlier_database_to_serve(
    command: Command, earlier: Path, words: tuple[str, ...]
) -> None:
    code, _, said = command(*words)
    assert (code, said.count("\n")) == (2, 1), said
    assert f"format {NEWEST}" in said and "horizond serve" in said
    assert schema_of(earlier) == NEWEST


def test_a_backup_and_its_restore_leave_an_earlier_database_as_it_is(
    command: Command, earlier: Path, tmp_path: Path
) -> None:
    state, backup = tmp_path / "state", tmp_path / "backup"
    assert command("backup", backup)[0] == 0
    assert schema_of(earlier) == NEWEST
    code, _, said = command("restore", backup, "--replace")
    assert code == 0, said
    assert schema_of(earlier) == NEWEST
    [kept] = state.glob("before-restore-*.db")
    assert [
        (row["action"], row["outcome"]) for row in json.loads(command("audit", "-o", "json", "--since", "1d")[1])
    ] == [("horizond restore", "OK")]
    with sqlite3.connect(kept) as connection:
        rows = connection.execute("SELECT action, outcome FROM audit ORDER BY number DESC LIMIT 2").fetchall()
    connection.close()
    assert rows == [("horizond restore", "OK"), ("horizond backup", "OK")]


def test_a_database_is_copied_before_it_is_migrated_and_few_copies_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = tmp_path / "horizon.db"
    assert keep_before_migration(database) is None
    migrate(database)
    assert keep_before_migration(database) is None
    schemas = [NEWEST, *later_schemas(MAX_COPIES + 1)]
    for count, schema in enumerate(schemas[1:], start=1):
        monkeypatch.setattr("horizon_server.db.database.MIGRATIONS", later_migrations(tmp_path, count))
        copy = keep_before_migration(database)
        assert copy == tmp_path / f"before-migration-{schemas[count - 1]}.db"
        migrate(database)
        assert (schema_of(copy), schema_of(database)) == (schemas[count - 1], schema)
    assert keep_before_migration(database) is None
    names = [f"before-migration-{schema}.db" for schema in schemas[:-1][-MAX_COPIES:]]
    assert sorted(path.name for path in tmp_path.glob("before-*")) == names


def test_the_copy_of_a_database_that_a_killed_command_has_left_is_removed(
    earlier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = tmp_path / "tmp"
    others.mkdir()
    (others / "horizond-a-note").mkdir()  # nobody's copy
    program = (
        "import asyncio, os, pathlib, sys\n"
        "from horizon_server.db import database\n"
        "from horizon_server.db.existing import database_to_read\n"
        "database.MIGRATIONS = pathlib.Path(sys.argv[2])\n"
        "async def read():\n"
        "    async with database_to_read(pathlib.Path(sys.argv[1])):\n"
        "        os.kill(os.getpid(), 9)\n"
        "asyncio.run(read())"
    )
    environment = {**os.environ, "TMPDIR": str(others)}
    killed = subprocess.run(
        [sys.executable, "-c", program, str(earlier), str(database_module.MIGRATIONS)],
        env=environment,
        timeout=120,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    assert len(list(others.glob("*/horizon.db"))) == 1
    monkeypatch.setattr(tempfile, "tempdir", str(others))

    async def read() -> None:
        async with database_to_read(earlier):
            assert len(list(others.glob("*/horizon.db"))) == 1, "its own"
            remove_left_copies()
            assert len(list(others.glob("*/horizon.db"))) == 1, "which is in use"

    asyncio.run(read())
    assert [path.name for path in others.iterdir()] == ["horizond-a-note"]


def test_a_command_that_is_cut_has_an_entry(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kill -9 leaves it: nothing after the change runs."""

    class Killed(BaseException):
        pass

    async def cut(*_: object, **__: object) -> None:
        raise Killed

    database = tmp_path / "state" / "horizon.db"
    migrate(database)
    monkeypatch.setattr("horizon_server.services.accounts.Accounts.add_user", cut)
    with pytest.raises(Killed):
        command("user", "add", "ada")
    [entry] = json.loads(command("audit", "--outcome", UNKNOWN, "-o", "json")[1])
    assert (entry["action"], entry["resource"], entry["outcome"]) == ("horizond user add", "ada", UNKNOWN)


def test_a_database_that_is_missing_gets_no_entry(tmp_path: Path) -> None:
    entry = AuditEntry(time_s=1.0, user="u", token_id="", origin="o", action="a", resource="r", outcome="OK", detail="")
    assert insert_entry(tmp_path / "none.db", entry) == 0
    assert not (tmp_path / "none.db").exists()

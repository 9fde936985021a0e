"""Databases of other versions: that of a release becomes one of this version, whole or not at all; a newer one is
refused."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from pathlib import Path

import click
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine
from tests.support.later_schemas import later_migrations, later_schemas
from tests.support.released_states import RELEASES, STATE, unpack

from horizon_server.cli import horizond, run
from horizon_server.db.database import Database, migrate
from horizon_server.db.database_file import opened_file
from horizon_server.db.tables import Table
from horizon_server.services.accounts import Accounts


@pytest.mark.parametrize("release", RELEASES)
def test_the_database_of_a_release_becomes_one_of_this_version(release: str, tmp_path: Path) -> None:
    """Also where a migration that was released has changed: what it made then is not what a new database has now."""
    unpack(release, tmp_path)
    path = tmp_path / STATE / "horizon.db"
    migrate(path)
    engine = create_engine(f"sqlite:///{path}")
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Table.metadata) == []
    engine.dispose()
    with opened_file(path) as file:
        assert (file.damage(), file.contradictions(), file.jobs_without_data()) == ([], [], [])


_KILLED = """
import os, signal, sys
from pathlib import Path
from sqlalchemy import Engine, event
from horizon_server.db import database
database.MIGRATIONS, left = Path(sys.argv[2]), int(sys.argv[3])
def count(connection, cursor, statement, *_):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
event.listen(Engine, "before_cursor_execute", count)
database.migrate(Path(sys.argv[1]))
"""


@pytest.mark.parametrize("num_statements", [3, 6, 9])
def test_a_migration_that_is_killed_leaves_the_old_schema(
    tmp_path: Path, num_statements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, migrations = tmp_path / "horizon.db", later_migrations(tmp_path, 2)
    asyncio.run(make_a_user(path))
    before = dump(path)
    command = [sys.executable, "-c", _KILLED, str(path), str(migrations), str(num_statements)]
    killed = subprocess.run(command, capture_output=True, check=False, timeout=240)
    assert killed.returncode == -9, killed.stderr
    assert dump(path) == before
    monkeypatch.setattr("horizon_server.db.database.MIGRATIONS", migrations)
    migrate(path)
    with opened_file(path) as file:
        assert (file.schema, file.damage(), file.contradictions()) == (later_schemas(2)[-1], [], [])
    assert [line for line in dump(path) if line.startswith(f'INSERT INTO "of_{later_schemas(2)[-1]}"')]


async def make_a_user(path: Path) -> None:
    async with Database.opened(path) as database:
        await Accounts(database).add_user("ada")


def dump(path: Path) -> list[str]:
    with sqlite3.connect(path) as connection:
        lines = list(connection.iterdump())
    connection.close()
    return lines


_NEEDS_NO_DATABASE = {"demo", "doctor", "node", "plan", "restore"}
"""Commands, and groups of them."""


def _lines(group: click.Group, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return a command line of every command, with some value for all that it requires."""
    found = []
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            found += _lines(command, (*path, name))
        elif not {*path, name} & _NEEDS_NO_DATABASE:
            words = [*path, name]
            for parameter in command.params:
                if parameter.required:
                    value = parameter.type.choices[0] if isinstance(parameter.type, click.Choice) else "x1"
                    value = "x1/x1" if words == ["model", "add"] else value  # an id of the hub
                    words += [value] if isinstance(parameter, click.Argument) else [parameter.opts[0], value]
            found.append(tuple(words))
    return found


@pytest.mark.parametrize("line", _lines(horizond), ids=" ".join)
def test_a_newer_database_is_refused_by_every_command(
    line: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A12: it was refused with a traceback of 118 lines."""
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    path = state / "horizon.db"
    migrate(path)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '0099'")
    connection.close()
    before = dump(path)
    monkeypatch.chdir(tmp_path)
    arguments = [*line, "--state-dir", str(state)]
    if line == ("serve",):  # which sets up the logging of the whole process
        command = [sys.executable, "-m", "horizon_server", *arguments, "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        code, said = done.returncode, done.stderr
    else:
        monkeypatch.setattr(sys, "argv", ["horizond", *arguments])
        code, said = run(), capsys.readouterr().err
    if "Usage:" in said:
        pytest.skip("it needs arguments that no rule can make up")
    assert code == 2, said
    [message] = [text for text in said.splitlines() if text.startswith("Error: ")]
    assert "made by a newer version of horizon-train" in message
    assert "update horizon-train" in message
    assert "Traceback" not in said
    assert dump(path) == before

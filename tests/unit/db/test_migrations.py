"""Databases of every earlier schema, with data as the versions of that schema wrote it: nothing is lost on the way to this one.

`schemas/<revision>.sql` are dumps of what the last version of each schema made of the same users, tokens, pushes and jobs.
"""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import click
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine

from horizon_server.cli import horizond, run
from horizon_server.db.accounts import AccountStore
from horizon_server.db.database import Database, migrate
from horizon_server.db.database_file import known_schemas, opened_file
from horizon_server.db.jobs import JobStore
from horizon_server.db.pushed import BlobReferences, DatasetStore, ModelStore
from horizon_server.db.sharing import SharingStore
from horizon_server.db.tables import Table
from horizon_server.events import CheckpointWritten, StateChanged, StepDone
from horizon_server.records.account import Token, User
from horizon_server.records.blob import BlobFile, DatasetRecord, ModelRecord
from horizon_server.records.job import JobState

DUMPS = {file.stem.removeprefix("v"): file for file in sorted((Path(__file__).parent / "schemas").glob("v*.sql"))}
START_S = 1_790_000_000.0
"""The clock of the dumps began here and moved on by a second each time it was read."""
ALL = list("abce")

A, B = (BlobFile(path=f"{name}.jsonl", sha256=name * 64, size_bytes=size) for name, size in (("a", 10), ("b", 20)))
CONFIG = BlobFile(path="config.json", sha256="c" * 64, size_bytes=5)
WEIGHTS = BlobFile(path="model.safetensors", sha256="e" * 64, size_bytes=100)


def loaded(schema: str, path: Path) -> Path:
    """Make the database of an earlier version."""
    with sqlite3.connect(path) as connection:
        connection.executescript(DUMPS[schema].read_text("utf-8"))
        connection.execute("PRAGMA journal_mode=WAL")
    connection.close()
    return path


@pytest.fixture(params=DUMPS)
def schema(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def old(schema: str, tmp_path: Path) -> Path:
    return loaded(schema, tmp_path / "horizon.db")


@pytest.fixture
async def database(old: Path) -> AsyncIterator[Database]:
    async with Database.opened(old) as database:
        yield database


def test_every_earlier_schema_has_a_dump() -> None:
    assert tuple(DUMPS) == known_schemas()[:-1]


def test_the_tables_are_those_of_a_new_database(old: Path) -> None:
    migrate(old)
    engine = create_engine(f"sqlite:///{old}")
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Table.metadata) == []
    engine.dispose()
    with opened_file(old) as file:
        assert (file.damage(), file.contradictions(), file.jobs_without_data()) == ([], [], [])


async def test_users_and_their_tokens_stay(database: Database) -> None:
    accounts = AccountStore(database)
    found = await accounts.users()
    assert [(user.name, user.role, user.project) for user in found] == [
        ("ada", "admin", "lab"), ("bob", "user", "bob"), ("carol", "viewer", "lab"),
    ]  # fmt: skip
    assert all(user.disabled_s is None and user.created_s > START_S for user in found)
    everlasting, revoked = await accounts.tokens()
    assert everlasting == Token(
        token_id="tok_1", user="ada", created_s=everlasting.created_s, expires_s=None, revoked_s=None
    )
    assert revoked.expires_s == revoked.created_s + 90 * 86400
    assert revoked.revoked_s == revoked.created_s + 1
    of_secret = await accounts.find("1" * 64)
    assert of_secret is not None
    assert isinstance(of_secret[1], User)
    assert of_secret[1].name == "ada"


def test_an_upgrade_shows_nobody_the_jobs_of_others(old: Path) -> None:
    migrate(old)
    with sqlite3.connect(old) as connection:
        members = connection.execute("SELECT project, user, role FROM members ORDER BY user").fetchall()
    connection.close()
    # ada and carol were both charged to lab, where neither saw the jobs of the other.
    assert members == [("bob", "bob", "admin")]


async def test_datasets_and_models_stay_with_their_contents(database: Database) -> None:
    [chats] = await DatasetStore(database).find("chats")
    assert chats == DatasetRecord(
        dataset_id="dataset_1", owner="ada", name="chats", format="messages", field_map={"text": "body"}, files=(B, A), ready=True,
        num_rows=30, digest="d" * 64, created_s=chats.created_s,
    )  # fmt: skip
    [half] = await DatasetStore(database).find("dataset_2")
    assert (half.owner, half.ready, half.files) == ("bob", False, (A,))
    [tiny] = await ModelStore(database).find("tiny")
    assert tiny == ModelRecord(
        model_id="model_1", owner="ada", name="tiny", files=(CONFIG, WEIGHTS), ready=True, architecture="qwen3", num_parameters=1234,
        digest="f" * 64, created_s=tiny.created_s,
    )  # fmt: skip
    references = BlobReferences(database)
    assert await references.of_all() == {name * 64 for name in ALL}
    assert await references.of_ready("ada", [name * 64 for name in ALL]) == {name * 64 for name in ALL}
    assert await references.of_ready("bob", ["a" * 64]) == frozenset()


async def test_jobs_stay_where_they_were(database: Database, schema: str) -> None:
    store = JobStore(database)
    jobs = {number: await store.get(f"job_{number}") for number in range(1, 6)}
    found = {
        number: (job.owner, job.project, job.job_state, job.reason, job.step, job.attempt, job.queue_position)
        for number, job in jobs.items()
        if job is not None
    }
    assert found == {
        1: ("ada", "lab", JobState.SUCCEEDED, "", 3, 1, 0),
        2: ("bob", "bob", JobState.RUNNING, "", 3, 1, 0),
        3: ("bob", "bob", JobState.QUEUED, "", 0, 0, 1),
        4: ("ada", "lab", JobState.QUEUED, "", 3, 1, 2),
        5: ("bob", "bob", JobState.PAUSED, "PAUSED", 3, 1, 0),
    }
    job = jobs[1]
    assert job is not None
    assert (job.spec.name, job.spec.model, job.spec.dataset, job.spec.train.max_steps) == ("job1", "tiny", "chats", 10)
    assert (job.model_id, job.dataset_id, job.eval_dataset_id) == ("model_1", "dataset_1", "")
    assert all(START_S < time_s < START_S + 1000 for time_s in (job.created_s, job.started_s, job.ended_s))
    assert job.last_step is not None
    assert (job.last_step.step, job.last_step.loss, job.last_step.num_steps) == (3, 2.2, 10)
    assert job.plan is not None
    assert (job.plan.host_bytes, job.plan.num_parameters) == ({"weights": 10, "moments": 20}, 1234)
    # The columns that came later.
    assert job.data_report == ({} if schema == "0001" else {"rows": 30, "packed_rows": 12})
    assert (job.device_s, job.num_tokens) == ((6.0, 270) if schema >= "0005" else (0.0, 0))
    assert (job.num_restarts, job.failed_step, job.not_before_s, job.journal_line, job.deletion_s) == (
        0,
        -1,
        0.0,
        0,
        None,
    )
    waiting = jobs[3]
    assert waiting is not None
    assert waiting.created_s <= waiting.queued_s < START_S + 1000


async def test_events_stay_and_can_be_read(database: Database) -> None:
    store = JobStore(database)
    for number, num_events in ((1, 9), (2, 8), (3, 1), (4, 10), (5, 10)):
        job = await store.get(f"job_{number}")
        events = await store.events_after(f"job_{number}", 0, 100)
        assert [event.sequence for event in events] == list(range(1, num_events + 1))
        assert job is not None
        assert job.last_sequence == num_events
    kinds = [type(event.payload) for event in await store.events_after("job_1", 0, 100)]
    assert kinds == [*[StateChanged] * 4, *[StepDone] * 3, CheckpointWritten, StateChanged]


async def test_a_job_of_an_earlier_version_continues(database: Database) -> None:
    store = JobStore(database)
    await store.append("job_2", StateChanged(job_state="RUNNING", message="a new attempt"))
    await store.move("job_3", StateChanged(job_state="PREPARING"), attempt=1)
    job = await store.get("job_2")
    assert job is not None
    assert job.last_sequence == 9
    assert [queued.job_id for queued in await store.queued(10)] == ["job_4"]


async def test_the_allowances_of_0005_stay(tmp_path: Path) -> None:
    async with Database.opened(loaded("0005", tmp_path / "horizon.db")) as database:
        [allowance] = await SharingStore(database).allowances()
        assert (allowance.holder, allowance.name, allowance.weight) == ("user", "bob", 2.0)
        assert allowance.quota.limits == {"max_queued_jobs": 7, "device_hours_per_week": 1.5}


_KILLED = """
import os, signal, sys
from pathlib import Path
from sqlalchemy import Engine, event
from horizon_server.db.database import migrate
left = int(sys.argv[2])
def count(connection, cursor, statement, *_):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
event.listen(Engine, "before_cursor_execute", count)
migrate(Path(sys.argv[1]))
"""


@pytest.mark.parametrize("num_statements", [8, 20, 45])
def test_a_migration_that_is_killed_leaves_the_old_schema(tmp_path: Path, num_statements: int) -> None:
    path = loaded("0002", tmp_path / "horizon.db")
    before = dump(path)
    command = [sys.executable, "-c", _KILLED, str(path), str(num_statements)]
    killed = subprocess.run(command, capture_output=True, check=False, timeout=60)
    assert killed.returncode == -9, killed.stderr
    assert dump(path) == before
    migrate(path)
    with opened_file(path) as file:
        assert (file.schema, file.damage(), file.contradictions()) == (known_schemas()[-1], [], [])


def dump(path: Path) -> list[str]:
    with sqlite3.connect(path) as connection:
        lines = list(connection.iterdump())
    connection.close()
    return lines


_NEEDS_NO_DATABASE = {"demo", "doctor", "plan", "restore"}


def _lines(group: click.Group, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return a command line of every command, with some value for all that it requires."""
    found = []
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            found += _lines(command, (*path, name))
        elif name not in _NEEDS_NO_DATABASE:
            words = [*path, name]
            for parameter in command.params:
                if parameter.required:
                    value = parameter.type.choices[0] if isinstance(parameter.type, click.Choice) else "x1"
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
    path = loaded(max(DUMPS), state / "horizon.db")
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

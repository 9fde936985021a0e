"""`horizond user set` and `horizond project set|list`: weights and quotas in the database, with and without a
daemon."""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from horizon_server.cli import run
from horizon_server.cli.allowances import parse_size
from horizon_server.db.database import Database, migrate
from horizon_server.db.jobs import JobStore
from horizon_server.db.sharing import SharingStore
from horizon_server.errors import BadSetting
from horizon_server.records.job import JobRecord, JobState
from horizon_server.records.sharing import Allowance, Quota
from horizon_server.spec import parse_job_spec

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Run a command line over a state folder of its own; returns exit code, stdout and stderr."""

    migrate(tmp_path / "horizon.db")

    def invoke(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["horizond", *arguments, "--state-dir", str(tmp_path)])
        code = run()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return invoke


def stored(state_dir: Path) -> list[Allowance]:
    async def read() -> list[Allowance]:
        async with Database.opened(state_dir / "horizon.db") as database:
            return await SharingStore(database).allowances()

    return asyncio.run(read())


def test_a_users_weight_and_quotas_are_set_one_by_one(command: Command, tmp_path: Path) -> None:
    command("user", "add", "ada")
    code, out, err = command(
        *("user", "set", "ada", "--weight", "2.5", "--max-queued-jobs", "4", "--max-resident-jobs", "2"),
        *("--max-host-memory", "200GiB", "--max-stored", "1TiB", "--device-hours-per-week", "40"),
    )
    quotas = (
        "--max-queued-jobs 4 --max-resident-jobs 2 --max-host-memory 200GiB --max-stored 1TiB "
        "--device-hours-per-week 40"
    )
    assert (code, out, err) == (0, "", f"user ada: weight 2.5, quotas {quotas}\n")
    quota = Quota(
        max_queued_jobs=4,
        max_resident_jobs=2,
        max_host_bytes=200 * 2**30,
        max_stored_bytes=2**40,
        device_hours_per_week=40.0,
    )
    assert stored(tmp_path) == [Allowance(holder="user", name="ada", weight=2.5, quota=quota)]
    # What is not named stays; none removes.
    assert command("user", "set", "ada", "--max-queued-jobs", "none", "--max-stored", "none")[0] == 0
    quota = Quota(max_resident_jobs=2, max_host_bytes=200 * 2**30, device_hours_per_week=40.0)
    assert stored(tmp_path) == [Allowance(holder="user", name="ada", weight=2.5, quota=quota)]
    [user] = json.loads(command("user", "list", "-o", "json")[1])
    assert (user["name"], user["weight"]) == ("ada", "2.5")
    # As it is listed it can be given to another.
    command("user", "add", "bob")
    assert command("user", "set", "bob", *user["quotas"].split())[0] == 0
    assert [one.quota for one in stored(tmp_path)] == [quota, quota]


def test_projects_are_those_of_users_jobs_and_allowances(command: Command, tmp_path: Path) -> None:
    command("user", "add", "ada", "--project", "lab")
    command("user", "add", "bob", "--project", "lab")
    command("user", "add", "eve")

    async def submit() -> None:
        spec = parse_job_spec({"name": "n", "model": "m", "dataset": "d", "project": "physics"})
        job = JobRecord(
            job_id="j1",
            owner="ada",
            project="physics",
            spec=spec,
            model_id="m",
            dataset_id="d",
            eval_dataset_id="",
            job_state=JobState.QUEUED,
        )
        async with Database.opened(tmp_path / "horizon.db") as database:
            await JobStore(database).create(job, request_id=str(uuid.uuid4()))

    asyncio.run(submit())
    assert command("project", "set", "lab", "--weight", "3")[2] == "project lab: weight 3, quotas none\n"
    message = command("project", "set", "new", "--max-queued-jobs", "0")[2]
    assert "project new does not exist; an administrator creates it on the node: horizond project add new" in message
    assert command("project", "add", "new")[2] == "new project new; next: horizond project member add new USER\n"
    assert command("project", "set", "new", "--max-queued-jobs", "0")[0] == 0
    rows = json.loads(command("project", "list", "-o", "json")[1])
    assert [(row["name"], row["members"], row["weight"], row["quotas"]) for row in rows] == [
        ("eve", "eve (admin)", "1", "none"),
        ("lab", "", "3", "none"),
        ("new", "", "1", "--max-queued-jobs 0"),
        ("physics", "", "1", "none"),
    ]
    assert command("project", "list", "-o", "name")[1].split() == ["eve", "lab", "new", "physics"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("user", "set", "ada"), 2, "nothing to set; give at least one of --weight, --max-queued-jobs, "),
        (("user", "set", "nobody", "--weight", "2"), 4, "user nobody does not exist; see: horizond user list"),
        (("user", "set", "ada", "--weight", "0"), 2, "weight is 0; it must be a number above 0 up to 1,000,000"),
        (("user", "set", "ada", "--weight", "none"), 2, "--weight 'none' is not a number: write one such as 2 or 0.5"),
        (("user", "set", "ada", "--weight", "nan"), 2, "weight is nan; it must be a number above 0"),
        (("user", "set", "ada", "--max-queued-jobs", "many"), 2, "--max-queued-jobs 'many' is not a number of jobs"),
        (("user", "set", "ada", "--max-queued-jobs", "-1"), 2, "write a whole number from 0, or none"),
        (
            ("user", "set", "ada", "--max-host-memory", "200G"),
            2,
            "--max-host-memory '200G' is not a size: write a number",
        ),
        (
            ("user", "set", "ada", "--device-hours-per-week", "inf"),
            2,
            "device_hours_per_week is inf; it must be 0 or more",
        ),
        (("project", "set", "a b", "--weight", "2"), 2, "project 'a b' is not allowed: it must be 1 to 63 letters"),
    ],
)
def test_what_cannot_be_set_is_refused_and_changes_nothing(
    command: Command, tmp_path: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    command("user", "add", "ada")
    found, out, err = command(*arguments)
    assert (found, out) == (code, "")
    assert words in err
    assert stored(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("12 B", 12),
        ("200GiB", 200 * 2**30),
        ("200gib", 200 * 2**30),
        ("1.5TB", 1_500_000_000_000),
        ("0.5 MiB", 2**19),
        ("2KB", 2000),
        ("1.1GiB", 1181116006),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size(text, what="--max-stored") == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1e9", "1..5GiB", "2 apples", "10000000PiB", "\u0663GiB"])
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(BadSetting, match=r"--max-stored .* is (not a size|too large)"):
        parse_size(text, what="--max-stored")

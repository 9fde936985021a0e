"""`horizond backup`, `restore` and `check` as they are typed."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from horizon_server.cli import run
from horizon_server.db.database import migrate

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def invoke(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["horizond", *map(str, arguments)])
        code = run()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return invoke


def test_a_backup_is_made_restored_and_checked(command: Command, tmp_path: Path) -> None:
    state, backup, restored = tmp_path / "state", tmp_path / "backup", tmp_path / "restored"
    migrate(state / "horizon.db")
    assert command("user", "add", "ada", "--state-dir", state)[0] == 0
    code, out, said = command("backup", backup, "--state-dir", state)
    assert (code, out, "copy it to another disk" in said) == (0, "", True), said
    code, _, said = command("restore", backup, "--state-dir", restored)
    assert (code, "next: horizond check" in said) == (0, True), said
    assert json.loads(command("user", "list", "-o", "json", "--state-dir", restored)[1])[0]["name"] == "ada"
    assert command("restore", backup, "--state-dir", restored)[0] == 2
    code, _, said = command("restore", backup, "--state-dir", restored, "--replace")
    assert (code, f"the database that was there is {restored}/before-restore-" in said) == (0, True), said
    code, out, said = command("check", "--full", "--state-dir", restored)
    assert (code, out, said.startswith("good: ")) == (0, "", True)
    assert command("check", "--backup-dir", backup)[0] == 0
    code, _, said = command("restore", tmp_path / "nothing", "--state-dir", tmp_path / "empty")
    assert (code, said.count("\n"), "holds no complete backup" in said) == (4, 1, True)


def test_a_check_says_what_is_wrong_and_what_to_do(command: Command, tmp_path: Path) -> None:
    state = tmp_path / "state"
    migrate(state / "horizon.db")
    assert command("user", "add", "ada", "--state-dir", state)[0] == 0
    with sqlite3.connect(state / "horizon.db") as connection:
        connection.execute("INSERT INTO blob_references VALUES ('aa', 'dataset_1')")
    connection.close()
    code, out, said = command("check", "--state-dir", state)
    assert (code, said.startswith("NOT good: ")) == (1, True)
    assert out == (
        "error: horizon.db: a reference to aa is left of dataset_1; put it back with: horizond restore BACKUP_DIR "
        "--replace\n"
    )
    [row] = json.loads(command("check", "--state-dir", state, "-o", "json")[1])
    assert (row["level"], row["where"]) == ("error", "horizon.db")
    # Nothing was changed.
    assert command("check", "--state-dir", state)[1] == out


def test_a_lost_file_ends_a_backup_with_1(command: Command, tmp_path: Path) -> None:
    state = tmp_path / "state"
    migrate(state / "horizon.db")
    assert command("user", "add", "ada", "--state-dir", state)[0] == 0
    files = json.dumps([{"path": "a.jsonl", "sha256": "ab" * 32, "size_bytes": 7}])
    with sqlite3.connect(state / "horizon.db") as connection:
        connection.execute(
            "INSERT INTO datasets VALUES ('dataset_1', 'ada', 'chats', 'messages', '{}', ?, 1, 1, 'd', 0)", [files]
        )
    connection.close()
    code, _, said = command("backup", tmp_path / "backup", "--state-dir", state)
    assert code == 1
    assert f"Error: blobs/ab/{'ab' * 32}, of dataset chats of ada: is missing" in said

"""`horizond audit`, and what other commands leave there."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from horizon_server.cli import run
from horizon_server.cli.audit import parse_since
from horizon_server.db.database import migrate
from horizon_server.errors import BadSetting
from horizon_server.services.audit import command_account

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    migrate(tmp_path / "state" / "horizon.db")

    def invoke(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["horizond", *arguments, "--state-dir", str(tmp_path / "state")])
        code = run()
        return code, capsys.readouterr().out

    return invoke


def test_every_command_that_changes_something_is_audited(command: Command) -> None:
    command("user", "add", "ada", "--role", "viewer")
    secret = command("token", "create", "ada", "--expires", "1h")[1].strip()
    assert command("token", "revoke", "tok_none")[0] == 4
    command("user", "list")
    command("token", "list")
    _, printed = command("audit", "-o", "json")
    entries = json.loads(printed)
    assert [(one["action"], one["resource"], one["outcome"]) for one in entries] == [
        ("horizond user add", "ada", "OK"),
        ("horizond token create", "ada", "OK"),
        ("horizond token revoke", "tok_none", "NOT_FOUND"),
    ]
    account, origin = command_account()
    assert {(one["user"], one["origin"]) for one in entries} == {(account, origin)}
    assert json.loads(entries[0]["detail"]) == {"role": "viewer"}
    assert secret not in printed
    _, selected = command("audit", "--action", "TOKEN", "--limit", "1", "-o", "json")
    assert [one["resource"] for one in json.loads(selected)] == ["tok_none"]
    assert command("audit", "--user", "nobody")[1] == "none\n"


def test_times_are_a_number_with_a_unit_or_a_day() -> None:
    assert parse_since("2h", 10_000.0) == 2800.0
    assert parse_since("1970-01-02", 0.0) == 86400.0
    for text in ("", "yesterday", "7", "7w"):
        with pytest.raises(BadSetting, match="is not a time"):
            parse_since(text, 0.0)

"""One daemon holds a state folder at a time, and no other account reads it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from horizon_server.errors import BadSetting, InUse
from horizon_server.state_dir import held_state_dir, private_state_dir, write_endpoints


def test_a_second_holder_is_refused_by_name_and_pid(tmp_path: Path) -> None:
    with (
        held_state_dir(tmp_path / "state") as state,
        pytest.raises(InUse, match=rf"held by another horizond \(pid {os.getpid()}\)"),
        held_state_dir(state),
    ):
        pass


def test_it_is_free_again_and_the_addresses_are_gone(tmp_path: Path) -> None:
    for _ in range(2):
        with held_state_dir(tmp_path) as state:
            write_endpoints(state, grpc="127.0.0.1:1", http="127.0.0.1:2", authority=None)
            assert json.loads((state / "endpoints.json").read_text())["grpc"] == "127.0.0.1:1"
        assert not (tmp_path / "endpoints.json").exists()


def test_what_a_killed_daemon_has_left_half_written_is_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    left, written = (tmp_path / f".state-id.{pid}.partial" for pid in (ended.pid, os.getpid()))
    for path in (left, written):
        path.write_text("half")
    with held_state_dir(tmp_path):
        assert not left.exists()
        assert written.exists(), "a process that lives is writing it"


def test_it_is_private(tmp_path: Path) -> None:
    with held_state_dir(tmp_path / "state") as state:
        assert state.stat().st_mode & 0o077 == 0


def test_an_open_folder_of_an_older_version_is_closed_with_a_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o755)
    state.chmod(0o755)
    for name in ("horizon.db", "horizon.db-wal"):
        (state / name).write_text("")
        (state / name).chmod(0o644)
    for _ in range(2):
        private_state_dir(state)
    assert [path.stat().st_mode & 0o777 for path in (state, *sorted(state.iterdir()))] == [0o700, 0o600, 0o600]
    assert caplog.text.count("is repaired") == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can work in the folder of another account")
@pytest.mark.parametrize("name", ["", "horizon.db"])
def test_root_puts_no_files_into_the_folder_of_another_account(tmp_path: Path, name: str) -> None:
    """`sudo horizond user add` once left a database that the daemon could not write."""
    state = tmp_path / "state"
    state.mkdir()
    if name:
        (state / name).touch()
    os.chown(state / name, 65534, 65534)
    with pytest.raises(BadSetting, match=r"belongs to nobody, and this command runs as root.*sudo -u nobody horizond"):
        private_state_dir(state)
    with pytest.raises(BadSetting, match="belongs to nobody"), held_state_dir(state):
        pass
    assert [path.name for path in state.iterdir()] == ([name] if name else [])


def test_a_folder_that_cannot_be_made_is_a_clear_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadSetting, match="cannot be used"), held_state_dir(tmp_path / "file" / "state"):
        pass

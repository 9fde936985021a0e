"""One daemon holds a state folder at a time."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from horizon_server.errors import BadSetting, InUse
from horizon_server.state_dir import held_state_dir, write_endpoints


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


def test_it_is_private(tmp_path: Path) -> None:
    with held_state_dir(tmp_path / "state") as state:
        assert state.stat().st_mode & 0o077 == 0


def test_a_folder_that_cannot_be_made_is_a_clear_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadSetting, match="cannot be used"), held_state_dir(tmp_path / "file" / "state"):
        pass

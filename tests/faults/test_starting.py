"""A daemon that cannot start says why in one sentence, ends with code 2 and holds nothing; beyond loopback it speaks
TLS only."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sqlite3
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.daemon_process import DaemonProcess, wait_for
from tests.support.later_schemas import LATER_HORIZOND, NEWEST, later_migrations, later_schemas
from tests.support.node import HORIZOND, Node, Shell, run_horizond

from horizon_server.db.database import migrate
from horizon_server.db.database_file import opened_file


def refused(state: Path, *flags: str, code: int = 2) -> str:
    """Start a daemon that must not come up, and return its sentence."""
    done = run_horizond("serve", "--state-dir", str(state), *flags)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def require_free(state: Path) -> None:
    """Nobody holds the state folder, and nothing says that somebody listens."""
    descriptor = os.open(state / "lock", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)
    assert not (state / "endpoints.json").exists()


@pytest.mark.parametrize("face", ["grpc", "http"])
def test_a_port_in_use(tmp_path: Path, face: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        addresses = {"grpc": "127.0.0.1:0", "http": "127.0.0.1:0", face: address}
        sentence = refused(tmp_path, "--grpc", addresses["grpc"], "--http", addresses["http"])
    assert f"cannot listen on {address}" in sentence
    assert f"--{face}" in sentence
    assert len(sentence.splitlines()) == 1, sentence
    require_free(tmp_path)


def test_a_state_folder_held_by_another_daemon(node: Node) -> None:
    assert node.daemon.process is not None
    sentence = refused(node.daemon.state_dir, "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0")
    assert f"is held by another horizond (pid {node.daemon.process.pid}); stop it" in sentence
    assert json.loads((node.daemon.state_dir / "endpoints.json").read_text())["pid"] == node.daemon.process.pid


def test_a_state_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "cannot be used" in refused(tmp_path / "file")
    listed = run_horizond("user", "list", "--state-dir", str(tmp_path / "file"))
    assert (listed.returncode, "Traceback" in listed.stderr) == (2, False)
    assert f"{tmp_path / 'file'} holds no daemon's state" in listed.stderr


def test_a_state_folder_whose_database_is_none(tmp_path: Path) -> None:
    (tmp_path / "horizon.db").write_bytes(b"this is no database, but long enough to be read as one" * 40)
    sentence = refused(tmp_path, "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0")
    assert "file is not a database" in sentence
    require_free(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("grcp = '127.0.0.1:0'\n", "setting grcp: there is no such setting; known: audit_days, "),
        ("num_threads = 'many'\n", "setting num_threads: Input should be a valid integer"),
        ("num_threads = \n", "cannot be read as TOML"),
        ("grpc = 'nowhere'\n", "grpc 'nowhere' is not HOST:PORT such as 127.0.0.1:7171"),
        ("log_level = 'loud'\n", "setting log_level"),
        ("tls_cert = '/no/cert.pem'\ntls_key = '/no/key.pem'\n", "setting tls_cert: /no/cert.pem does not exist"),
    ],
    ids=["key", "type", "syntax", "address", "choice", "certificate"],
)
def test_a_wrong_settings_file(tmp_path: Path, text: str, words: str) -> None:
    config = tmp_path / "horizond.toml"
    config.write_text(text)
    sentence = refused(tmp_path / "state", "--config", str(config))
    assert words in sentence


def test_a_settings_file_that_is_not_there(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path, "--config", str(tmp_path / "none.toml"))


def test_beyond_loopback_it_speaks_tls_to_those_who_know_its_authority(tmp_path: Path) -> None:
    state = tmp_path / "state"
    daemon = DaemonProcess(state)
    state.mkdir()
    with (state / "test.log").open("wb") as log:
        flags = ["--state-dir", str(state), "--grpc", "0.0.0.0:0", "--http", "127.0.0.1:0"]
        process = subprocess.Popen([*HORIZOND, "serve", *flags], stdout=log, stderr=log)
    try:
        wait_for((state / "endpoints.json").is_file, 240)
        endpoints = json.loads((state / "endpoints.json").read_text())
        daemon.admin("user", "add", "ada")
        token = daemon.admin("token", "create", "ada")
        server = f"localhost:{endpoints['grpc'].rpartition(':')[2]}"
        authority = endpoints["authority"]
        assert authority in daemon.log()
        plain = Shell(server, token, tmp_path)
        assert "no CA file is known for it; pass it with --ca" in plain.fails(5, "node", "status")
        (tmp_path / "token").write_text(token)
        login = ("login", server, "--token-file", "token")
        told = replace(plain, token=None).run(*login, "--ca", authority)
        assert (told.returncode, "as ada, role user" in told.stdout) == (0, True), told.stderr
    finally:
        process.terminate()
        try:
            assert process.wait(240) == 0
        finally:
            process.kill()
    for name in ("ca.key", "server.key"):
        assert (state / "tls" / name).stat().st_mode & 0o077 == 0


def test_the_state_folder_that_a_daemon_makes_is_private(tmp_path: Path) -> None:
    state = tmp_path / "state"
    before = os.umask(0o022)
    try:
        daemon = DaemonProcess(state, measures=True)
        daemon.start()
        try:
            daemon.admin("user", "add", "ada")
        finally:
            daemon.close()
    finally:
        os.umask(before)
    found = {
        path.name: path.stat().st_mode & 0o077
        for path in (state, *state.rglob("*"))
        if not path.name.startswith("test.")
    }
    assert "horizon.db" in found
    assert not any(found.values()), found


def test_a_daemon_copies_the_database_before_it_migrates_it(tmp_path: Path) -> None:
    """The copy, in the place of the database, is the way back to the version before."""
    state = tmp_path / "state"
    migrate(state / "horizon.db")
    daemon = DaemonProcess(state)
    daemon.program = ("-c", LATER_HORIZOND, str(later_migrations(tmp_path)))
    daemon.start()
    try:
        copy = state / f"before-migration-{NEWEST}.db"
        assert f"copy={copy}" in daemon.log()
        with opened_file(copy) as file:
            assert (file.schema, file.damage()) == (NEWEST, [])
        with sqlite3.connect(state / "horizon.db") as connection:
            assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [(later_schemas()[0],)]
        connection.close()
        daemon.terminate()
        daemon.start()
        assert daemon.log().count("copy=") == 1
    finally:
        daemon.close()


@pytest.mark.parametrize("command", [("serve", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"), ("user", "list")])
def test_a_database_of_a_newer_version(tmp_path: Path, command: tuple[str, ...]) -> None:
    state = tmp_path / "state"
    migrate(state / "horizon.db")
    with sqlite3.connect(state / "horizon.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '0099'")
    connection.close()
    done = run_horizond(*command, "--state-dir", str(state))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "was made by a newer version of horizon-train" in done.stderr

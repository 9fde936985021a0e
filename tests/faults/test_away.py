"""The daemon is away while people type commands: they wait for it and succeed, and each says so once. A wrong address
fails in seconds."""

from __future__ import annotations

import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.daemon_process import wait_for_state
from tests.support.node import Node, Shell, quick_spec

from horizon_client import Client, Unavailable
from horizon_client.connection import UNARY_RETRY
from horizon_client.resources import Job

# Limits for what hangs; a daemon takes many seconds to start on a busy machine.
pytestmark = pytest.mark.timeout(900)

SPEC = (
    "name: typed\nmodel: demo-model\ndataset: demo-chats\ntrain: {max_steps: 2, sequence_length: 64, "
    "tokens_per_step: 128}\n"
)
PATIENCE_S = 600
"""Of the commands here, in the place of 60 s: how long eight commands and a daemon take to start says how busy the
machine is."""
PATIENT = f"""
from horizon_client import connection

object.__setattr__(connection.UNARY_RETRY, "max_elapsed_s", {PATIENCE_S}.0)
"""
WAITS = f"nothing listens there; is the daemon running, and the port right?; trying again for up to {PATIENCE_S} s"


def patient_path(folder: Path) -> str:
    """A folder that makes commands patient that have it in their path."""
    (folder / "patient").mkdir()
    (folder / "patient" / "sitecustomize.py").write_text(PATIENT, "ascii")
    return str(folder / "patient")


@pytest.fixture
def cordoned(own_node: Callable[..., Node]) -> Node:
    """A daemon that starts no job, so that each stays in the state that its owner gave it."""
    node = own_node()
    with node.daemon.client(node.daemon.user("root", "admin")) as admin:
        admin.node.set_mode("cordoned")
    return node


@pytest.fixture
def jobs(cordoned: Node) -> Iterator[dict[str, Job]]:
    with cordoned.client() as client:
        made = {name: client.jobs.submit(quick_spec(name)) for name in ("cancelled", "paused", "resumed", "watched")}
        client.jobs.pause(made["resumed"].job_id)
        wait_for_state(client, made["resumed"].job_id, "PAUSED")
        yield made


@pytest.fixture
def typed(cordoned: Node, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `horizon` commands; none of them outlives the test."""
    shell = replace(cordoned.shell(tmp_path), extra={"PYTHONPATH": patient_path(tmp_path)})
    started = ExitStack()

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = started.enter_context(shell.start(*arguments))
        started.callback(command.kill)
        return command

    with started:
        yield start


@pytest.mark.parametrize("how", ["killed", "terminated"])
def test_commands_wait_for_a_daemon_that_restarts(
    cordoned: Node, jobs: dict[str, Job], typed: Callable[..., subprocess.Popen[str]], tmp_path: Path, how: str
) -> None:
    (tmp_path / "job.yaml").write_text(SPEC)
    if how == "killed":
        cordoned.daemon.kill()
    else:
        assert cordoned.daemon.terminate() == 0
    commands = {
        name: typed(*name.split())
        for name in (
            "job list",
            "job submit job.yaml -o name",
            f"job cancel {jobs['cancelled'].job_id}",
            f"job pause {jobs['paused'].job_id}",
            f"job resume {jobs['resumed'].job_id}",
            "token create --label away",
            "dataset list",
            "queue",
        )
    }
    notices = {}
    for name, command in commands.items():
        assert command.stderr is not None
        notices[name] = command.stderr.readline()
    cordoned.daemon.start()
    ready_at = time.monotonic()
    for name, command in commands.items():
        output, errors = command.communicate(timeout=300)
        assert command.returncode == 0, (name, output, errors)
        assert "cannot reach" in notices[name] and WAITS in notices[name], notices
        assert "trying again" not in errors, "said once"
    print(f"all {len(commands)} commands ended {time.monotonic() - ready_at:.1f} s after the daemon was ready")
    with cordoned.client() as client:
        states = {job.name: job.state for job in client.jobs.list()}
    assert states == {
        "cancelled": "CANCELLED",
        "paused": "PAUSED",
        "resumed": "QUEUED",
        "watched": "QUEUED",
        "typed": "QUEUED",
    }


def test_an_open_client_finds_a_daemon_that_is_back(cordoned: Node, jobs: dict[str, Job]) -> None:
    """Calls that are sent at most once met the pause between two attempts to connect, and failed although the daemon
    was up again."""
    once: list[Callable[[Client], object]] = [
        lambda client: client.jobs.resume(jobs["resumed"].job_id),
        lambda client: client.account.create_token(label="once"),
        lambda client: client.datasets.delete("unused"),
    ]
    with cordoned.client() as client:
        client.datasets.push([cordoned.dataset], name="unused")
        for call in once:
            cordoned.daemon.kill()
            with Client(cordoned.daemon.endpoints["grpc"], token=cordoned.token) as impatient:
                impatient._inner._connection.unary_retry = replace(UNARY_RETRY, max_elapsed_s=3.0)
                with pytest.raises(Unavailable, match="nothing listens there"):
                    call(impatient)
                cordoned.daemon.start()
                impatient._inner._connection.unary_retry = UNARY_RETRY
                began = time.monotonic()
                call(impatient)
                print(f"answered {time.monotonic() - began:.2f} s after the daemon was ready")


def test_a_mistyped_address_fails_in_seconds(tmp_path: Path) -> None:
    shell = Shell("127.0.0.1:1", "hzn_any", tmp_path)
    (tmp_path / "token").write_text("hzn_any")
    nobody = shell.fails(5, "login", "127.0.0.1:1", "--token-file", "token")
    assert "nothing listens there" in nobody
    assert "trying again" not in nobody, "who tries for more than two seconds says so"
    # Tried some times, which are over long before the patience is: `fails` waits for less.
    extra = {"HORIZON_CA": "system", "PYTHONPATH": patient_path(tmp_path)}
    unknown = replace(shell, server=f"{uuid.uuid4()}.invalid:7171", extra=extra)
    assert "the host name is not known" in unknown.fails(5, "node", "status")

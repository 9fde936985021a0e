"""Upgrades: this version's daemon on the state folder that a release has left, and the way back to that release."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.daemon_process import DaemonProcess, wait_for, wait_for_state, wait_for_step
from tests.support.later_schemas import NEWEST
from tests.support.loop_thread import LoopThread
from tests.support.released_states import (
    NEWER_SETTINGS,
    RELEASES,
    SETTINGS,
    STATE,
    code_of,
    kind_of_machine,
    schemas_of,
    unpack,
)
from tests.support.webhook_receiver import Receiver, receiver

from horizon_client import Client, NotFound, Unauthenticated

# Several daemons and workers start one after the other, each in minutes where the machine is busy.
pytestmark = pytest.mark.timeout(2400)
LIMIT_S = 900.0


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def facts(release: str, tmp_path: Path) -> dict[str, Any]:
    """What the release's archive says of the state folder, which is unpacked."""
    return unpack(release, tmp_path)


@pytest.fixture
def daemon(facts: dict[str, Any], tmp_path: Path) -> Iterator[DaemonProcess]:
    daemon = DaemonProcess(tmp_path / STATE, **SETTINGS, webhook_networks="127.0.0.0/8")
    try:
        yield daemon.start()
    finally:
        daemon.close()


@pytest.fixture
def inbox() -> Iterator[Receiver]:
    """A receiver of webhooks, in a thread."""
    thread, serving = LoopThread(), receiver()
    try:
        yield thread.call(serving.__aenter__())
        thread.call(serving.__aexit__(None, None, None))
    finally:
        thread.close()


def losses(client: Client, job_id: str) -> dict[int, float]:
    return {event.step: event.loss for event in client.jobs.watch(job_id) if event.kind == "step"}


def tensors(client: Client, job_id: str, to: Path) -> dict[str, bytes]:
    client.checkpoints.pull(job_id, to=to, with_trainer=True)
    return {str(path.relative_to(to)): path.read_bytes() for path in to.rglob("*.safetensors")}


def test_users_and_data_stay_and_a_job_continues_as_if_nothing_had_happened(
    daemon: DaemonProcess, facts: dict[str, Any], inbox: Receiver, tmp_path: Path
) -> None:
    tokens, num_steps = facts["tokens"], facts["num_steps"]
    with (
        daemon.client(tokens["root"]) as root,
        daemon.client(tokens["bob"]) as bob,
        daemon.client(tokens["eve"]) as eve,
    ):
        assert {job.name: job.state for job in root.jobs.list()} == {"whole": "SUCCEEDED", "half": "PAUSED"}
        assert [dataset.name for dataset in bob.datasets.list()] == ["chats"], "it is shared with the project lab"
        with pytest.raises(NotFound):
            bob.models.get("tiny")
        with pytest.raises(Unauthenticated):
            eve.jobs.list()
    with daemon.client(tokens["ada"]) as ada:
        assert (ada.datasets.get("chats").owner, ada.models.get("tiny").architecture) == ("ada", "qwen3")
        whole, half = (next(job for job in ada.jobs.list() if job.name == name) for name in ("whole", "half"))
        assert (whole.step, half.step) == (num_steps, facts["paused_at"])
        ada.webhooks.add(inbox.url())
        ada.jobs.resume(half.job_id)
        done = wait_for_state(ada, half.job_id, "SUCCEEDED", "FAILED", timeout_s=LIMIT_S)
        assert (done.state, done.step, done.attempt) == ("SUCCEEDED", num_steps, 2), done.message
        wait_for(lambda: bool(inbox.requests), LIMIT_S)
        assert (inbox.requests[0].json["type"], inbox.requests[0].json["data"]["step"]) == ("job.succeeded", num_steps)
        expected, found = losses(ada, whole.job_id), losses(ada, half.job_id)
        assert list(found) == list(range(1, num_steps + 1))
        if facts["machine"] == kind_of_machine():
            assert found == expected
            assert tensors(ada, half.job_id, tmp_path / "half") == tensors(ada, whole.job_id, tmp_path / "whole")
        else:  # The first steps are of another processor or torch, which round in another way.
            assert found == pytest.approx(expected, rel=0.02)
        # The files of the release's own checkpoint are read as they are.
        assert ada.checkpoints.pull(whole.job_id, to=tmp_path / "pulled").checkpoint.step == num_steps
        again = ada.jobs.submit(
            {
                "name": "next",
                "model": "tiny",
                "dataset": "chats",
                "init_from": f"{whole.job_id}@last",
                "train": {"max_steps": 2, "sequence_length": 64, "compile": "off"},
            }
        )
        assert wait_for_state(ada, again.job_id, "SUCCEEDED", "FAILED", timeout_s=LIMIT_S).state == "SUCCEEDED"
    daemon.admin("check", "--full")


def dump(path: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        return list(database.iterdump())


def test_the_way_back_is_the_release_on_the_backup_from_before_the_upgrade(
    release: str, facts: dict[str, Any], tmp_path: Path
) -> None:
    """What deploy/README.md says under Upgrade, step by step: the release itself continues the job."""
    state, backup = tmp_path / STATE, tmp_path / STATE / "backup"
    token, num_steps, paused_at = facts["tokens"]["ada"], facts["num_steps"], facts["paused_at"]
    as_released = dump(state / "horizon.db")
    upgraded = DaemonProcess(state, **SETTINGS)
    upgraded.admin("backup", str(backup))
    assert dump(backup / "horizon.db") == as_released
    with_entry = dump(state / "horizon.db")
    try:
        with upgraded.start().client(token) as ada:
            half = next(job for job in ada.jobs.list() if job.name == "half")
            ada.jobs.resume(half.job_id)
            wait_for_step(ada, half.job_id, paused_at + 1, timeout_s=LIMIT_S)
        upgraded.terminate()
    finally:
        upgraded.close()
    checkpoints = (state / "jobs" / half.job_id / "checkpoints").glob("step-*")
    reached = max(int(folder.name.removeprefix("step-")) for folder in checkpoints)
    assert paused_at < reached < num_steps
    [schema] = [line for line in as_released if line.startswith('INSERT INTO "alembic_version"')]
    copy = state / f"before-migration-{schema.split(chr(39))[1]}.db"
    assert dump(copy) == with_entry, "the other way back"
    environment = code_of(release, tmp_path / "release")
    if not environment or NEWEST in schemas_of(environment):
        pytest.skip(f"this checkout does not have the history of {release}, so that its code cannot be run")
    old = DaemonProcess(state, **SETTINGS, **NEWER_SETTINGS)
    old.environment = environment
    try:
        old.launch()
        assert not old.comes_up(), "a database that was migrated is not for the release"
        assert "was made by a newer version of horizon-train" in old.log()
        old.admin("restore", str(backup), "--replace")
        with old.start().client(token) as ada:
            half = ada.jobs.get(half.job_id)
            assert (half.state, half.step) == ("PAUSED", paused_at)
            ada.jobs.resume(half.job_id)
            done = wait_for_state(ada, half.job_id, "SUCCEEDED", "FAILED", timeout_s=LIMIT_S)
            assert (done.state, done.step) == ("SUCCEEDED", num_steps), done.message
            # What was trained since is not lost, its figures are: they were in the newer database.
            steps = [*range(1, paused_at + 1), *range(reached + 1, num_steps + 1)]
            assert list(losses(ada, half.job_id)) == steps
    finally:
        old.close()

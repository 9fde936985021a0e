"""Upgrades: this version's daemon on the state folder that a release has left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.daemon_process import DaemonProcess, wait_for_state
from tests.support.released_states import RELEASES, SETTINGS, STATE, kind_of_machine, unpack

from horizon_client import Client, NotFound, Unauthenticated


@pytest.fixture(params=RELEASES)
def facts(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """What the release's archive says of the state folder, which is unpacked."""
    return unpack(request.param, tmp_path)


@pytest.fixture
def daemon(facts: dict[str, Any], tmp_path: Path) -> Iterator[DaemonProcess]:
    daemon = DaemonProcess(tmp_path / STATE, **SETTINGS)
    try:
        yield daemon.start()
    finally:
        daemon.close()


def losses(client: Client, job_id: str) -> dict[int, float]:
    return {event.step: event.loss for event in client.jobs.watch(job_id) if event.kind == "step"}


def tensors(client: Client, job_id: str, to: Path) -> dict[str, bytes]:
    client.checkpoints.pull(job_id, to=to, with_trainer=True)
    return {str(path.relative_to(to)): path.read_bytes() for path in to.rglob("*.safetensors")}


def test_users_and_data_stay_and_a_job_continues_as_if_nothing_had_happened(
    daemon: DaemonProcess, facts: dict[str, Any], tmp_path: Path
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
        ada.jobs.resume(half.job_id)
        done = wait_for_state(ada, half.job_id, "SUCCEEDED", "FAILED", timeout_s=240)
        assert (done.state, done.step, done.attempt) == ("SUCCEEDED", num_steps, 2), done.message
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
        assert wait_for_state(ada, again.job_id, "SUCCEEDED", "FAILED", timeout_s=240).state == "SUCCEEDED"
    daemon.admin("check", "--full")

"""Attempts that die, and daemons that are told to stop at every moment of one: the true reason, and nothing is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from tests.support.daemon_process import wait_for, wait_for_state, wait_for_step
from tests.support.node import Node, quick_spec
from tests.support.processes import processes_of

from horizon_client import Client

MakeNode = Callable[..., Node]
PREPARATION, WORKER = "horizon_server.datasets.preparing", "horizon_server.worker"


def only_child(module: str, state_dir: Path) -> int:
    found: list[int] = []

    def is_there() -> bool:
        found[:] = processes_of(module, state_dir)
        return found != []

    wait_for(is_there, 240, every_s=0.005)
    return found[0]


def test_a_killed_preparation_is_done_again_and_leaves_nothing(node: Node) -> None:
    prepared = node.daemon.state_dir / "prepared"
    with node.client() as client:
        # It waits before it begins, to be killed there.
        node.daemon.resting.hold(PREPARATION)
        # lengths of their own: nothing that another case has prepared fits
        job = client.jobs.submit(quick_spec("dead-preparation", sequence_length=71))
        following = client.jobs.submit(quick_spec("following"))
        os.kill(only_child(PREPARATION, node.daemon.state_dir), signal.SIGKILL)
        node.daemon.resting.let_begin(PREPARATION)
        assert wait_for_state(client, following.job_id, "FAILED", "SUCCEEDED").state == "SUCCEEDED"
        ended = wait_for_state(client, job.job_id, "FAILED", "SUCCEEDED")
        assert (ended.state, ended.attempt) == ("SUCCEEDED", 2), ended.message
        why = [event.message for event in client.jobs.watch(job.job_id) if event.kind == "state"]
        assert any("the data preparation was killed by SIGKILL" in message for message in why), why
    assert [folder.name for folder in prepared.iterdir() if "." in folder.name] == []


def test_prepared_data_that_somebody_deleted_is_made_again(node: Node) -> None:
    with node.client() as client:
        first = client.jobs.submit(quick_spec("whole", sequence_length=73))
        assert wait_for_state(client, first.job_id, "FAILED", "SUCCEEDED").state == "SUCCEEDED"
        prepared = (node.daemon.state_dir / "prepared").rglob("tokens.safetensors")
        max(prepared, key=lambda file: file.stat().st_mtime).unlink()
        second = client.jobs.submit(quick_spec("damaged", sequence_length=73))
        ended = wait_for_state(client, second.job_id, "FAILED", "SUCCEEDED")
        assert ended.state == "SUCCEEDED", ended.message


def test_two_users_take_turns_and_see_only_their_own(node: Node, tmp_path: Path) -> None:
    bob = node.shell(tmp_path, node.daemon.user("bob"))
    (tmp_path / "job.yaml").write_text(
        "name: bobs\nmodel: bobs-model\ndataset: bobs-chats\ntrain: {max_steps: 2, sequence_length: 64, "
        "tokens_per_step: 128}\n"
    )
    bob.works("model", "push", str(node.model), "--name", "bobs-model")
    bob.works("dataset", "push", str(node.dataset), "--name", "bobs-chats")
    with node.client() as ada:
        adas = ada.jobs.submit(quick_spec("adas"))
        bobs = bob.works("job", "submit", "job.yaml", "-o", "name").strip()
        assert f"job '{adas.job_id}' does not exist" in bob.fails(4, "job", "get", adas.job_id)
        assert "SUCCEEDED" in bob.works("job", "watch", bobs).splitlines()[-1]
        assert wait_for_state(ada, adas.job_id, "FAILED", "SUCCEEDED").state == "SUCCEEDED"
    assert bob.works("job", "list", "-o", "name").split() == [bobs]


def test_sigterm_at_every_moment_of_an_attempt(own_node: MakeNode) -> None:
    node = own_node()
    daemon = node.daemon
    # Each moment lasts until the test has seen it.
    daemon.resting.hold(PREPARATION)
    with node.client() as client:
        spec = quick_spec("moments", max_steps=100_000, checkpoint={"every_steps": 0, "keep_last": 1})
        job = client.jobs.submit(spec)
        only_child(PREPARATION, daemon.state_dir)
    assert daemon.terminate() == 0
    assert processes_of("horizon_server.", daemon.state_dir) == []
    daemon.resting.let_begin(PREPARATION)
    daemon.resting.hold(WORKER)
    daemon.start()
    with node.client() as client:
        only_child(WORKER, daemon.state_dir)
        assert client.jobs.get(job.job_id).state == "STARTING"
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGTERM)
    daemon.resting.let_begin(WORKER)
    assert daemon.process.wait(240) == 0
    daemon.start()
    with node.client() as client:
        wait_for_step(client, job.job_id, 3)
    assert daemon.terminate() == 0
    daemon.start()
    with node.client() as client:
        at = client.jobs.get(job.job_id).step
        assert at >= 3
        wait_for_step(client, job.job_id, at + 2)
        _require_one_story(client, job.job_id, at)
        client.jobs.cancel(job.job_id)
        assert wait_for_state(client, job.job_id, "CANCELLED").attempt == 4
    assert list((daemon.state_dir / "prepared").glob("*.*")) == []


def _require_one_story(client: Client, job_id: str, at: int) -> None:
    """No step ran twice, and the run went on from the checkpoint of the drain."""
    steps, reasons, texts = [], [], []
    for event in client.jobs.watch(job_id):
        if event.kind == "step":
            steps.append(event.step)
            if event.step > at:
                break
        elif event.kind == "state":
            reasons.append(event.reason)
        elif event.kind == "message":
            texts.append(event.text)
    assert steps == list(range(1, at + 2))
    assert reasons.count("DRAINED") == 3
    assert f"continues after step {at}" in texts

"""A job from the laptop and back, and what becomes of it when it is stopped, paused, drained or when its daemon is
killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch
from tests.support.both_daemons import AnyDaemon, demo_spec, process_only
from tests.support.daemon_process import wait_for_state, wait_for_step
from transformers import AutoModelForCausalLM

from horizon_client import Client, DoesNotFit, InvalidRequest, NotFound

Push = Callable[[Client], None]


def losses(client: Client, job_id: str) -> dict[int, float]:
    return {event.step: event.loss for event in client.jobs.watch(job_id) if event.kind == "step"}


def sequences(client: Client, job_id: str) -> list[int]:
    return [event.sequence for event in client.jobs.watch(job_id)]


def test_from_submit_to_pulled_files(daemon: AnyDaemon, push_demo: Push, tmp_path: Path) -> None:
    with daemon.client(daemon.user("ada")) as client:
        push_demo(client)
        job = client.jobs.submit(demo_spec(max_steps=6))
        assert list(losses(client, job.job_id)) == list(range(1, 7))
        done = client.jobs.get(job.job_id)
        assert (done.state, done.step, done.num_steps, done.attempt) == ("SUCCEEDED", 6, 6, 1), done.message
        found = sequences(client, job.job_id)
        assert found == list(range(1, len(found) + 1))
        pulled = client.checkpoints.pull(job.job_id, to=tmp_path / "tuned")
    assert pulled.checkpoint.step == 6
    assert (tmp_path / "tuned" / "model.safetensors").stat().st_size > 0


@process_only("the training itself")
def test_the_tuned_model_is_better_and_transformers_loads_it(
    daemon: AnyDaemon, push_demo: Push, tmp_path: Path
) -> None:
    with daemon.client(daemon.user("ada")) as client:
        push_demo(client)
        job = client.jobs.submit(demo_spec(max_steps=12, tokens_per_step=1024))
        seen = losses(client, job.job_id)
        assert seen[12] < 0.8 * seen[1]
        assert "step 12/12: loss" in b"".join(client.jobs.logs(job.job_id)).decode()
        done = client.jobs.get(job.job_id)
        client.checkpoints.pull(job.job_id, to=tmp_path / "tuned")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned", dtype=torch.float32)
    assert done.plan is not None
    assert sum(p.numel() for p in model.parameters()) == done.plan.num_parameters


def test_jobs_share_the_device_and_wait_while_the_node_is_cordoned(
    make_daemon: Callable[..., AnyDaemon], push_demo: Push
) -> None:
    daemon = make_daemon(time_slice_s=0.3)
    with daemon.client(daemon.user("ada")) as client, daemon.client(daemon.user("root", role="admin")) as admin:
        push_demo(client)
        long = client.jobs.submit(demo_spec("long", max_steps=100_000))
        wait_for_step(client, long.job_id, 2)
        short = client.jobs.submit(demo_spec("short", max_steps=2))
        assert wait_for_state(client, short.job_id, "SUCCEEDED", "FAILED").state == "SUCCEEDED"
        assert client.jobs.get(long.job_id).state == "RUNNING"
        admin.node.set_mode("cordoned")
        second, third = (client.jobs.submit(demo_spec(name, max_steps=2)) for name in ("second", "third"))
        assert [client.jobs.get(j.job_id).queue_position for j in (second, third)] == [1, 2]
        client.jobs.cancel(third.job_id)
        client.jobs.cancel(long.job_id)
        assert wait_for_state(client, long.job_id, "CANCELLED").reason == "CANCELLED"
        admin.node.set_mode("open")
        assert wait_for_state(client, second.job_id, "SUCCEEDED", "FAILED").state == "SUCCEEDED"
        assert client.jobs.get(third.job_id).attempt == 0


def test_paused_drained_and_killed_runs_equal_the_uninterrupted_one(daemon: AnyDaemon, push_demo: Push) -> None:
    token = daemon.user("ada")
    spec = demo_spec("whole", max_steps=60, checkpoint={"every_steps": 10, "keep_last": 1})
    with daemon.client(token) as client:
        push_demo(client)
        whole = client.jobs.submit(spec)
        wanted = losses(client, whole.job_id)
        # Its worker rests there, so that it is in the middle of the job however long this test needs to look.
        daemon.resting.after(12)
        cut = client.jobs.submit({**spec, "name": "cut"})
        wait_for_step(client, cut.job_id, 12)
        client.jobs.pause(cut.job_id)
        assert wait_for_state(client, cut.job_id, "PAUSED").step == 12
        daemon.resting.after(17)
        client.jobs.resume(cut.job_id)
        wait_for_step(client, cut.job_id, 17)
    assert daemon.terminate() == 0
    assert daemon.worker_pids() == []
    daemon.resting.after(21)
    daemon.start()
    with daemon.client(token) as client:
        wait_for_state(client, cut.job_id, "RUNNING")
        wait_for_step(client, cut.job_id, 21)
    daemon.kill()
    daemon.resting.go_on()
    daemon.start()
    with daemon.client(token) as client:
        seen = losses(client, cut.job_id)
        done = client.jobs.get(cut.job_id)
        # The worker trained on while the daemon was dead, and the next one took it over.
        assert (done.state, done.attempt) == ("SUCCEEDED", 3), done.message
        reasons = [event.reason for event in client.jobs.watch(cut.job_id) if event.kind == "state"]
        assert {"PAUSED", "RESUMED", "DRAINED"} <= set(reasons)
        assert "RESTARTED" not in reasons
    assert {step: loss for step, loss in seen.items() if wanted[step] != loss} == {}
    assert set(seen) == set(range(1, 61))


def test_a_killed_worker_is_replaced_without_a_person(make_daemon: Callable[..., AnyDaemon], push_demo: Push) -> None:
    daemon = make_daemon(max_restarts=2)
    with daemon.client(daemon.user("ada")) as client:
        push_demo(client)
        daemon.resting.after(7)
        job = client.jobs.submit(demo_spec(max_steps=40, checkpoint={"every_steps": 5}))
        wait_for_step(client, job.job_id, 7)
        [pid] = daemon.worker_pids()
        os.kill(pid, signal.SIGKILL)
        daemon.resting.go_on()
        done = wait_for_state(client, job.job_id, "SUCCEEDED", "FAILED")
        assert (done.state, done.attempt) == ("SUCCEEDED", 2), done.message
        reasons = [event.reason for event in client.jobs.watch(job.job_id) if event.kind == "state"]
        assert "RESTARTED" in reasons


def test_a_killed_worker_fails_its_attempt_and_can_be_resumed(
    make_daemon: Callable[..., AnyDaemon], push_demo: Push
) -> None:
    daemon = make_daemon(max_restarts=0)
    with daemon.client(daemon.user("ada")) as client:
        push_demo(client)
        daemon.resting.after(7)
        job = client.jobs.submit(demo_spec(max_steps=40, checkpoint={"every_steps": 5}))
        wait_for_step(client, job.job_id, 7)
        [pid] = daemon.worker_pids()
        os.kill(pid, signal.SIGKILL)
        daemon.resting.go_on()
        failed = wait_for_state(client, job.job_id, "FAILED")
        assert failed.reason == "WORKER_DIED"
        assert "SIGKILL" in failed.message
        assert client.node.status().user == "ada"
        client.jobs.resume(job.job_id)
        done = wait_for_state(client, job.job_id, "SUCCEEDED", "FAILED")
        assert (done.state, done.attempt) == ("SUCCEEDED", 2), done.message
        texts = [event.text for event in client.jobs.watch(job.job_id) if event.kind == "message"]
        assert any(text.startswith("continues after step") for text in texts)


def test_users_see_and_touch_only_their_own(daemon: AnyDaemon, push_demo: Push) -> None:
    ada, bob = daemon.user("ada"), daemon.user("bob")
    root, eve = daemon.user("root", role="admin"), daemon.user("eve", role="viewer")
    with daemon.client(ada) as mine:
        push_demo(mine)
        job = mine.jobs.submit(demo_spec(max_steps=2))
        wait_for_state(mine, job.job_id, "SUCCEEDED")
    with daemon.client(bob) as theirs:
        assert (theirs.jobs.list(), theirs.datasets.list(), theirs.models.list()) == ([], [], [])
        for call in (theirs.jobs.get, theirs.jobs.cancel, theirs.checkpoints.list):
            with pytest.raises(NotFound):
                call(job.job_id)
        with pytest.raises(NotFound, match="demo-model"):
            theirs.jobs.submit(demo_spec())
    with daemon.client(root) as admin:
        assert [found.job_id for found in admin.jobs.list()] == [job.job_id]
        assert admin.checkpoints.list(job.job_id)[-1].step == 2
    base = f"http://{daemon.endpoints['http']}/horizon/v1"
    for token, code in ((ada, 200), (bob, 404), (root, 200), (eve, 200), ("wrong", 401)):
        answer = httpx.get(f"{base}/jobs/{job.job_id}", headers={"authorization": f"Bearer {token}"}, timeout=240)
        assert answer.status_code == code, answer.text
    assert httpx.get(f"{base}/jobs", timeout=240).status_code == 401


def test_a_job_that_cannot_fit_is_refused_with_the_numbers(
    make_daemon: Callable[..., AnyDaemon], push_demo: Push
) -> None:
    daemon = make_daemon(host_memory_limit_bytes=1_100_000_000)
    with daemon.client(daemon.user("ada")) as client:
        push_demo(client)
        with pytest.raises(DoesNotFit, match=r"needs \d+\.\d+ [MG]iB of host memory and \d+\.\d+ MiB are available"):
            client.jobs.submit(demo_spec(tokens_per_step=1_000_000))
        assert client.jobs.list() == []


@process_only("the training itself")
def test_without_clipping_or_room_on_the_device_a_job_takes_less_memory_and_the_same_steps(
    make_daemon: Callable[..., AnyDaemon], push_demo: Push
) -> None:
    roomy = make_daemon(state="roomy")
    with roomy.client(roomy.user("ada")) as client:
        push_demo(client)
        job = client.jobs.submit(demo_spec(max_steps=3, max_grad_norm=None))
        kept = losses(client, job.job_id)
        plan = client.jobs.get(job.job_id).plan
    assert plan is not None
    assert plan.host_bytes["gradients"] == 0
    tight = make_daemon(device_arena_bytes=plan.device_total_bytes - 1, state="tight")
    with tight.client(tight.user("ada")) as client:
        push_demo(client)
        job = client.jobs.submit(demo_spec(max_steps=3, max_grad_norm=None))
        offloaded = losses(client, job.job_id)
        done = client.jobs.get(job.job_id)
    assert (done.state, done.step) == ("SUCCEEDED", 3), done.message
    assert done.plan is not None
    assert done.plan.device_bytes["activations"] < plan.device_bytes["activations"]
    assert offloaded == kept


def test_a_malformed_spec_names_every_field(daemon: AnyDaemon) -> None:
    with daemon.client(daemon.user("ada")) as client:
        with pytest.raises(InvalidRequest) as caught:
            client.jobs.submit(demo_spec(learning_rate=-1.0, sequence_length=0))
        assert {v.field for v in caught.value.violations} == {"train.learning_rate", "train.sequence_length"}


def test_drain_says_not_serving_and_takes_no_new_jobs(daemon: AnyDaemon, push_demo: Push) -> None:
    with daemon.client(daemon.user("ada")) as client:
        push_demo(client)
        job = client.jobs.submit(demo_spec(max_steps=100_000))
        wait_for_step(client, job.job_id, 2)
        assert httpx.get(f"http://{daemon.endpoints['http']}/readyz", timeout=240).status_code == 200
    assert daemon.terminate() == 0
    assert daemon.worker_pids() == []

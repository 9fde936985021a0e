"""Jobs on one device and on two of a real node: the same result to the last bit, also where a rank, or the daemon, is
killed in between."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from tests.support.both_daemons import demo_spec
from tests.support.daemon_process import DaemonProcess, wait_for, wait_for_state
from tests.support.processes import processes_of
from tests.support.pushed_state import PushedState

from horizon_client import Client, InvalidRequest
from horizon_client.job_spec_types import JobSpec
from horizon_client.resources import Job, StateEvent, StepEvent


def job(
    name: str, *, gpus: int | str, lanes: int = 4, max_steps: int = 16, parallel: str = "auto", **more: Any
) -> JobSpec:
    train: dict[str, Any] = {"max_steps": max_steps, "tokens_per_step": 512, "warmup_steps": 2, "lanes": lanes}
    train["parallel"] = parallel
    more = {"gpus": gpus, "device": "host", "eval_fraction": 0.1, "eval_every_steps": 8, **more}
    return cast("JobSpec", {**demo_spec(name, **train), **more})


@pytest.fixture
def daemon(tmp_path: Path, pushed: PushedState) -> Iterator[DaemonProcess]:
    running = pushed.daemon(tmp_path / "state", host_devices=2, num_threads=2, keep_devices_s=0.0)
    running.start()
    try:
        yield running
    finally:
        running.close()


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[Client]:
    with daemon.client(daemon.user("ada")) as opened:
        yield opened


def steps_of(client: Client, job: Job) -> dict[int, tuple[float, float]]:
    """Loss and norm of each step; one that is done again, after a kill in the middle of an update, has the same."""
    events = client.jobs.watch(job.job_id)
    return {event.step: (event.loss, event.grad_norm) for event in events if isinstance(event, StepEvent)}


def exported(client: Client, job: Job, folder: Path, *, at: int = 16) -> dict[str, bytes]:
    client.checkpoints.pull(job.job_id, folder, at=at)
    (file,) = folder.glob("*.safetensors")
    return {name: tensor.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in load_file(file).items()}


@pytest.mark.timeout(1800)
def test_two_devices_give_the_bits_of_one_whoever_dies(daemon: DaemonProcess, client: Client, tmp_path: Path) -> None:
    one = client.jobs.submit(job("one", gpus=1))
    wait_for_state(client, one.job_id, "SUCCEEDED")
    by_rows = client.jobs.submit(job("rows", gpus=2, parallel="rows"))
    wait_for_state(client, by_rows.job_id, "SUCCEEDED")
    two = client.jobs.submit(job("layers", gpus=2, parallel="layers"))
    wait_for(lambda: client.jobs.get(two.job_id).step >= 3, 120.0)
    (rank,) = processes_of("horizon_server.worker.rank", daemon.state_dir)
    os.kill(rank, signal.SIGKILL)
    killed_s = time.monotonic()
    wait_for(lambda: client.jobs.get(two.job_id).attempt == 2, 60.0)
    wait_for(lambda: rank not in processes_of("horizon_server.worker.rank", daemon.state_dir), 60.0)
    wait_for(lambda: client.jobs.get(two.job_id).state == "RUNNING", 120.0)
    print(f"the next attempt ran {time.monotonic() - killed_s:.1f} s after the kill")
    daemon.kill()
    daemon.start()
    wait_for_state(client, two.job_id, "SUCCEEDED")

    wanted, steps = exported(client, one, tmp_path / "one"), steps_of(client, one)
    for parallel, other in (("rows", by_rows), ("layers", two)):
        assert exported(client, other, tmp_path / parallel) == wanted
        assert steps_of(client, other) == steps
        found = client.jobs.get(other.job_id)
        assert found.plan is not None and (found.plan.num_devices, found.plan.lanes) == (2, 4)
        assert (found.plan.device, found.plan.parallel) == ("host:0,host:1", parallel)
    states = [event for event in client.jobs.watch(two.job_id) if isinstance(event, StateEvent)]
    messages = [event.message for event in states]
    # Of rank 1; or of the worker, where a busy machine gives it no time to end by itself and say why.
    assert any("was killed by SIGKILL" in message for message in messages), messages
    assert not processes_of("horizon_server.worker", daemon.state_dir)


@pytest.mark.timeout(2400)
def test_a_job_that_grows_and_shrinks_while_it_runs_has_the_bits_of_one_that_does_not(
    client: Client, tmp_path: Path
) -> None:
    # So long that a change pays, whatever a restart costs here; it is compared at one of its checkpoints.
    many: dict[str, Any] = {"max_steps": 100_000, "checkpoint": {"every_steps": 8, "keep_last": 1000}}

    def runs_on(job: Job, *devices: str) -> Job:
        """Wait until the job has done steps on these devices, and for its next checkpoint."""
        wait_for(lambda: on_devices(client.jobs.get(job.job_id)) == devices, 600.0)
        done = client.jobs.get(job.job_id).step
        wait_for(lambda: any(one.step > done for one in client.checkpoints.list(job.job_id)), 600.0)
        found = client.jobs.get(job.job_id)
        assert on_devices(found) == devices
        return found

    holder = client.jobs.submit(job("holder", gpus=1, **many))
    runs_on(holder, "host:0")
    moving = client.jobs.submit(job("moving", gpus="1-2", **many))
    assert runs_on(moving, "host:1").spec["gpus"] == "1-2"
    client.jobs.cancel(holder.job_id)
    runs_on(moving, "host:0", "host:1")
    holder = client.jobs.submit(job("holder", gpus=1, **many))
    wait_for(lambda: len(on_devices(client.jobs.get(moving.job_id))) == 1, 600.0)
    last = runs_on(moving, *on_devices(client.jobs.get(moving.job_id)))
    assert last.attempt == 3
    for one in (holder, moving):
        client.jobs.cancel(one.job_id)
        wait_for_state(client, one.job_id, "CANCELLED")

    at = max(one.step for one in client.checkpoints.list(moving.job_id))
    steady = client.jobs.submit(job("steady", gpus=2, **many, limits={"max_steps": at}))
    wait_for_state(client, steady.job_id, "SUCCEEDED", timeout_s=900.0)
    assert exported(client, moving, tmp_path / "moving", at=at) == exported(client, steady, tmp_path / "steady", at=at)
    steps = [event.step for event in client.jobs.watch(moving.job_id) if isinstance(event, StepEvent)]
    assert steps == list(range(1, len(steps) + 1)), "no step is repeated"
    of_moving, of_steady = steps_of(client, moving), steps_of(client, steady)
    assert {step: of_moving[step] for step in of_steady} == of_steady


def on_devices(job: Job) -> tuple[str, ...]:
    """The devices of a job that runs; nothing before."""
    return tuple(job.plan.device.split(",")) if job.plan is not None and job.state == "RUNNING" else ()


def test_what_the_node_cannot_do_is_refused_with_what_it_can(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="gpus is 3 and this node's processors are divided into 2 devices"):
        client.jobs.submit(job("three", gpus=3))
    with pytest.raises(InvalidRequest, match=r"train\.lanes is 1 and gpus is 2"):
        client.jobs.submit(job("few", gpus=2, lanes=1))
    with pytest.raises(InvalidRequest, match="power of two"):
        client.jobs.submit(job("odd", gpus=2, lanes=6))

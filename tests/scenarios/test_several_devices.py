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


def job(name: str, *, gpus: int, lanes: int = 4, parallel: str = "auto") -> JobSpec:
    train: dict[str, Any] = {"max_steps": 16, "tokens_per_step": 512, "warmup_steps": 2, "lanes": lanes}
    train["parallel"] = parallel
    more: dict[str, Any] = {"gpus": gpus, "device": "host", "eval_fraction": 0.1, "eval_every_steps": 8}
    return cast("JobSpec", {**demo_spec(name, **train), **more})


@pytest.fixture
def daemon(tmp_path: Path, pushed: PushedState) -> Iterator[DaemonProcess]:
    running = pushed.daemon(tmp_path / "state", host_devices=2, num_threads=2)
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


def exported(client: Client, job: Job, folder: Path) -> dict[str, bytes]:
    client.checkpoints.pull(job.job_id, folder, at=16)
    (file,) = folder.glob("*.safetensors")
    return {name: tensor.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in load_file(file).items()}


@pytest.mark.timeout(600)
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
    assert any("rank 1 was killed by SIGKILL" in event.message for event in states)
    assert not processes_of("horizon_server.worker", daemon.state_dir)


def test_what_the_node_cannot_do_is_refused_with_what_it_can(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="gpus is 3 and this node's processors are divided into 2 devices"):
        client.jobs.submit(job("three", gpus=3))
    with pytest.raises(InvalidRequest, match=r"train\.lanes is 1 and gpus is 2"):
        client.jobs.submit(job("few", gpus=2, lanes=1))
    with pytest.raises(InvalidRequest, match="power of two"):
        client.jobs.submit(job("odd", gpus=2, lanes=6))

"""The head of a fleet is killed again and again while a box trains a job that it sent there: the box does not notice,
and in the end the head has every event, once and in order, and hands out the box's own bytes.

HORIZON_KILLS is the number of kills, HORIZON_KILLS_SEED what their moments are drawn from.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from tests.support.daemon_process import DaemonProcess, free_address, wait_for
from tests.support.node import Shell, quick_spec, run_horizond
from tests.support.processes import processes_of
from tests.support.pushed_state import PushedState
from tests.support.unattended import Inputs, UnattendedUser

from horizon_client.job_spec_types import JobSpec
from horizon_client.resources import JobEvent, StepEvent
from horizon_server.store.manifest import MANIFEST_FILE

NUM_KILLS = int(os.environ.get("HORIZON_KILLS", "2"))
SEED = int(os.environ.get("HORIZON_KILLS_SEED", "10"))
# A kill comes within so many steps of the box. It must do STEPS_ALONE while no head is there, and rests after
# STEPS_AWAY: however long the head needs to start, the job lasts until the last kill.
STEPS_BEFORE, STEPS_ALONE, STEPS_AWAY = 25, 20, 100
NUM_STEPS = (STEPS_BEFORE + STEPS_AWAY) * (NUM_KILLS + 1)
LONG_S = 240.0

pytestmark = pytest.mark.timeout(300 + 60 * NUM_KILLS)


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The daemon box1, which sends jobs to the daemon box2."""

    head: DaemonProcess
    box: DaemonProcess
    token: str
    """Of ada at the head, who is not known at the box before her job is."""


@pytest.fixture
def fleet(tmp_path: Path, pushed: PushedState) -> Iterator[Fleet]:
    key, address = tmp_path / "fleet.pem", free_address()
    made = run_horizond("node", "key", str(key))
    assert made.returncode == 0, made.stderr
    common: dict[str, Any] = {"fleet_address": "127.0.0.1", "fleet_key_file": str(key), "num_threads": 1}
    port = int(address.rpartition(":")[2])
    box = DaemonProcess(tmp_path / "box2", box_name="box2", box_port=port, **common).let_children_rest()
    head = pushed.daemon(tmp_path / "box1", box_name="box1", boxes=f"box2={address}", **common)
    try:
        box.launch()
        head.launch()
        box.wait_until_ready()
        head.wait_until_ready()
        yield Fleet(head=head, box=box, token=head.user("ada"))
    finally:
        head.close()
        box.close()


@contextmanager
def sent_to_box2(fleet: Fleet) -> Iterator[UnattendedUser]:
    """A user's program that submits a job for box2 at the head, and watches it there."""
    spec = {**quick_spec("sent", max_steps=NUM_STEPS, tokens_per_step=64), "node": "box2", "device": "host"}
    user = UnattendedUser(fleet.head.endpoints["grpc"], fleet.token, Inputs(spec=cast("JobSpec", spec)))
    user.start()
    try:
        wait_for(lambda: user.step >= 3 or not user.is_alive(), LONG_S)
        assert user.is_alive(), user.error or user.job
        yield user
    finally:
        user.leave()


def job_at(daemon: DaemonProcess, token: str, job_id: str) -> dict[str, Any]:
    """A job as a daemon has it now. By REST: the channels of gRPC would wait after a kill."""
    url = f"http://{daemon.endpoints['http']}/horizon/v1/jobs/{job_id}"
    answer = httpx.get(url, headers={"Authorization": f"Bearer {token}"}, timeout=LONG_S)
    answer.raise_for_status()
    return cast("dict[str, Any]", answer.json())


def step_at(daemon: DaemonProcess, token: str, job_id: str) -> int:
    return int(job_at(daemon, token, job_id)["step"])


def has_done(daemon: DaemonProcess, token: str, job_id: str, step: int) -> bool:
    return step_at(daemon, token, job_id) >= step


def has_events(daemon: DaemonProcess, token: str, job_id: str, number: int) -> bool:
    return int(job_at(daemon, token, job_id)["last_sequence"]) >= number


def events_of(daemon: DaemonProcess, token: str, job_id: str) -> list[JobEvent]:
    with daemon.client(token) as client:
        return list(client.jobs.watch(job_id))


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_box_trains_on_while_its_head_is_killed(fleet: Fleet, tmp_path: Path) -> None:
    head, box, token = fleet.head, fleet.box, fleet.token
    box.resting.after(STEPS_BEFORE)
    chance = random.Random(SEED)
    with sent_to_box2(fleet) as user:
        job_id = user.acknowledged["job"]
        there = box.user("ada")
        (worker,) = processes_of("horizon_server.worker", box.state_dir)

        for number in range(1, NUM_KILLS + 1):
            kill_at = step_at(box, there, job_id) + chance.randint(0, STEPS_BEFORE)
            box.resting.after(kill_at)
            wait_for(partial(has_done, box, there, job_id, kill_at), LONG_S, every_s=0.01)
            known = job_at(head, token, job_id)
            head.kill()
            done = step_at(box, there, job_id)
            box.resting.after(done + STEPS_AWAY)
            wait_for(partial(has_done, box, there, job_id, done + STEPS_ALONE), LONG_S)
            started_s = time.monotonic()
            head.start()
            ready_s = time.monotonic() - started_s
            wait_for(partial(has_events, head, token, job_id, int(known["last_sequence"]) + 1), LONG_S)
            new_s = time.monotonic() - started_s
            wait_for(partial(has_done, head, token, job_id, done + STEPS_ALONE), LONG_S)
            print(
                f"kill {number}, at step {done} of the box and {known['step']} of the head: it was ready after "
                f"{ready_s:.2f} s, had a new event after {new_s:.2f} s, and is at step {step_at(head, token, job_id)}"
            )
            assert processes_of("horizon_server.worker", box.state_dir) == [worker], "another worker"
        box.resting.go_on()
        user.join(LONG_S)
    assert user.error is None, user.error
    assert user.job is not None, f"the watch has not ended; it is at step {user.step}"
    assert user.job.state == "SUCCEEDED", user.job.message

    of_head, of_box = events_of(head, token, job_id), events_of(box, there, job_id)
    assert user.events == of_head, "who watched through all kills has seen the same"
    assert [event.sequence for event in of_head] == list(range(1, len(of_head) + 1))
    assert [event.step for event in of_head if isinstance(event, StepEvent)] == list(range(1, NUM_STEPS + 1))
    # The box's first one says that it is queued, as the head's own does; before it is there it is copied.
    assert [replace(event, sequence=0) for event in of_head][1 - len(of_box) :] == [
        replace(event, sequence=0) for event in of_box
    ][1:]
    for daemon, of in ((head, token), (box, there)):
        job = job_at(daemon, of, job_id)
        assert (job["state"], job["attempt"], job["step"]) == ("SUCCEEDED", 1, NUM_STEPS)

    pulled = tmp_path / "pulled"
    shell = Shell(head.endpoints["grpc"], token, tmp_path)
    shell.works("checkpoint", "pull", job_id, "--to", str(pulled), "--with-trainer")
    files = files_below(box.state_dir / "jobs" / job_id / "checkpoints" / f"step-{NUM_STEPS:08}")
    del files[MANIFEST_FILE]  # what the files are compared with; it is not one of them
    assert files_below(pulled) == files
    assert not (head.state_dir / "jobs" / job_id / "checkpoints").exists(), "the head has no files of it"

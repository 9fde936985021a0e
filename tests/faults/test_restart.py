"""The daemon ends and starts again under running jobs: their workers train on, and nobody notices but the operator."""

from __future__ import annotations

import json
import os
import signal
import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.daemon_process import DaemonProcess, wait_for, wait_for_state, wait_for_step
from tests.support.further import further
from tests.support.node import Node, node_of, quick_spec
from tests.support.processes import processes_of, start_time_of
from tests.support.pushed_state import PushedState
from tests.support.unattended import PATIENT, Inputs, UnattendedUser

from horizon_client import Client
from horizon_client.resources import StepEvent

# Limits for what hangs. A worker takes seconds of processor time to start, and the machine may be busy.
pytestmark = pytest.mark.timeout(900)
LONG_S = 300.0

WORKER = "horizon_server.worker"
MakeNode = Callable[..., Node]

# A step of 100 to 300 ms.
STEP = {"sequence_length": 128, "tokens_per_step": 512}
# Of a step's time, what a restart may add between two steps.
MOST_ADDED = 0.01
ROUNDS = 8


@pytest.fixture
def leaving_node(tmp_path: Path, pushed: PushedState) -> Iterator[MakeNode]:
    """Daemons that leave their workers running on SIGTERM, or do what `on_sigterm` says. A worker computes with one
    thread."""
    made: list[DaemonProcess] = []

    def make(on_sigterm: str = "leave", **settings: float) -> Node:
        daemon = pushed.daemon(tmp_path / "state", num_threads=1, on_sigterm=on_sigterm, **settings).let_children_rest()
        made.append(daemon)
        return node_of(daemon, pushed)

    yield make
    with ExitStack() as stack:
        for daemon in made:
            stack.callback(daemon.close)


class StepClock(threading.Thread):
    """Notes when a worker writes each step into its journal, whether or not a daemon is there. The kernel's own time of
    the file is what counts, so it does not matter how late this thread sees it."""

    def __init__(self, journal: Path) -> None:
        super().__init__(name="step clock", daemon=True)
        self._journal = journal
        self.written_s: dict[int, float] = {}
        """Only of steps that were seen before the line after them was there."""
        self.duration_s: dict[int, float] = {}
        self.last = 0
        self._is_over = threading.Event()

    def run(self) -> None:
        with self._journal.open("rb") as stream:
            rest = b""
            while not self._is_over.wait(0.002):
                # A read may meet a line that is being written.
                *lines, rest = (rest + stream.read()).split(b"\n")
                status = os.fstat(stream.fileno())
                # Else the time is that of a line that was written after the read.
                is_of_these = not rest and status.st_size == stream.tell()
                for line in lines:
                    plain = json.loads(line)
                    if plain.get("kind") == "step":
                        self.last = plain["step"]
                        self.duration_s[self.last] = plain["duration_s"]
                        if len(lines) == 1 and is_of_these:
                            self.written_s[self.last] = status.st_mtime_ns / 1e9

    def end(self) -> None:
        self._is_over.set()
        self.join(LONG_S)

    def gaps_s(self, first: int, last: int) -> list[float]:
        """The time between the end of a step's computation and the start of the next one's, for the steps of this
        range."""
        at, took = self.written_s, self.duration_s
        return [at[n] - at[n - 1] - took[n] for n in range(first, last + 1) if n in at and n - 1 in at]


def begin(node: Node, name: str, *, rest_after: int | None = None, **train: Any) -> UnattendedUser:
    """A user's program that submits a job without checkpoints before its end and watches it. Its worker rests after a
    step until `go_on` or an order."""
    if rest_after is not None:
        node.daemon.resting.after(rest_after)
    user = UnattendedUser(node.daemon.endpoints["grpc"], node.token, Inputs(spec=quick_spec(name, **{**STEP, **train})))
    user.start()
    wait_for(lambda: user.step >= 2 or not user.is_alive(), LONG_S)
    assert user.is_alive(), user.error or user.job
    return user


@contextmanager
def reconnected(node: Node, job_id: str) -> Iterator[Client]:
    """A client that has reached the daemon: gRPC's channels to one address share the pause after a failed
    connection."""
    with Client(node.daemon.endpoints["grpc"], token=node.token, unary_retry=PATIENT) as client:
        client.jobs.get(job_id)
        yield client


def attempt_folder(node: Node, user: UnattendedUser, number: int = 1) -> Path:
    return node.daemon.state_dir / "jobs" / user.acknowledged["job"] / f"attempt-{number}"


def require_one_run(
    node: Node, user: UnattendedUser, num_steps: int, *, attempts: int = 1, state: str = "SUCCEEDED"
) -> None:
    """The watch saw the end of the job, each event once and in order, and each step was done once."""
    user.join(LONG_S)
    assert user.error is None, user.error
    assert user.job is not None, f"the watch has not ended; it is at step {user.step}"
    assert user.job.state == state, user.job.message
    assert user.job.attempt == attempts
    steps = [event.step for event in user.events if isinstance(event, StepEvent)]
    assert steps == list(range(1, num_steps + 1))
    with node.client() as client:
        assert user.events == list(client.jobs.watch(user.job.job_id))
    assert [event.sequence for event in user.events] == list(range(1, len(user.events) + 1))
    wait_for(lambda: not processes_of(WORKER, node.daemon.state_dir), LONG_S)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_a_restart_repeats_no_step_and_delays_none(leaving_node: MakeNode, how: str) -> None:
    node, added = leaving_node(), list[Added]()
    # The machine may become slower or faster by itself, and hold up a single step; what a restart adds is added each
    # time.
    while not added or (not added[-1].is_nothing and len(added) < ROUNDS):
        added.append(added_by_restart(node, how, f"restarted-{len(added)}"))
    assert added[-1].is_nothing, added


@dataclass(frozen=True, kw_only=True)
class Added:
    """How much longer than before the gaps between steps are while the daemon is away and after it is back, as a share
    of a step: by their median, the larger of the two, and by the longest gap of all."""

    usually: float
    at_most: float

    @property
    def is_nothing(self) -> bool:
        """Whether no step waited for the daemon, which was away for many steps."""
        return self.usually <= MOST_ADDED and self.at_most < 1.0


def added_by_restart(node: Node, how: str, name: str) -> Added:
    # More steps than any machine does meanwhile: the job is cancelled.
    user = begin(node, name, max_steps=100_000)
    (pid,) = processes_of(WORKER, node.daemon.state_dir)
    clock = StepClock(attempt_folder(node, user) / "journal.jsonl")
    clock.start()
    wait_for(lambda: clock.last >= 20, LONG_S)
    if how == "SIGTERM":
        assert node.daemon.terminate() == 0
    else:
        node.daemon.kill()
    away = clock.last
    wait_for(lambda: clock.last >= away + 15, LONG_S)
    back = clock.last
    node.daemon.start()
    wait_for(lambda: user.step >= back + 20, LONG_S)
    assert processes_of(WORKER, node.daemon.state_dir) == [pid], "another worker"
    job_id = user.acknowledged["job"]
    with reconnected(node, job_id) as client:
        client.jobs.cancel(job_id)
    user.join(LONG_S)
    assert user.job is not None
    require_one_run(node, user, user.job.step, state="CANCELLED")
    clock.end()
    usual, alone, again = clock.gaps_s(4, away), clock.gaps_s(away + 1, back), clock.gaps_s(back + 1, clock.last)
    step_s = statistics.median(clock.duration_s.values())
    added = [(statistics.median(gaps) - statistics.median(usual)) / step_s for gaps in (alone, again)]
    print(f"a step takes {step_s:.3f} s; added by the daemon's absence {added[0]:.2%}, after its return {added[1]:.2%}")
    return Added(usually=max(added), at_most=(max(alone + again) - max(usual)) / step_s)


def test_the_series_of_a_running_job_are_the_same_after_a_restart(leaving_node: MakeNode) -> None:
    node = leaving_node()
    spec = quick_spec("long", max_steps=1_000_000, checkpoint={"every_steps": 3}, **STEP)
    with node.client() as client:
        spec |= {"eval_dataset": "demo-chats", "eval_every_steps": 3}
        job_id = client.jobs.submit(spec).job_id

    def series() -> set[str]:
        """Every series of the job that its owner sees."""
        headers = {"Authorization": f"Bearer {node.token}"}
        text = httpx.get(f"http://{node.daemon.endpoints['http']}/metrics", headers=headers, timeout=180).text
        return {line.rpartition(" ")[0] for line in text.splitlines() if f'job_id="{job_id}"' in line}

    wanted: tuple[str, ...] = ("horizon_job_info", "horizon_job_share_ratio", "horizon_eval_loss", "horizon_train_loss")
    wanted += ("horizon_checkpoint_last_success_timestamp_seconds", "horizon_job_progress_ratio")
    wait_for(lambda: all(any(one.startswith(name) for one in series()) for name in wanted), LONG_S)
    before = series()
    node.daemon.terminate()
    node.daemon.start()
    # At once, but for the share, which is worked out when the queue is first looked at.
    assert {one for one in before if "share" not in one} <= series()
    wait_for(lambda: before <= series(), LONG_S)
    with reconnected(node, job_id) as client:
        assert client.jobs.get(job_id).attempt == 1
        client.jobs.cancel(job_id)


def test_a_job_that_ends_while_the_daemon_is_away_has_ended_well(leaving_node: MakeNode) -> None:
    node = leaving_node()
    user = begin(node, "ends-alone", rest_after=3, max_steps=10)
    node.daemon.kill()
    node.daemon.resting.go_on()
    wait_for(lambda: not processes_of(WORKER, node.daemon.state_dir), LONG_S)
    node.daemon.start()
    require_one_run(node, user, 10)


def test_a_worker_that_dies_while_the_daemon_is_away_is_started_again(leaving_node: MakeNode) -> None:
    node = leaving_node()
    user = begin(node, "dies-alone", rest_after=3, max_steps=12)
    journal = attempt_folder(node, user) / "journal.jsonl"
    node.daemon.kill()
    before = num_steps_in(journal)
    node.daemon.resting.after(before + 2)
    wait_for(lambda: num_steps_in(journal) > before, LONG_S)
    for pid in processes_of(WORKER, node.daemon.state_dir):
        os.kill(pid, signal.SIGKILL)
    done = num_steps_in(journal)
    node.daemon.resting.go_on()
    node.daemon.start()
    user.join(LONG_S)
    assert user.job is not None
    assert user.job.state == "SUCCEEDED", user.job.message
    steps = [event.step for event in user.events if isinstance(event, StepEvent)]
    assert steps[:done] == list(range(1, done + 1)), "what the worker has done alone is stored"
    assert set(steps) == set(range(1, 13))
    assert [event.sequence for event in user.events] == list(range(1, user.job.last_sequence + 1))


def test_two_jobs_share_the_device_while_the_daemon_is_away(leaving_node: MakeNode) -> None:
    """The one that has the device trains on; the other one gets it when that one has ended."""
    node = leaving_node(time_slice_s=0.5)
    short = begin(node, "short", rest_after=5, max_steps=40)
    long = begin(node, "long", rest_after=5, max_steps=60)
    node.daemon.kill()
    node.daemon.resting.go_on()
    journals = [attempt_folder(node, user) / "journal.jsonl" for user in (short, long)]
    before = [num_steps_in(journal) for journal in journals]
    wait_for(lambda: not processes_of(WORKER, node.daemon.state_dir), LONG_S)
    assert [num_steps_in(journal) for journal in journals] == [40, 60], before
    node.daemon.start()
    require_one_run(node, short, 40)
    require_one_run(node, long, 60)


def test_orders_reach_a_worker_of_an_earlier_daemon(leaving_node: MakeNode) -> None:
    node = leaving_node()
    user = begin(node, "ordered", max_steps=100_000)
    job_id = user.acknowledged["job"]
    node.daemon.kill()
    node.daemon.start()
    with reconnected(node, job_id) as client:
        client.jobs.pause(job_id)
        paused = wait_for_state(client, job_id, "PAUSED", timeout_s=LONG_S)
        assert paused.attempt == 1
        assert [checkpoint.step for checkpoint in client.checkpoints.list(job_id)] == [paused.step]
        client.jobs.resume(job_id)
        wait_for_step(client, job_id, paused.step + 1, timeout_s=LONG_S)
    node.daemon.kill()
    node.daemon.start()
    with reconnected(node, job_id) as client:
        client.jobs.cancel(job_id)
        assert wait_for_state(client, job_id, "CANCELLED", timeout_s=LONG_S).attempt == 2
    wait_for(lambda: not processes_of(WORKER, node.daemon.state_dir), LONG_S)


@pytest.mark.parametrize("how", ["on_sigterm", *further("SIGINT")])
def test_a_drain_ends_the_workers(leaving_node: MakeNode, how: str) -> None:
    node = leaving_node("drain" if how == "on_sigterm" else "leave")
    user = begin(node, "drained", rest_after=3, max_steps=20)
    assert node.daemon.process is not None
    node.daemon.process.send_signal(signal.SIGTERM if how == "on_sigterm" else signal.SIGINT)
    assert node.daemon.process.wait(LONG_S) == 0
    assert processes_of(WORKER, node.daemon.state_dir) == []
    node.daemon.resting.go_on()
    node.daemon.start()
    require_one_run(node, user, 20, attempts=2)


def test_a_worker_of_another_protocol_checkpoints_and_is_started_again(leaving_node: MakeNode, tmp_path: Path) -> None:
    node = leaving_node()
    # It rests until the next daemon, which it cannot talk to, makes it end.
    user = begin(node, "skewed", rest_after=3, max_steps=40)
    (pid,) = processes_of(WORKER, node.daemon.state_dir)
    node.daemon.kill()
    # The next daemon, and the workers that it starts, are of another version.
    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / "sitecustomize.py").write_text(
        "from horizon_server.worker_link import protocol\nprotocol.PROTOCOL += 1\n", "ascii"
    )
    node.daemon.environment |= {"PYTHONPATH": str(newer)}
    node.daemon.start()
    wait_for(lambda: start_time_of(pid) is None, LONG_S)
    require_one_run(node, user, 40, attempts=2)
    texts = [event.text for event in user.events if event.kind == "message"]
    assert any(text.startswith("continues after step ") for text in texts), texts


def num_steps_in(journal: Path) -> int:
    """Steps in a worker's journal; a last line that is not whole does not count."""
    lines = journal.read_bytes().split(b"\n")[:-1]
    return sum(json.loads(line).get("kind") == "step" for line in lines)

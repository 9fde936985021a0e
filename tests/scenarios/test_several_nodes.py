"""Jobs on a daemon's node and another one: the result of one node to the last bit, also where a rank of the other one
is killed in between or the other node is lost, and one job at a time on the other node."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from tests.scenarios.test_several_devices import exported, job, steps_of
from tests.support.daemon_process import DaemonProcess, wait_for, wait_for_state
from tests.support.fleet import serving
from tests.support.pushed_state import PushedState

from horizon_client import Client
from horizon_client.resources import StateEvent
from horizon_server.nodes.agent import NodeAgent
from horizon_server.nodes.key import make_key


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """A daemon, and the other node that it may use."""

    daemon: DaemonProcess
    other: NodeAgent

    def ranks(self) -> list[int]:
        """The processes on the other node, which is in this process here."""
        children = psutil.Process().children()
        return [child.pid for child in children if "horizon_server.worker.rank" in child.cmdline()]


@pytest.fixture
def fleet(tmp_path: Path, pushed: PushedState) -> Iterator[Fleet]:
    key = tmp_path / "fleet.pem"
    make_key(key)
    with serving(tmp_path / "node", key) as other:
        daemon = pushed.daemon(
            tmp_path / "state",
            host_devices=2,
            num_threads=2,
            fleet_address="127.0.0.1",
            fleet_key_file=str(key),
            nodes=other.address,
        )
        daemon.start()
        try:
            yield Fleet(daemon=daemon, other=other)
        finally:
            daemon.close()


@pytest.fixture
def client(fleet: Fleet) -> Iterator[Client]:
    with fleet.daemon.client(fleet.daemon.user("ada")) as opened:
        yield opened


@pytest.mark.timeout(600)
def test_two_nodes_give_the_bits_of_one_although_a_rank_of_the_other_dies(
    fleet: Fleet, client: Client, tmp_path: Path
) -> None:
    two = client.jobs.submit(job("two", gpus=1, nodes=2))
    waits = client.jobs.submit(job("waits", gpus=1, nodes=2, max_steps=2))
    wait_for(lambda: client.jobs.get(two.job_id).step >= 3, 120.0)
    assert fleet.other.report().job_id == two.job_id
    outlook = client.jobs.get(waits.job_id).outlook
    assert outlook is not None
    assert outlook.why == "waiting for nodes: it needs 1 further node; job two uses 1 of 1"
    (rank,) = fleet.ranks()
    os.kill(rank, signal.SIGKILL)
    wait_for(lambda: client.jobs.get(two.job_id).attempt == 2, 60.0)
    wait_for_state(client, two.job_id, "SUCCEEDED")
    wait_for_state(client, waits.job_id, "SUCCEEDED")
    wait_for(lambda: not fleet.other.report().job_id, 60.0)
    assert not fleet.ranks()

    one = client.jobs.submit(job("one", gpus=1))
    wait_for_state(client, one.job_id, "SUCCEEDED")
    assert exported(client, two, tmp_path / "two") == exported(client, one, tmp_path / "one")
    assert steps_of(client, two) == steps_of(client, one)
    states = [event for event in client.jobs.watch(two.job_id) if isinstance(event, StateEvent)]
    assert any(f"on {fleet.other.address}: rank 1 was killed by SIGKILL" in event.message for event in states)


@pytest.mark.timeout(600)
def test_a_range_of_nodes_gives_the_bits_of_one_although_the_other_is_lost(
    fleet: Fleet, client: Client, tmp_path: Path
) -> None:
    one = client.jobs.submit(job("one", gpus=1))
    wait_for_state(client, one.job_id, "SUCCEEDED")
    lost = client.jobs.submit(job("lost", gpus=1, nodes="1-2", checkpoint={"every_steps": 3}))
    assert (lost.plan and lost.plan.num_nodes, lost.spec["nodes"]) == (1, "1-2")
    wait_for(lambda: client.jobs.get(lost.job_id).step >= 5, 120.0)
    plan = client.jobs.get(lost.job_id).plan
    assert plan is not None and (plan.num_nodes, plan.lanes, plan.node_range and plan.node_range.most) == (2, 4, 2)
    assert fleet.other.report().job_id == lost.job_id
    fleet.other.close()
    wait_for_state(client, lost.job_id, "SUCCEEDED")

    plan = client.jobs.get(lost.job_id).plan
    assert plan is not None and plan.num_nodes == 1
    assert exported(client, lost, tmp_path / "lost") == exported(client, one, tmp_path / "one")
    assert steps_of(client, lost) == steps_of(client, one)
    states = [event for event in client.jobs.watch(lost.job_id) if isinstance(event, StateEvent)]
    assert [event.state for event in states if event.reason == "FEWER_NODES"] == ["QUEUED"]

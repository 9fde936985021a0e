"""Jobs that start on as many nodes as can be had. The whole daemon, with workers that follow a script; the further
nodes are in this process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.component.jobs.conftest import ADA
from tests.conftest import MakeDaemon
from tests.daemon_parts import DaemonParts, Script
from tests.support.fleet import GIB, NODE_BYTES, serving
from tests.support.processes import processes_of

from horizon_server.errors import DoesNotFit
from horizon_server.events import StateChanged
from horizon_server.jobs.fleet import plan_on_nodes
from horizon_server.jobs.requests import AttemptDevices, Stopped
from horizon_server.jobs.runtime import Runtime
from horizon_server.nodes.agent import NodeAgent
from horizon_server.nodes.directory import NodeDirectory
from horizon_server.nodes.key import make_key
from horizon_server.records.execution import Execution
from horizon_server.records.job import JobRecord, JobState
from horizon_server.records.plan import Plan
from horizon_server.spec import Span
from horizon_server.worker_link.protocol import REQUEST_FILE

S = JobState


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Two further nodes, and the daemon that may use them."""

    others: tuple[NodeAgent, NodeAgent]
    daemon: DaemonParts

    def reserved(self) -> list[str]:
        """The job of each further node."""
        return [other.report().job_id for other in self.others]

    async def ask(self) -> None:
        """Have the daemon look at the nodes now, as it does every few seconds."""
        await self.daemon.parts.scheduler.runtime.nodes.ask_all()
        self.daemon.parts.scheduler.try_held_back()

    async def lose(self, other: NodeAgent, job: JobRecord) -> None:
        """End a node; the worker of its job dies of that."""
        await asyncio.to_thread(other.close)
        for pid in processes_of(self.daemon.worker_module, self.daemon.state_dir / "jobs" / job.job_id):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
async def fleet(make_daemon: MakeDaemon, state_dir: Path, tmp_path: Path) -> AsyncIterator[Fleet]:
    key = tmp_path / "fleet.pem"
    make_key(key)
    async with AsyncExitStack() as stack:
        first, second = (stack.enter_context(serving(tmp_path / name, key)) for name in ("1", "2"))
        settings: dict[str, Any] = {
            "fleet_address": "127.0.0.1",
            "fleet_key_file": key,
            "nodes": (first.address, second.address),
            "host_devices": 2,
            "max_restarts": 3,
            "look_every_s": 0.1,
        }
        daemon = await stack.enter_async_context(make_daemon(state_dir, **settings))
        made = Fleet(others=(first, second), daemon=daemon)
        await made.ask()
        yield made


def num_nodes(job: JobRecord) -> int:
    assert job.plan is not None
    return job.plan.num_nodes


async def test_a_job_takes_the_nodes_that_are_there_and_starts_again_on_fewer_when_one_is_lost(fleet: Fleet) -> None:
    daemon, script = fleet.daemon, Script(num_steps=4, hold_at=2)
    job = await daemon.submit(ADA, "job", script, nodes="1-4")
    assert (num_nodes(job), job.plan and job.plan.least_nodes, job.plan and job.plan.lanes) == (1, 1, 8)
    job = await daemon.until(job.job_id, S.RUNNING, step=1)
    assert (num_nodes(job), fleet.reserved()) == (3, [job.job_id, job.job_id])
    # They are its own, and one that needs one of them waits.
    waits = await daemon.submit(ADA, "waits", script, nodes=2)
    outlook = await daemon.parts.scheduler.simulate(waits)
    assert outlook.why == f"waiting for nodes: it needs 1 further node; job {job.job_id} uses 2 of 2"
    await daemon.services.jobs.cancel(ADA, waits.job_id)

    first, second = fleet.others
    await fleet.lose(first, job)
    # It does not wait for the node that is gone.
    job = await daemon.until(job.job_id, S.RUNNING, attempt=3)
    assert (num_nodes(job), second.report().job_id) == (2, job.job_id)
    daemon.release("job")
    events = [event.payload for event in await daemon.events(job.job_id)]
    states = [payload for payload in events if isinstance(payload, StateChanged)]
    assert states[-1].job_state == S.SUCCEEDED
    (queued,) = (state for state in states if state.reason == "FEWER_NODES")
    gone = f"{first.address}: it cannot be reached: Connection refused"
    why = f"starts again on the nodes that can be had; for 3 it needs 2 further nodes of 2: {gone}"
    assert (queued.job_state, queued.message) == (S.QUEUED, why)


async def test_a_range_whose_lower_end_cannot_be_had_waits(fleet: Fleet) -> None:
    daemon = fleet.daemon
    await asyncio.to_thread(fleet.others[1].close)
    await fleet.ask()
    job = await daemon.submit(ADA, "job", Script(num_steps=4, hold_at=2), nodes="3-4")
    outlook = await daemon.parts.scheduler.simulate(job)
    gone = fleet.others[1].address
    assert outlook.why == f"waiting for nodes: it needs 2 further nodes; {gone} does not answer"
    other = await daemon.submit(ADA, "other", Script(num_steps=4, hold_at=2), nodes="2-4")
    other = await daemon.until(other.job_id, S.RUNNING, step=1)
    assert (num_nodes(other), fleet.others[0].report().job_id) == (2, other.job_id)
    daemon.release("other")
    await daemon.until(other.job_id, S.SUCCEEDED)
    await daemon.parts.scheduler.until_empty()
    assert fleet.others[0].report().job_id == ""


async def test_a_job_that_is_alone_computes_as_it_would_on_more(fleet: Fleet) -> None:
    daemon = fleet.daemon
    for other in fleet.others:
        await asyncio.to_thread(other.close)
    script = Script(num_steps=4, hold_at=2)
    requests = dict[str, dict[str, Any]]()
    for name, nodes in (("range", "1-3"), ("one", 1)):
        job = await daemon.submit(ADA, name, script, nodes=nodes)
        job = await daemon.until(job.job_id, S.RUNNING, step=1)
        assert num_nodes(job) == 1
        file = daemon.state_dir / "jobs" / job.job_id / "attempt-1" / REQUEST_FILE
        requests[name] = json.loads(file.read_text())
        daemon.release(name)
        await daemon.until(job.job_id, S.SUCCEEDED)
    # In lanes, and with layers that are not compiled: those would have other bits.
    assert [request["plan"]["execution"]["lanes"] for request in requests.values()] == [8, 1]
    assert requests["range"]["compiled"] is None and requests["one"]["compiled"] is not None


def plan_of(number: int, *, host_limit_bytes: int = 64 * GIB) -> Plan:
    """What a job of 8 GiB takes on each of that many nodes."""
    return Plan(
        host_bytes={"weights": 8 * GIB // number},
        device_bytes={},
        execution=Execution(num_nodes=number, num_ranks=number),
        host_limit_bytes=host_limit_bytes,
        num_parameters=1,
        plane_bytes={"hi": 8192},
        device="host",
    )


@pytest.mark.parametrize(
    ("nodes", "small_bytes", "found"),
    [
        # Each of four needs 2 GiB, which the small one has. One does not answer, and each of three needs 2.7 GiB.
        ((1, 4), 2 * GIB, 2),
        ((1, 4), NODE_BYTES, 3),
        ((1, 2), NODE_BYTES, 2),
    ],
)
async def test_what_a_node_must_have_free_depends_on_how_many_there_are(
    nodes: tuple[int, int], small_bytes: int, found: int, tmp_path: Path
) -> None:
    key = tmp_path / "fleet.pem"
    make_key(key)
    with (
        serving(tmp_path / "1", key, memory_bytes=small_bytes) as small,
        serving(tmp_path / "2", key) as large,
    ):
        # The third of the further nodes does not answer.
        directory = NodeDirectory(addresses=[small.address, large.address, "127.0.0.1:1"], key_file=key)
        span = Span(least=nodes[0], most=nodes[1])
        planner = SimpleNamespace(most_nodes=lambda spec: spec.nodes.most)
        settings = SimpleNamespace(fleet_address="127.0.0.1", fleet_key_file=key)
        runtime = cast("Runtime", SimpleNamespace(nodes=directory, planner=planner, settings=settings))
        job = cast("JobRecord", SimpleNamespace(job_id="job_1", spec=SimpleNamespace(nodes=span)))
        devices = cast("AttemptDevices", SimpleNamespace(gpus=()))
        asked = list[int]()

        def plan_to_start(*, num_nodes: int, other_bytes: int) -> Plan:
            asked.append(num_nodes)
            return plan_of(num_nodes)

        plan, fleet = await plan_on_nodes(runtime, job, plan_to_start, devices, other_bytes=0)
        assert fleet is not None and plan.num_nodes == 1 + len(fleet.others) == found
        assert asked == sorted(set(asked), reverse=True)
        mine = [address for node, address in ((small, small.address), (large, large.address)) if node.report().job_id]
        assert sorted(mine) == sorted(fleet.others)
        await directory.release("job_1")

        def too_large(*, num_nodes: int, other_bytes: int) -> Plan:
            return plan_of(num_nodes, host_limit_bytes=GIB)

        with pytest.raises(DoesNotFit):
            await plan_on_nodes(runtime, job, too_large, devices, other_bytes=0)
        with pytest.raises(Stopped) as stopped:
            await plan_on_nodes(runtime, job, too_large, devices, other_bytes=1)
        assert stopped.value.reason == "WAITS_FOR_MEMORY"

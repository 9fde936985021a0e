"""Attempts on several nodes: a worker whose other ranks an agent runs, which is a process of this machine here."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.component.worker.test_rank_processes import Inputs, started, to_the_end
from tests.support.worker_attempts import Daemon, always, assert_same, attempt, result, spec_of, worker_request

from horizon_server.children.entry import Answer
from horizon_server.codec import to_plain
from horizon_server.nodes.agent import NodeAgent
from horizon_server.nodes.directory import NodeDirectory
from horizon_server.nodes.key import make_key
from horizon_server.nodes.protocol import Reservation
from horizon_server.planning.machine import HostMemory
from horizon_server.process_variables import CHILD_VARIABLES
from horizon_server.settings import load_settings
from horizon_server.worker_link.request import Fleet

GIB = 2**30


@contextmanager
def node(folder: Path, key: Path) -> Iterator[NodeAgent]:
    settings = load_settings(
        fleet_address="127.0.0.1", fleet_port=0, fleet_key_file=key, host_memory_reserve_bytes=0, host_devices=2
    )
    agent = NodeAgent(
        settings,
        folder=folder,
        memory=lambda: HostMemory(limit_bytes=4 * GIB, available_bytes=4 * GIB),
        num_threads=1,
        environment={**os.environ, **CHILD_VARIABLES},
    )
    serving = threading.Thread(target=agent.serve)
    serving.start()
    try:
        yield agent
    finally:
        agent.close()
        serving.join()


@pytest.mark.asyncio
async def test_two_nodes(inputs: Inputs, tmp_path: Path) -> None:
    spec = spec_of(4, train={"tokens_per_step": 64}, eval_dataset="e", eval_every_steps=2)
    alone, folder = inputs("alone"), inputs("two")
    daemon = Daemon(always)
    attempt(alone, spec, daemon, lanes=4)
    key = tmp_path / "fleet.pem"
    make_key(key)
    more: dict[str, Any] = {"evaluations": {"eval": str(folder / "prepared")}}
    with (
        node(tmp_path / "node", key) as agent,
        worker_request(folder, spec, turns=True, num_ranks=4, num_nodes=2, lanes=4, **more) as request,
    ):
        directory = NodeDirectory(addresses=[agent.address], key_file=key)
        print(await directory.reports())
        sizes = {plane: os.fstat(fd).st_size for plane, fd in request["planes"].items()}
        others = await directory.reserve(
            Reservation(job_id="job_1", plane_bytes=sizes, host_bytes=GIB, num_ranks=2, device_kind="host"), 1
        )
        fleet = Fleet(address="127.0.0.1", others=others, key_file=key)
        with started({**request, "fleet": to_plain(fleet)}, folder) as worker:
            lines = to_the_end(worker)
            assert worker.wait() == 0
        assert lines[-1] == Answer({"outcome": "succeeded", "reason": "", "message": ""})
        assert_same(result(folder, 4), result(alone, 4))

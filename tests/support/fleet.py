"""Nodes that serve jobs of other nodes, in this process: agents on the loopback interface."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from horizon_server.nodes.agent import NodeAgent
from horizon_server.nodes.protocol import Reservation
from horizon_server.planning.machine import HostMemory
from horizon_server.process_variables import CHILD_VARIABLES
from horizon_server.settings import load_settings

GIB = 2**30
NODE_BYTES = 4 * GIB


@contextmanager
def serving(folder: Path, key: Path, *, memory_bytes: int = NODE_BYTES, **how: Any) -> Iterator[NodeAgent]:
    """A node with two devices and so much memory; `how` are further arguments of the agent."""
    settings = load_settings(
        fleet_address="127.0.0.1", fleet_port=0, fleet_key_file=key, host_memory_reserve_bytes=0, host_devices=2
    )
    agent = NodeAgent(
        settings,
        folder=folder,
        memory=lambda: HostMemory(limit_bytes=memory_bytes, available_bytes=memory_bytes),
        num_threads=1,
        environment={**os.environ, **CHILD_VARIABLES},
        **how,
    )
    thread = threading.Thread(target=agent.serve)
    thread.start()
    try:
        yield agent
    finally:
        agent.close()
        thread.join()


def reservation(job_id: str = "job_1", **changes: Any) -> Reservation:
    """What a small job asks of a node."""
    small: dict[str, Any] = {
        "owner": "daemon_1",
        "plane_bytes": {"hi": 8192},
        "host_bytes": GIB,
        "num_ranks": 2,
        "device_kind": "host",
    }
    return Reservation(job_id=job_id, **{**small, **changes})

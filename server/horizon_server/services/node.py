"""What the daemon says of its node: memory, processors, accelerators, disk, and how busy it is."""

from __future__ import annotations

import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from horizon_server.db.jobs import JobStore
from horizon_server.jobs.journal import Lifecycle
from horizon_server.planning.machine import Accelerator, host_memory
from horizon_server.records.account import Principal
from horizon_server.store.cpus import available_cpus
from horizon_server.version import VERSION


@dataclass(frozen=True, kw_only=True)
class NodeStatus:
    """What GetNode and GET /horizon/v1/node answer. Units: bytes."""

    hostname: str
    version: str
    host_memory_limit_bytes: int
    host_memory_available_bytes: int
    num_cpus: int
    accelerators: tuple[Accelerator, ...]
    disk_free_bytes: int
    num_jobs: dict[str, int]
    draining: bool
    user: str
    role: str


class NodeFacts:
    """Answers what the node is and how busy it is."""

    def __init__(
        self, store: JobStore, lifecycle: Lifecycle, *, state_dir: Path, accelerators: tuple[Accelerator, ...]
    ) -> None:
        self._store = store
        self._lifecycle = lifecycle
        self._state_dir = state_dir
        self._accelerators = accelerators

    async def describe(self, principal: Principal) -> NodeStatus:
        """Return the node as it is now, and who asks."""
        memory = host_memory()
        return NodeStatus(
            hostname=socket.gethostname(),
            version=VERSION,
            host_memory_limit_bytes=memory.limit_bytes,
            host_memory_available_bytes=memory.available_bytes,
            num_cpus=available_cpus(),
            accelerators=self._accelerators,
            disk_free_bytes=shutil.disk_usage(self._state_dir).free,
            num_jobs=await self._store.counts(),
            draining=self._lifecycle.draining,
            user=principal.name,
            role=principal.role,
        )

"""What the daemon says of its node: memory, processors, accelerators, disk, and how busy it is."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from horizon_server.db.jobs import JobStore
from horizon_server.jobs.journal import Lifecycle
from horizon_server.jobs.scheduler import Scheduler
from horizon_server.jobs.turns import DeviceTurns
from horizon_server.nodes.directory import NodeDirectory, NodeState
from horizon_server.nodes.protocol import NodeReport
from horizon_server.planning.machine import Accelerator, HostMemory, host_memory
from horizon_server.records.account import Principal
from horizon_server.records.boxes import Box
from horizon_server.records.job import RESIDENT, JobRecord
from horizon_server.records.plan import HeldMemory
from horizon_server.records.sharing import NodeCondition, NodeMode, ShareUse
from horizon_server.services.access import may_see
from horizon_server.services.fleet.boxes import Boxes
from horizon_server.store.cpus import available_cpus
from horizon_server.version import VERSION

_FIGURES_HOLD_S = 1.0


@dataclass(frozen=True, kw_only=True)
class DeviceStatus:
    """How one device is shared now."""

    name: str
    """host, cuda:0 and so on."""
    holder: str
    """Id of the job whose turn it is; empty while no job uses it."""
    num_residents: int
    holder_name: str = ""
    """The name of that job; empty where the caller may not see it."""
    out_of_service: str = ""
    """Why no job uses it; empty while it is in service."""


@dataclass(frozen=True, kw_only=True)
class FurtherNode:
    """Another node, which serves ranks of jobs of this one. Units: bytes."""

    address: str
    """HOST:PORT where it serves."""
    state: NodeState
    hostname: str = ""
    gpus: tuple[str, ...] = ()
    """Their names; none where its processors compute."""
    host_memory_limit_bytes: int = 0
    host_memory_available_bytes: int = 0
    message: str = ""
    """Why it is lost."""


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
    condition: NodeCondition
    mode: NodeMode
    """What holds now, the maintenance window included."""
    time_slice_s: float
    share_half_life_s: float
    devices: tuple[DeviceStatus, ...]
    share_uses: tuple[ShareUse, ...]
    host_memory_promised_bytes: int
    """Planned host memory of all resident jobs together, and of the model that answers prompts."""
    further_nodes: tuple[FurtherNode, ...]
    boxes: tuple[Box, ...]
    """Other machines of the fleet, which jobs are sent to."""
    box_name: str
    """What this machine is called in a job's node."""


@dataclass(frozen=True, kw_only=True)
class _MachineFigures:
    read_s: float
    memory: HostMemory
    num_cpus: int
    disk_free_bytes: int


def further_nodes(nodes: NodeDirectory) -> tuple[FurtherNode, ...]:
    """Return the other nodes as they were when they were asked last."""
    found = []
    for address in nodes.addresses:
        report = nodes.known.get(address)
        if isinstance(report, NodeReport):
            found.append(
                FurtherNode(
                    address=address,
                    state=nodes.state_of(address),
                    hostname=report.hostname,
                    gpus=report.gpus,
                    host_memory_limit_bytes=report.host_bytes,
                    host_memory_available_bytes=report.free_bytes,
                )
            )
        else:
            message = "it has not been asked yet" if report is None else report.message
            found.append(FurtherNode(address=address, state="lost", message=message))
    return tuple(found)


class NodeFacts:
    """Answers what the node is and how busy it is."""

    def __init__(
        self,
        store: JobStore,
        lifecycle: Lifecycle,
        scheduler: Scheduler,
        boxes: Boxes,
        *,
        state_dir: Path,
        accelerators: tuple[Accelerator, ...],
        share_half_life_s: float,
    ) -> None:
        self._store = store
        self._lifecycle = lifecycle
        self._scheduler = scheduler
        self._boxes = boxes
        self._share_half_life_s = share_half_life_s
        self._state_dir = state_dir
        self.accelerators = accelerators
        self._machine: _MachineFigures | None = None

    async def describe(self, principal: Principal) -> NodeStatus:
        """Return the node as it is now, and who asks."""
        now_s, scheduler, machine = time.time(), self._scheduler, self._machine_figures()
        condition = await scheduler.runtime.view.sharing.condition()
        residents = await self._store.in_states(sorted(RESIDENT))
        out = scheduler.runtime.view.health.out(condition)
        return NodeStatus(
            hostname=socket.gethostname(),
            version=VERSION,
            host_memory_limit_bytes=machine.memory.limit_bytes,
            host_memory_available_bytes=machine.memory.available_bytes,
            num_cpus=machine.num_cpus,
            accelerators=self.accelerators,
            disk_free_bytes=machine.disk_free_bytes,
            num_jobs=await self._store.counts(),
            draining=self._lifecycle.draining,
            user=principal.name,
            role=principal.role,
            condition=condition,
            mode=condition.at(now_s),
            time_slice_s=scheduler.runtime.view.rules.time_slice_s,
            share_half_life_s=self._share_half_life_s,
            devices=tuple(
                _device_status(principal, turns, residents, out.get(name, ""))
                for name, turns in scheduler.turns.items()
            ),
            share_uses=tuple(scheduler.runtime.view.shares.uses(now_s)),
            host_memory_promised_bytes=HeldMemory(job.plan.held for job in residents if job.plan).num_bytes
            + scheduler.held_bytes(),
            further_nodes=further_nodes(scheduler.runtime.nodes),
            boxes=self._boxes.all(),
            box_name=self._boxes.name,
        )

    def _machine_figures(self) -> _MachineFigures:
        """Return the figures of at most a second ago: each takes reading a dozen files, and pages of status ask all the
        time."""
        now_s = time.monotonic()
        if self._machine is None or now_s - self._machine.read_s > _FIGURES_HOLD_S:
            self._machine = _MachineFigures(
                read_s=now_s,
                memory=host_memory(),
                num_cpus=available_cpus(),
                disk_free_bytes=shutil.disk_usage(self._state_dir).free,
            )
        return self._machine


def _device_status(
    principal: Principal, turns: DeviceTurns, residents: Sequence[JobRecord], out_of_service: str
) -> DeviceStatus:
    holder = turns.holder.job.job_id if turns.holder else ""
    job = next((job for job in residents if job.job_id == holder), None)
    is_visible = job is not None and may_see(principal, job.owner, project=job.project)
    return DeviceStatus(
        name=turns.device,
        holder=holder,
        num_residents=len(turns.participants),
        holder_name=job.spec.name if job is not None and is_visible else "",
        out_of_service=out_of_service,
    )

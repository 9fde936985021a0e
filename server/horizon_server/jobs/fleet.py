"""The further nodes of an attempt: reserved before its worker starts, all of them or none."""

from __future__ import annotations

from horizon_server.errors import WorkerFailed
from horizon_server.jobs.requests import AttemptDevices, Stopped
from horizon_server.jobs.runtime import Runtime
from horizon_server.network import interface_of
from horizon_server.nodes.protocol import Reservation
from horizon_server.records.plan import Plan
from horizon_server.worker_link.request import Fleet

WAITS_FOR_NODES = "WAITS_FOR_NODES"
"""Reason of a job that was to be loaded and is queued again, as too few further nodes could be had."""


async def reserve_nodes(
    runtime: Runtime, job_id: str, plan: Plan, devices: AttemptDevices, *, before: Fleet | None = None
) -> Fleet | None:
    """Reserve the further nodes of a job, those first that it had; None where it is on this one alone.

    Raises:
        Stopped: why each of the others cannot be had.
    """
    settings = runtime.settings
    if plan.num_nodes == 1:
        return None
    assert settings.fleet_address and settings.fleet_key_file, "no job is planned for nodes without them"
    reservation = Reservation(
        job_id=job_id,
        owner=runtime.nodes.owner,
        plane_bytes=dict(plan.plane_bytes),
        host_bytes=plan.kept_host_bytes,
        num_ranks=plan.num_devices,
        device_kind=plan.execution.device_kind,
        gpu_name=devices.gpus[0].name if devices.gpus else "",
    )
    try:
        kept = () if before is None else before.others
        others = await runtime.nodes.reserve(reservation, plan.num_nodes - 1, kept=kept)
    except WorkerFailed as error:
        raise Stopped(WAITS_FOR_NODES, error.message) from error
    return Fleet(address=settings.fleet_address, others=others, key_file=settings.fleet_key_file)


def fleet_environment(fleet: Fleet | None) -> dict[str, str]:
    """Variables with which the libraries of an attempt's ranks use the network between its nodes."""
    if fleet is None:
        return {}
    interface = interface_of(fleet.address)
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}

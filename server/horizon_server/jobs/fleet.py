"""The further nodes of an attempt, reserved before its worker starts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from horizon_server.errors import DoesNotFit, WorkerFailed
from horizon_server.jobs.requests import WAITS_FOR_MEMORY, AttemptDevices, Stopped
from horizon_server.jobs.runtime import Runtime
from horizon_server.network import interface_of
from horizon_server.nodes.protocol import Reservation
from horizon_server.planning.machine import worker_environment
from horizon_server.records.job import JobRecord
from horizon_server.records.plan import Plan
from horizon_server.worker_link.request import Fleet, WorkerRequest

WAITS_FOR_NODES = "WAITS_FOR_NODES"
"""Reason of a job that was to be loaded and is queued again, as too few further nodes could be had."""
FEWER_NODES = "FEWER_NODES"
"""Reason of a job that is queued again to continue on fewer nodes than it had, as one of them is lost."""


async def plan_on_nodes(
    runtime: Runtime, job: JobRecord, plan_to_start: Callable[..., Plan], devices: AttemptDevices, *, other_bytes: int
) -> tuple[Plan, Fleet | None]:
    """Reserve as many nodes for a job as can be had of those that it may have, and return its plan for them.
    `other_bytes` are planned for the other resident jobs.

    Raises:
        DoesNotFit: although no other job is resident.
        Stopped: it waits for memory of other jobs; or as `reserve_nodes`.
        HorizonError: as `plan_to_start` does.
    """
    number, fleet = runtime.planner.most_nodes(job.spec), None
    while True:
        plan = await asyncio.to_thread(plan_to_start, num_nodes=number, other_bytes=other_bytes)
        if not plan.fits:
            if not other_bytes:
                raise DoesNotFit(plan.message)
            # Less is free than the plans of the other jobs say, or this one's plan has grown.
            raise Stopped(WAITS_FOR_MEMORY, plan.message)
        fleet = await reserve_nodes(runtime, job.job_id, plan, devices, least=job.spec.nodes.least, before=fleet)
        if (found := 1 if fleet is None else 1 + len(fleet.others)) == number:
            return plan, fleet
        # On fewer nodes each needs more memory, so these are asked again for that.
        number = found


async def continue_on_nodes(
    runtime: Runtime, job_id: str, request: WorkerRequest, devices: AttemptDevices
) -> Fleet | None:
    """Reserve as many nodes for another worker of an attempt as `request` is planned for, those first that it had.

    Raises: Stopped as `reserve_nodes`, for FEWER_NODES where the job may start again on fewer.
    """
    plan = request.plan
    try:
        return await reserve_nodes(runtime, job_id, plan, devices, least=plan.num_nodes, before=request.fleet)
    except Stopped as error:
        if plan.num_nodes == plan.least_nodes:
            raise
        why = f"starts again on the nodes that can be had; for {plan.num_nodes} {error.message}"
        raise Stopped(FEWER_NODES, why) from error


async def reserve_nodes(
    runtime: Runtime, job_id: str, plan: Plan, devices: AttemptDevices, *, least: int, before: Fleet | None
) -> Fleet | None:
    """Reserve the further nodes of a plan, those first that the job had, so that it has at least `least` nodes in all.
    None where it is on this one alone.

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
        host_bytes=plan.host_total_bytes,
        num_ranks=plan.num_devices,
        device_kind=plan.execution.device_kind,
        gpu_name=devices.gpus[0].name if devices.gpus else "",
    )
    try:
        kept = () if before is None else before.others
        others = await runtime.nodes.reserve(reservation, least=least - 1, most=plan.num_nodes - 1, kept=kept)
    except WorkerFailed as error:
        raise Stopped(WAITS_FOR_NODES, error.message) from error
    if not others:
        return None
    return Fleet(address=settings.fleet_address, others=others, key_file=settings.fleet_key_file)


def environment_on(devices: AttemptDevices, request: WorkerRequest, runtime: Runtime) -> dict[str, str]:
    """Return the variables of an attempt's worker: it sees only the GPUs that it is to use, and its libraries use the
    network between its nodes."""
    kind, fleet = request.plan.execution.device_kind, request.fleet
    found = worker_environment(runtime.environment, kind, devices.gpus)
    if fleet is None:
        return found
    interface = interface_of(fleet.address)
    return {**found, "GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}

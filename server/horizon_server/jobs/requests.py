"""What the workers of an attempt are asked for: the first one, and one that continues on other devices in the memory of
the one before it."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from horizon_server.control_groups import WorkerGroup, worker_group
from horizon_server.errors import DoesNotFit, DriveFailed, HorizonError
from horizon_server.events import Payload
from horizon_server.jobs.joint_turn import JointTurn
from horizon_server.jobs.preparation import Preparation, PreparedJob
from horizon_server.jobs.runtime import Runtime
from horizon_server.jobs.turns import DeviceTurns
from horizon_server.planning.machine import Accelerator
from horizon_server.records.job import JobRecord
from horizon_server.records.plan import Plan
from horizon_server.store.adapter_files import is_adapter_folder
from horizon_server.worker_link.request import Fleet, RunLimits, WorkerRequest

log = structlog.get_logger(__name__)

WAITS_FOR_MEMORY = "WAITS_FOR_MEMORY"
"""Reason of a job that was to be loaded and is queued again, as its memory was not free."""
MOVED = "MOVED"
"""Reason of a job that continues on other devices."""


class Stopped(Exception):
    """An attempt stops: its job goes where it was asked to go, else it is queued again, for a stable `reason`."""

    def __init__(self, reason: str = "", message: str = "") -> None:
        super().__init__(message)
        self.reason, self.message = reason, message


@asynccontextmanager
async def planes_or_stop(runtime: Runtime, plan: Plan, job_id: str) -> AsyncIterator[dict[str, int]]:
    """Lend a job its memory and files within the block, as `Bases.lent_planes`.

    Raises:
        DriveFailed: a drive cannot have its file.
        Stopped: a drive has no room for it while other jobs have files there.
    """
    async with AsyncExitStack() as stack:
        try:
            planes = await stack.enter_async_context(runtime.bases.lent_planes(plan, job_id))
        except DriveFailed as error:
            if not runtime.bases.may_have_room_later(job_id, error):
                raise
            raise Stopped(WAITS_FOR_MEMORY, f"it waits for other jobs on drives: {error.message}") from error
        yield planes


class Explained(Exception):
    """An error of a worker whose log's last lines are among the job's events already."""

    def __init__(self, cause: HorizonError) -> None:
        super().__init__(cause.message)
        self.cause = cause


@dataclass(frozen=True, kw_only=True, eq=False)
class AttemptDevices:
    """The devices that an attempt computes on: their names in the node's order, which is that of its ranks, the turns
    on them together, and which GPUs they are."""

    names: tuple[str, ...]
    turns: DeviceTurns | JointTurn
    gpus: tuple[Accelerator, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Move:
    """That a job is to continue on other devices: what its worker there is asked for, why, for people, and since when
    (monotonic)."""

    devices: AttemptDevices
    request: WorkerRequest
    why: str
    asked_s: float = field(default_factory=time.monotonic)


def group_of(job: JobRecord, attempt: int) -> WorkerGroup | None:
    """Return the control group of an attempt's worker, where the node allows one."""
    assert job.plan is not None, "no job is loaded without a plan"
    group, why = worker_group(f"{job.job_id}-{attempt}", job.plan.kept_host_bytes)
    if group is None:
        log.debug("the worker has no control group of its own", why=why)
    return group


def first_request(
    devices: AttemptDevices,
    plan: Plan,
    model: Path,
    prepared: PreparedJob,
    fleet: Fleet | None,
    *,
    job: JobRecord,
    runtime: Runtime,
    log_file: Path,
) -> WorkerRequest:
    """Return what an attempt's first worker is asked for, without the planes."""
    folders, start, max_hours = runtime.folders, runtime.folders.start(job.job_id), job.spec.limits.max_hours
    checkpoints = folders.checkpoints(job.job_id)
    return WorkerRequest(
        job_id=job.job_id,
        attempt=job.attempt,
        spec=job.spec,
        plan=plan,
        model=model,
        prepared=prepared.folder,
        evaluations=prepared.evaluations,
        checkpoints=checkpoints.path,
        min_free_bytes=folders.min_free_bytes,
        adapter=start if is_adapter_folder(start) else None,
        resume_from=checkpoints.newest(),
        # A library of compiled layers belongs to one node. Layers that are not compiled have other bits, which must not
        # depend on how many nodes of a range there were.
        compiled=folders.compiled if job.spec.nodes.most == 1 else None,
        digests=folders.digests,
        trace=log_file.with_name("trace.json") if runtime.settings.trace_workers else None,
        turns=True,
        yields_processors=bool(devices.turns.participants),
        device_locks=tuple(map(folders.device_lock, devices.names)),
        calls=folders.calls(job.job_id) if job.spec.is_session else None,
        fleet=fleet,
        limits=RunLimits(
            max_steps=job.spec.limits.max_steps,
            deadline_s=None if max_hours is None else job.started_s + 3600.0 * max_hours,
        ),
    )


async def request_on(
    devices: AttemptDevices,
    request: WorkerRequest,
    *,
    job: JobRecord,
    runtime: Runtime,
    preparation: Preparation,
    log_file: Path,
) -> WorkerRequest | None:
    """Return the request of a worker that continues a job on `devices`: planned for these, in the memory that is kept
    for it. None where the attempt was asked to stop meanwhile.

    Raises:
        DoesNotFit: the node's limits have changed since the job began.
        HorizonError: as looking up its inputs and planning do.
    """
    before = job.plan
    assert before is not None, "no job is loaded without a plan"

    async def publish(_: Payload) -> None:
        """Nothing: the data was prepared for the worker before."""

    model, dataset, eval_sets = await runtime.find_inputs(job)
    prepared = await preparation.run_all(
        job.spec, model, dataset, eval_sets, log=log_file, environment=runtime.environment, publish=publish
    )
    if prepared is None:
        return None
    plan = await asyncio.to_thread(
        runtime.planner.plan_to_continue,
        job.spec.model_copy(update={"device": before.execution.device_kind}),
        request.model,
        before,
        longest_document=prepared.longest_document,
        data=prepared.size,
        num_devices=len(devices.names),
        gpus=devices.gpus,
    )
    if not plan.fits:
        raise DoesNotFit(plan.message)
    return dataclasses.replace(
        request,
        plan=dataclasses.replace(plan, device=devices.turns.device),
        device_locks=tuple(map(runtime.folders.device_lock, devices.names)),
    )


def text_of_broken(request: WorkerRequest, broken: Mapping[str, str], left: Sequence[str]) -> str:
    """Return what a job says of which devices fail, and only some are left: on which it continues, or what would let
    it."""
    what, least = "; ".join(f"{name} is {why}" for name, why in broken.items()), request.plan.least_devices
    if len(left) >= least:
        return f"{what}, so that it continues on {' and '.join(left)}"
    todo = f"; with gpus: {len(left)}-{request.spec.gpus.most} it would run on the others" if left else ""
    return f"{what}; it needs {least} device{'' if least == 1 else 's'} and continues when there are as many{todo}"

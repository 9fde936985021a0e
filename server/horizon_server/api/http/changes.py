"""The routes below /horizon/v1 that change something: thin callers of the services, like those of gRPC, with the same
rights, limits and entries of the audit log."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

from fastapi import APIRouter, Body, Depends, Path, Request, Response
from pydantic import BaseModel, Field

from horizon_server.api.audited import Asked, Trail
from horizon_server.api.effects import EFFECTS
from horizon_server.api.http import bodies
from horizon_server.api.http.bodies import ErrorBody
from horizon_server.api.http.middleware import Caller, Credentials, Services, admitted, services_of
from horizon_server.api.http.routes import ERRORS, JobKey
from horizon_server.api.limits import address_of
from horizon_server.api.services import Services as AllServices
from horizon_server.errors import HorizonError, InvalidSpec, NotAllowed
from horizon_server.records.account import Principal
from horizon_server.records.job import CheckpointRecord, JobRecord
from horizon_server.services.access import require_scope
from horizon_server.spec import parse_job_spec

ResultT = TypeVar("ResultT")

_CHANGE_ERRORS: dict[int | str, dict[str, Any]] = {
    **ERRORS,
    400: {"model": ErrorBody, "description": "The request cannot be carried out; `violations` name the wrong fields."},
    403: {"model": ErrorBody, "description": "The caller may not do this, the token allows no changes, or a quota."},
    404: {"model": ErrorBody, "description": "No such thing, or not the caller's."},
    408: {"model": ErrorBody, "description": "A check took too long."},
    409: {"model": ErrorBody, "description": "The state of the job does not allow it, or it is in use."},
    413: {"model": ErrorBody, "description": "The body is too large."},
    422: {"model": ErrorBody, "description": "The request is malformed, or the job does not fit the node."},
    429: {"model": ErrorBody, "description": "Too many calls; Retry-After says when to call again."},
    503: {"model": ErrorBody, "description": "The daemon is shutting down, or its database cannot be used now."},
    507: {"model": ErrorBody, "description": "The node's disk is full."},
}
# What browsers say of requests that the page itself makes, or a person by hand.
_OF_THE_PAGE = ("same-origin", "none")
Step = Annotated[int, Path(ge=0, lt=2**62, description="The checkpoint's step.")]


class SpecBody(BaseModel):
    """A job spec, as in a job file."""

    spec: dict[str, Any] = Field(description="GET /horizon/v1/job-schema has its JSON Schema.")


class SubmitBody(SpecBody):
    """A job to submit."""

    request_id: str = Field(
        max_length=64,
        description="A UUID, chosen by the caller for this job and repeated when the request is: it makes one job.",
    )


class PriorityBody(BaseModel):
    """What can be changed of a job."""

    priority: int = Field(
        strict=True,
        ge=-(2**31),
        lt=2**31,
        description="Orders the jobs of one user; above 100 the job is served before all others, which admins may set.",
    )


class KeptBody(BaseModel):
    """Whether a checkpoint is kept from being deleted automatically."""

    kept: bool = Field(strict=True)


class PlanBody(BaseModel):
    """What a job would take."""

    spec: dict[str, Any] = Field(description="The spec with every default filled in.")
    plan: bodies.PlanBody  # type: ignore[valid-type]  # made while running
    places: list[bodies.PlaceBody] = Field(  # type: ignore[valid-type]  # made while running
        description="What it would be on each machine of the fleet; empty where there is only this one."
    )


@dataclass(frozen=True, kw_only=True)
class Change:
    """The caller of a request that changes something, and where from."""

    services: AllServices
    caller: Principal
    origin: str
    request: Request

    async def carry_out(
        self, call: str, asked: Asked, work: Callable[[], Awaitable[ResultT]], changed: Callable[[ResultT], str]
    ) -> ResultT:
        """Return the result of `work`, which is in the audit log before it begins, and with its outcome when it ends.

        Args:
            call: of gRPC that does the same.
            changed: the resource that the result names, or an empty text.
        """
        trail = Trail(self.services.audit, self.caller, origin=self.origin, call=call)
        trail.asked = asked
        try:
            require_scope(self.caller, EFFECTS[call].need)
            require_own_page(self.request)
            await trail.begin()
            result = await work()
        except HorizonError as error:
            await trail.end(outcome=error.reason, message=error.message)
            raise
        except asyncio.CancelledError:
            # The change may have been made: the client has left before its answer.
            await asyncio.shield(trail.end(outcome="CANCELLED"))
            raise
        except Exception:
            await trail.end(outcome=HorizonError.reason)
            raise
        # Before the answer: a change that was acknowledged is in the log.
        await trail.end(changed=changed(result))
        return result

    async def of_job(
        self, call: str, job_id: str, work: Callable[[], Awaitable[JobRecord]], **values: Any
    ) -> JobRecord:
        """Carry out a change of a job, and return the job."""
        return await self.carry_out(
            call, Asked(resource=job_id, values={"job_id": job_id, **values}), work, lambda job: job.job_id
        )


def require_own_page(request: Request) -> None:
    """Let pass a request of the page itself, or of a program. Raises NotAllowed for one that another site's page makes.

    No cookie carries a token, so that such a page has none to send; this refuses it whatever it has.
    """
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        is_own = site in _OF_THE_PAGE
    else:
        origin = request.headers.get("origin")
        is_own = origin is None or urlsplit(origin).netloc == request.headers.get("host")
    if not is_own:
        raise NotAllowed("this request comes from a page of another site; only the daemon's own page may make changes")


async def changing(request: Request, credentials: Credentials) -> Change:
    """Return who makes a change with a body of JSON, when it is their turn.

    Raises:
        Unauthenticated, TooManyCalls: as `change_of`.
        InvalidSpec: when the body says that it is not JSON.
    """
    change = await change_of(request, credentials)
    has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if has_body and kind != "application/json":
        raise InvalidSpec.of("Content-Type", "Content-Type must be application/json")
    return change


async def change_of(request: Request, credentials: Credentials) -> Change:
    """Return who makes a change, when it is their turn.

    Raises:
        Unauthenticated: without a token, or with one that is wrong, expired or revoked.
        TooManyCalls: when the user makes too many calls, or changes.
    """
    principal = await admitted(request, credentials, is_change=True)
    require_scope(principal, "read")  # one for /metrics only does not even get into the audit log
    origin = address_of(request.client.host if request.client else "an unknown address")
    return Change(services=services_of(request), caller=principal, origin=origin, request=request)


Changing = Annotated[Change, Depends(changing)]
router = APIRouter(prefix="/horizon/v1")


@router.post("/jobs", responses=_CHANGE_ERRORS, response_model=bodies.JobBody)
async def submit_job(change: Changing, body: SubmitBody) -> Any:
    """Queue a job, or return the one that the same earlier request made."""
    name = body.spec.get("name")
    jobs = change.services.jobs

    async def submit() -> JobRecord:
        return await jobs.submit(change.caller, request_id=body.request_id, spec=parse_job_spec(body.spec))

    asked = Asked(resource=name if isinstance(name, str) else "")
    return await change.carry_out("JobService/SubmitJob", asked, submit, lambda job: job.job_id)


@router.post("/jobs/plan", responses=_CHANGE_ERRORS, response_model=PlanBody)
async def plan_job(services: Services, caller: Caller, body: SpecBody) -> Any:
    """Show what a job would take of the node, and its spec with every default; nothing is submitted."""
    spec, plan, places = await services.jobs.plan(caller, parse_job_spec(body.spec))
    return {"spec": spec.to_mapping(), "plan": plan, "places": places}


@router.post("/jobs/{job_id}/pause", responses=_CHANGE_ERRORS, response_model=bodies.JobBody)
async def pause_job(change: Changing, job_id: JobKey) -> Any:
    """Checkpoint a job and take it off the device, or out of the queue."""
    return await change.of_job("JobService/PauseJob", job_id, lambda: change.services.jobs.pause(change.caller, job_id))


@router.post("/jobs/{job_id}/resume", responses=_CHANGE_ERRORS, response_model=bodies.JobBody)
async def resume_job(change: Changing, job_id: JobKey) -> Any:
    """Put a paused or failed job at the end of the queue; it continues from its newest checkpoint."""
    return await change.of_job(
        "JobService/ResumeJob", job_id, lambda: change.services.jobs.resume(change.caller, job_id)
    )


@router.post("/jobs/{job_id}/cancel", responses=_CHANGE_ERRORS, response_model=bodies.JobBody)
async def cancel_job(change: Changing, job_id: JobKey) -> Any:
    """End a job; one that has ended already stays as it is."""
    return await change.of_job(
        "JobService/CancelJob", job_id, lambda: change.services.jobs.cancel(change.caller, job_id)
    )


@router.post("/jobs/{job_id}/keep", responses=_CHANGE_ERRORS, response_model=bodies.JobBody)
async def keep_job(change: Changing, job_id: JobKey) -> Any:
    """Keep the checkpoints of an ended job from being deleted automatically."""
    return await change.of_job(
        "HousekeepingService/KeepJob", job_id, lambda: change.services.retention.keep(change.caller, job_id)
    )


@router.patch("/jobs/{job_id}", responses=_CHANGE_ERRORS, response_model=bodies.JobBody)
async def update_job(change: Changing, job_id: JobKey, body: PriorityBody) -> Any:
    """Set the priority of a job that has not ended."""
    return await change.of_job(
        "JobService/UpdateJob",
        job_id,
        lambda: change.services.jobs.update(change.caller, job_id, priority=body.priority),
        priority=body.priority,
    )


@router.delete("/jobs/{job_id}/checkpoints/{step}", responses=_CHANGE_ERRORS, status_code=204, response_class=Response)
async def delete_checkpoint(change: Changing, job_id: JobKey, step: Step) -> None:
    """Remove one checkpoint."""
    await change.carry_out(
        "CheckpointService/DeleteCheckpoint",
        _checkpoint(job_id, step),
        lambda: change.services.jobs.delete_checkpoint(change.caller, job_id, step),
        lambda _: "",
    )


@router.post("/jobs/{job_id}/checkpoints/{step}/keep", responses=_CHANGE_ERRORS, response_model=bodies.CheckpointBody)
async def keep_checkpoint(change: Changing, job_id: JobKey, step: Step, body: Annotated[KeptBody, Body()]) -> Any:
    """Keep one checkpoint from being deleted automatically, or end that."""

    async def keep() -> CheckpointRecord:
        return await change.services.retention.keep_checkpoint(change.caller, job_id, step, kept=body.kept)

    asked = _checkpoint(job_id, step, kept=body.kept)
    return await change.carry_out("CheckpointService/KeepCheckpoint", asked, keep, lambda one: one.job_id)


def _checkpoint(job_id: str, step: int, **values: bool) -> Asked:
    # As on the wire, where a zero is not sent.
    given = {name: value for name, value in {"step": step, **values}.items() if value}
    return Asked(resource=job_id, values={"job_id": job_id, **given})

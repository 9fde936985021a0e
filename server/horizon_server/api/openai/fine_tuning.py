"""/v1/fine_tuning/jobs: jobs like any other, asked for in OpenAI's words."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request

from horizon_server.api.audited import Asked
from horizon_server.api.http.changes import Change
from horizon_server.api.http.middleware import Caller, Services
from horizon_server.api.openai.bodies import read_body
from horizon_server.api.openai.calls import Changing, Cursor, Limit, page_of
from horizon_server.api.openai.errors import BadParameter, about_model, called
from horizon_server.api.openai.files import dataset_key
from horizon_server.api.openai.job_objects import checkpoint_id, checkpoint_object, event_id, event_object, job_object
from horizon_server.api.openai.model_names import BaseName, Tuned, named
from horizon_server.api.openai.tuning import Inputs, JobBody, notes_of, spec_of
from horizon_server.api.services import Services as AllServices
from horizon_server.errors import FieldViolation, NotFound
from horizon_server.events import KINDS, PIPE_KINDS
from horizon_server.planning.model_folder import open_model_folder
from horizon_server.records.account import Principal
from horizon_server.records.blob import DatasetRecord
from horizon_server.records.job import JobFilter, JobRecord
from horizon_server.services.pushed import MAX_PAGE_SIZE
from horizon_server.spec import LORA, JobSpec

_KINDS = tuple(kind for kind in KINDS if kind not in PIPE_KINDS)
# How long the SDK may take to repeat a call: the longest time until its answer, and the pause before the next try.
_REPEATED_S = 900.0
# By their fields in a spec.
_PARAMS: Mapping[str, str] = {
    "name": "suffix",
    "dataset": "training_file",
    "eval_dataset": "validation_file",
    "init_from": "model",
    "train.seed": "seed",
    "train.epochs": "hyperparameters.n_epochs",
    "train.tokens_per_step": "hyperparameters.batch_size",
    "train.learning_rate": "hyperparameters.learning_rate_multiplier",
    "dpo.beta": "hyperparameters.beta",
}

router = APIRouter(prefix="/v1/fine_tuning/jobs")


@router.post("")
async def create_job(change: Changing, request: Request) -> dict[str, Any]:
    """Queue a job."""
    services, caller = change.services, change.caller

    async def create() -> JobRecord:
        body = await read_body(request, JobBody)
        with called(_PARAMS):
            spec = await _spec(services, caller, body)
            # The SDK repeats a call whose answer was lost, with nothing but this header to know it by.
            if request.headers.get("x-stainless-retry-count", "0") != "0":
                earlier = await _earlier(services, caller, spec)
                if earlier is not None:
                    return earlier
            notes = notes_of(body, spec)
            return await services.jobs.submit(caller, request_id=str(uuid.uuid4()), spec=spec, notes=notes)

    job = await change.carry_out("JobService/SubmitJob", Asked(), create, lambda made: made.job_id)
    return await _shown(services, job)


@router.get("")
async def list_jobs(
    request: Request, services: Services, caller: Caller, limit: Limit = 20, after: Cursor = ""
) -> dict[str, Any]:
    """List jobs that have data, newest first; those whose notes are as asked for."""
    wanted, limit, token = _wanted_metadata(request), min(limit, MAX_PAGE_SIZE), ""
    if after:
        token = await services.jobs.token_after(await _job(services, caller, after))
    found: list[JobRecord] = []
    while len(found) <= limit:
        page, token = await services.jobs.list(caller, page_size=limit + 1, page_token=token)
        found += [job for job in page if job.dataset_id and _has_notes(job, wanted)]
        if not token:
            break
    return page_of(await _all_shown(services, found[:limit]), has_more=len(found) > limit)


@router.get("/{job_id}")
async def retrieve_job(services: Services, caller: Caller, job_id: str) -> dict[str, Any]:
    """Show one job."""
    return await _shown(services, await _job(services, caller, job_id))


@router.post("/{job_id}/cancel")
async def cancel_job(change: Changing, job_id: str) -> dict[str, Any]:
    """End a job; one that has ended already stays as it is."""
    return await _changed(change, "JobService/CancelJob", job_id, change.services.jobs.cancel)


@router.post("/{job_id}/pause")
async def pause_job(change: Changing, job_id: str) -> dict[str, Any]:
    """Checkpoint a job and take it off the device, or out of the queue."""
    return await _changed(change, "JobService/PauseJob", job_id, change.services.jobs.pause)


@router.post("/{job_id}/resume")
async def resume_job(change: Changing, job_id: str) -> dict[str, Any]:
    """Put a paused or failed job back into the queue."""
    return await _changed(change, "JobService/ResumeJob", job_id, change.services.jobs.resume)


@router.get("/{job_id}/events")
async def list_events(
    services: Services, caller: Caller, job_id: str, limit: Limit = 20, after: Cursor = ""
) -> dict[str, Any]:
    """List what has happened to a job, the newest first."""
    job = await _job(services, caller, job_id)
    end = job.last_sequence + 1
    if after:
        found = re.fullmatch(re.escape(event_id(job.job_id, 0)[:-1]) + r"([0-9]{1,15})", after)
        if found is None:
            raise BadParameter("after", f"Invalid value for 'after': {after!r:.80} is not an event of this job")
        end = min(end, int(found[1]))
    # Events are numbered from 1 without gaps.
    first = max(1, end - min(limit, MAX_PAGE_SIZE))
    events: list[dict[str, Any]] = []

    def visit(number: int, time_s: float, event: dict[str, Any]) -> None:
        if number < end:
            events.append(event_object(job.job_id, number, time_s, event))

    await services.jobs.visit_events(job, kinds=_KINDS, after=first - 1, limit=end - first, visit=visit)
    return page_of(events[::-1], has_more=first > 1 and bool(events))


@router.get("/{job_id}/checkpoints")
async def list_checkpoints(
    services: Services, caller: Caller, job_id: str, limit: Limit = 10, after: Cursor = ""
) -> dict[str, Any]:
    """List the checkpoints of a job, the newest first."""
    job = await _job(services, caller, job_id)
    found = (await services.jobs.checkpoints(caller, job.job_id))[::-1]
    if after:
        ids = [checkpoint_id(record) for record in found]
        if after not in ids:
            raise BadParameter("after", f"Invalid value for 'after': {after!r:.80} is not a checkpoint of this job")
        found = found[ids.index(after) + 1 :]
    evaluated = {one.step: one for one in await services.jobs.evaluations(caller, job.job_id)}
    shown = [checkpoint_object(job, record, evaluated.get(record.step)) for record in found[:limit]]
    return page_of(shown, has_more=len(found) > limit)


async def _changed(change: Change, call: str, key: str, work: Any) -> dict[str, Any]:
    async def change_it() -> JobRecord:
        job = await _job(change.services, change.caller, key)
        changed: JobRecord = await work(change.caller, job.job_id)
        return changed

    return await _shown(change.services, await change.of_job(call, key, change_it))


async def _job(services: AllServices, caller: Principal, key: str) -> JobRecord:
    try:
        job = await services.jobs.get(caller, key)
        if job.dataset_id:
            return job
    except NotFound:
        pass
    message = f"Could not find fine tune: {key:.100}"
    raise NotFound(message, violations=[FieldViolation(field="fine_tuning_job_id", description=message)])


async def _shown(services: AllServices, job: JobRecord) -> dict[str, Any]:
    return (await _all_shown(services, [job]))[0]


async def _all_shown(services: AllServices, jobs: Sequence[JobRecord]) -> list[dict[str, Any]]:
    found: dict[str, DatasetRecord | None] = {}
    for key in {job.dataset_id for job in jobs}:
        try:
            found[key] = await services.datasets.by_id(key)
        except NotFound:
            found[key] = None
    return [job_object(job, found[job.dataset_id]) for job in jobs]


async def _spec(services: AllServices, caller: Principal, body: JobBody) -> JobSpec:
    found = await named(services, caller, body.model)
    model = found.name if isinstance(found, BaseName) else found.job.spec.model
    try:
        _, folder = await services.jobs.resources.model(caller, model)
    except NotFound as error:
        about_model(error)
        raise
    training = await _dataset(services, caller, "training_file", body.training_file)
    validation = (
        await _dataset(services, caller, "validation_file", body.validation_file) if body.validation_file else None
    )
    shape = (await asyncio.to_thread(open_model_folder, folder)).shape
    inputs = Inputs(
        model=model,
        init_from=f"{found.job.job_id}@{found.checkpoint.step}" if isinstance(found, Tuned) else None,
        training=training,
        validation=validation,
        positions=shape.max_position_embeddings,
        train=_start_of(found),
    )
    return spec_of(body, inputs)


def _start_of(found: BaseName | Tuned) -> dict[str, Any]:
    """What of `train` a job inherits from the one that it continues: an adapter is continued as one."""
    if isinstance(found, BaseName) or found.job.spec.train.trainable != LORA:
        return {}
    return {"trainable": list(LORA), "lora": found.job.spec.train.lora.model_dump(mode="json")}


async def _dataset(services: AllServices, caller: Principal, param: str, key: str) -> DatasetRecord:
    try:
        return await services.datasets.get_ready(caller, dataset_key(key))
    except NotFound as error:
        message = f"invalid {param}: {key:.100}; there is no such file, or it is not yours"
        raise NotFound(message, violations=[FieldViolation(field=param, description=message)]) from error


async def _earlier(services: AllServices, caller: Principal, spec: JobSpec) -> JobRecord | None:
    """Return the caller's job of the same spec that was created just now; None where there is none."""
    page, _ = await services.jobs.list(caller, only=JobFilter(owner=caller.name))
    spec = spec if spec.project else spec.in_project(caller.project)
    return next((job for job in page if job.spec == spec and time.time() - job.created_s < _REPEATED_S), None)


def _wanted_metadata(request: Request) -> dict[str, str] | None:
    """Return the notes that listed jobs are to have; None for those that have none at all."""
    if request.query_params.get("metadata") == "null":
        return None
    found = {}
    for name, value in request.query_params.items():
        if key := re.fullmatch(r"metadata\[(.{1,64})\]", name):
            found[key[1]] = value
    return found


def _has_notes(job: JobRecord, wanted: Mapping[str, str] | None) -> bool:
    if wanted is None:
        return not job.spec.metadata
    return all(job.spec.metadata.get(name) == value for name, value in wanted.items())

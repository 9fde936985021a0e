"""/v1/models: what can be trained and asked. Bases are pushed models and those of the hub; a job that has succeeded is
a fine-tuned model, and each of its checkpoints can be named too."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from typing import Any

from fastapi import APIRouter

from horizon_server.api.audited import Asked
from horizon_server.api.http.middleware import Caller, Services
from horizon_server.api.openai.calls import Changing, page_of
from horizon_server.api.openai.errors import model_not_found
from horizon_server.api.openai.model_names import Tuned, checkpoint_of, is_tuned, job_of, named, tuned_name
from horizon_server.api.services import Services as AllServices
from horizon_server.errors import NotAllowed, NotFound
from horizon_server.records.account import Principal
from horizon_server.records.blob import ModelRecord
from horizon_server.records.job import JobRecord, JobState
from horizon_server.services.pushed import MAX_PAGE_SIZE
from horizon_server.store.adapter_files import PEFT_LORA

router = APIRouter(prefix="/v1/models")


@router.get("")
async def list_models(services: Services, caller: Caller) -> dict[str, Any]:
    """List the newest bases that the caller may use, and what the newest jobs have made of them."""
    # OpenAI's list has no pages.
    bases = await _bases(services, caller)
    jobs, _ = await services.jobs.list(caller, page_size=MAX_PAGE_SIZE, states=(JobState.SUCCEEDED,))
    here = await asyncio.to_thread(services.jobs.folders.checkpoint_bytes)
    # Of one in another box it is not looked up; asked for by its name, it is.
    tuned = [_tuned_object(job) for job in jobs if job.job_id in here or job.box]
    return page_of([*bases, *tuned], has_more=False)


@router.get("/{model:path}")
async def retrieve_model(services: Services, caller: Caller, model: str) -> dict[str, Any]:
    """Show one model, under the name that was asked for."""
    found = await named(services, caller, model)
    if isinstance(found, Tuned):
        return {**_tuned_object(found.job), "id": model, "created": int(found.checkpoint.created_s)}
    try:
        record = await services.models.get_ready(caller, model)
    except NotFound as error:
        raise model_not_found(model) from error
    if record.architecture == PEFT_LORA:
        raise model_not_found(model)
    return _base_object(record, model)


@router.delete("/{model:path}")
async def delete_model(change: Changing, model: str) -> dict[str, Any]:
    """Remove the checkpoints of a job that has ended, or the one that is named; the job itself stays."""
    services, caller = change.services, change.caller
    if not is_tuned(model):
        await retrieve_model(services, caller, model)
        raise NotAllowed(
            f"{model} is a base, not a fine-tuned model; its owner deletes it with: horizon model delete {model}"
        )
    job, which = await job_of(services, caller, model)
    if which:
        steps = [checkpoint_of(await services.jobs.checkpoints(caller, job.job_id), which, model).step]
    else:
        steps = [record.step for record in await services.jobs.checkpoints(caller, job.job_id)]
    if not steps:
        raise model_not_found(model)

    async def delete(step: int) -> None:
        asked = Asked(resource=job.job_id, values={"step": step})
        work = partial(services.jobs.delete_checkpoint, caller, job.job_id, step)
        await change.carry_out("CheckpointService/DeleteCheckpoint", asked, work, lambda _: job.job_id)

    # The newest first: where the job has not ended, that one is refused.
    for step in sorted(steps, reverse=True):
        await delete(step)
    return {"id": model, "object": "model", "deleted": True}


async def _bases(services: AllServices, caller: Principal) -> list[dict[str, Any]]:
    page, _ = await services.models.list(caller, page_size=MAX_PAGE_SIZE)
    records = [record for record in page if record.ready and record.architecture != PEFT_LORA]
    # A name means the caller's own model, or the only one of that name.
    number = Counter(record.name for record in records)
    return [
        _base_object(
            record,
            record.name if record.owner == caller.name or number[record.name] == 1 else record.model_id,
        )
        for record in records
    ]


def _base_object(record: ModelRecord, name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(record.created_s), "owned_by": record.owner}


def _tuned_object(job: JobRecord) -> dict[str, Any]:
    created_s = job.ended_s or job.created_s
    return {"id": tuned_name(job), "object": "model", "created": int(created_s), "owned_by": job.owner}

"""The routes below /horizon/v1: thin readers over the services. `/v1` and `/api/v1` stay free for other ecosystems."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query, Request, Response
from fastapi.responses import StreamingResponse

from horizon_server.api.http.bodies import (
    CheckpointList,
    CurveBody,
    DatasetPage,
    ErrorBody,
    JobBody,
    JobPage,
    ModelPage,
    NodeBody,
    PreviewBody,
    QueueBody,
    checkpoint_body,
    dataset_body,
    job_body,
    model_body,
    node_body,
    preview_body,
    queue_entry,
)
from horizon_server.api.http.caller import Caller, Services
from horizon_server.api.http.curve import read_curve
from horizon_server.api.http.event_stream import event_lines, resume_after
from horizon_server.datasets.preview.request import MAX_ROWS, PreviewOptions
from horizon_server.records.job import ENDED, JobState

_ERRORS: dict[int | str, dict[str, Any]] = {
    401: {"model": ErrorBody, "description": "No token, or one that is wrong, expired or revoked."},
    422: {"model": ErrorBody, "description": "A parameter is malformed."},
}
_PREVIEW_ERRORS = {
    **_ERRORS,
    400: {"model": ErrorBody, "description": "An option is out of range, or the model cannot render the dataset."},
    404: {"model": ErrorBody, "description": "No such dataset or model, or not the caller's."},
    408: {"model": ErrorBody, "description": "Rendering took too long."},
}
_JOB_ERRORS = {**_ERRORS, 404: {"model": ErrorBody, "description": "No such job, or not the caller's."}}

PageSize = Annotated[int, Query(ge=1, le=1000, description="At most so many.")]
PageToken = Annotated[str, Query(max_length=200, description="next_page_token of an earlier answer.")]
JobKey = Annotated[str, Path(max_length=63, description="The job's id, or its name.")]

router = APIRouter(prefix="/horizon/v1")


@router.get("/node", responses=_ERRORS)
async def get_node(services: Services, caller: Caller) -> NodeBody:
    """Show the machine: memory, disk, accelerators, jobs by state."""
    return node_body(await services.node.describe(caller))


@router.get("/queue", responses=_ERRORS)
async def get_queue(services: Services, caller: Caller) -> QueueBody:
    """Show everybody's waiting and running jobs; of others' jobs only id, owner, state and position."""
    return QueueBody(jobs=[queue_entry(job, caller) for job in await services.jobs.queue()])


@router.get("/jobs", responses=_ERRORS)
async def list_jobs(
    services: Services,
    caller: Caller,
    state: Annotated[list[JobState] | None, Query(description="Only these states; may be given several times.")] = None,
    page_size: PageSize = 100,
    page_token: PageToken = "",
) -> JobPage:
    """List the caller's jobs, newest first; admins and viewers see all."""
    wanted = frozenset(state or ())
    jobs, following = await services.jobs.list(caller, page_size=page_size, page_token=page_token, states=wanted)
    return JobPage(jobs=[job_body(job) for job in jobs], next_page_token=following)


@router.get("/jobs/{job_id}", responses=_JOB_ERRORS)
async def get_job(services: Services, caller: Caller, job_id: JobKey) -> JobBody:
    """Show one job."""
    return job_body(await services.jobs.get(caller, job_id))


@router.get(
    "/jobs/{job_id}/events",
    response_class=StreamingResponse,
    responses={
        **_JOB_ERRORS,
        200: {
            "description": "Server-sent events: state, step, prepare, eval, checkpoint, message; `end` after the last one.",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        },
        204: {"description": "The job has ended and there is nothing after the given event: do not reconnect."},
    },
)
async def watch_job(
    request: Request,
    services: Services,
    caller: Caller,
    job_id: JobKey,
    last_event_id: Annotated[str | None, Header(description="Number of the last event received.")] = None,
    after: Annotated[str | None, Query(description="The same, for clients that cannot set the header.")] = None,
) -> Response:
    """Stream the job's events from a number on, as they come."""
    sequence = resume_after(last_event_id, after)
    job = await services.jobs.get(caller, job_id)
    if job.job_state in ENDED and sequence >= job.last_sequence:
        return Response(status_code=204)
    events = services.jobs.watch(caller, job.job_id, sequence)
    lines = event_lines(events, request.app.state.closing)
    return StreamingResponse(lines, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


@router.get("/jobs/{job_id}/metrics", responses=_JOB_ERRORS)
async def get_curve(services: Services, caller: Caller, job_id: JobKey) -> CurveBody:
    """Show the job's loss curve: at most 2000 points."""
    job = await services.jobs.get(caller, job_id)
    return await read_curve(job, services.jobs.watch(caller, job.job_id, 0))


@router.get("/jobs/{job_id}/checkpoints", responses=_JOB_ERRORS)
async def list_checkpoints(services: Services, caller: Caller, job_id: JobKey) -> CheckpointList:
    """List the job's complete checkpoints, oldest first."""
    found = await services.jobs.checkpoints(caller, job_id)
    return CheckpointList(checkpoints=[checkpoint_body(checkpoint) for checkpoint in found])


@router.get("/datasets", responses=_ERRORS)
async def list_datasets(
    services: Services, caller: Caller, page_size: PageSize = 100, page_token: PageToken = ""
) -> DatasetPage:
    """List the caller's datasets, newest first."""
    datasets, following = await services.datasets.list(caller, page_size=page_size, page_token=page_token)
    return DatasetPage(datasets=[dataset_body(dataset) for dataset in datasets], next_page_token=following)


@router.get("/datasets/{name}/preview", responses=_PREVIEW_ERRORS)
async def preview_dataset(
    services: Services,
    caller: Caller,
    name: Annotated[str, Path(max_length=63, description="The dataset's name or id.")],
    model: Annotated[
        str, Query(max_length=4096, description="The model whose template and tokenizer render the rows.")
    ],
    n: Annotated[int, Query(ge=1, le=MAX_ROWS, description="How many rows.")] = 3,
    offset: Annotated[int, Query(ge=0, description="Rows to pass over first, counted over all files.")] = 0,
    train_on: Annotated[str, Query(description="assistant, last-assistant or all.")] = "assistant",
    method: Annotated[str, Query(description="sft or pretrain.")] = "sft",
    sequence_length: Annotated[int, Query(description="Where a job would cut rows.")] = 1024,
) -> PreviewBody:
    """Show rows as the model will see them, with the trained part marked."""
    options = PreviewOptions(
        num_rows=n, offset=offset, train_on=train_on, method=method, sequence_length=sequence_length
    )
    return preview_body(await services.previews.preview(caller, name, model, options))


@router.get("/models", responses=_ERRORS)
async def list_models(
    services: Services, caller: Caller, page_size: PageSize = 100, page_token: PageToken = ""
) -> ModelPage:
    """List the caller's models, newest first."""
    models, following = await services.models.list(caller, page_size=page_size, page_token=page_token)
    return ModelPage(models=[model_body(model) for model in models], next_page_token=following)

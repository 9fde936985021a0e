"""The routes below /horizon/v1 that read: thin callers of the services.

Below `/v1` OpenAI's API is answered (`api.openai`), below `/api/v1` Tinker's (`api.tinker`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Annotated, Any, cast, get_args

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from pydantic import BeforeValidator, Field
from sse_starlette import EventSourceResponse, ServerSentEvent

from horizon_server.api.cached_on import cached_on
from horizon_server.api.http import bodies
from horizon_server.api.http.bodies import ErrorBody
from horizon_server.api.http.live import RETRY_MS, SEPARATOR, TOPICS, LivePages, event_body, frame
from horizon_server.api.http.middleware import Caller, Services, error_body
from horizon_server.api.http.series import MAX_FIGURES, MAX_POINTS, AskedSeries, CurveBody, SeriesBody, SeriesOfJobs
from horizon_server.api.services import OpenStreams
from horizon_server.api.sharing import USAGE_OF_S, AllowanceUse, QueueEntry
from horizon_server.datasets.preview import MAX_ROWS, PreviewOptions
from horizon_server.errors import HorizonError
from horizon_server.events import KINDS, PIPE_KINDS, JobEvent, kind_of
from horizon_server.jobs.folders import LOG_PIECE_BYTES
from horizon_server.records.account import Principal
from horizon_server.records.job import ENDED, JobFilter, JobState
from horizon_server.services.access import may_change
from horizon_server.services.jobs import MAX_SEARCH
from horizon_server.spec import Method, TrainOn, TrainSpec, job_schema

HEARTBEAT_S = 15
ERRORS: dict[int | str, dict[str, Any]] = {
    401: {"model": ErrorBody, "description": "No token, or one that is wrong, expired or revoked."},
    403: {"model": ErrorBody, "description": "The token is for /metrics only."},
    422: {"model": ErrorBody, "description": "A parameter is malformed."},
}
_LIST_ERRORS = {**ERRORS, 400: {"model": ErrorBody, "description": "page_token is not one of an earlier answer."}}
_USAGE_ERRORS = {**ERRORS, 400: {"model": ErrorBody, "description": "The time is not in the past."}}
_PREVIEW_ERRORS = {
    **ERRORS,
    400: {"model": ErrorBody, "description": "An option is out of range, or the model cannot render the dataset."},
    404: {"model": ErrorBody, "description": "No such dataset or model, or not the caller's."},
    408: {"model": ErrorBody, "description": "Rendering took too long."},
}
_JOB_ERRORS = {**ERRORS, 404: {"model": ErrorBody, "description": "No such job, or not the caller's."}}
_EVENT_SCHEMA = {
    "type": "object",
    "required": ["event"],
    "properties": {
        "id": {"type": "string", "description": "Number of the event within the job."},
        "event": {"enum": [*(kind for kind in KINDS if kind not in PIPE_KINDS), "end", "problem"]},
        "data": {"type": "string", "contentMediaType": "application/json"},
        "retry": {"type": "integer"},
    },
}

_TOPIC = f"({'|'.join(TOPICS)})"
_STREAM_ERRORS = {
    **_JOB_ERRORS,
    400: {"model": ErrorBody, "description": "Too many jobs, or not one number for each."},
    429: {"model": ErrorBody, "description": "The caller has too many pages open."},
}
_LIVE_SCHEMA = {
    "type": "object",
    "properties": {
        "event": {"enum": [*TOPICS, "job", "problem"]},
        "data": {"type": "string", "contentMediaType": "application/json"},
        "retry": {"type": "integer"},
    },
}

PageSize = Annotated[int, Query(ge=1, le=1000, description="Maximum number to list.")]
PageToken = Annotated[
    str, Query(max_length=200, pattern="^[A-Za-z0-9_=-]*$", description="next_page_token of an earlier answer.")
]


def _not_a_number(given: Any) -> Any:
    """Refuse what pydantic would take for seconds since 1970: the schema asks for a date and time."""
    try:
        float(given)
    except (TypeError, ValueError):
        return given
    raise ValueError("it must be a date and time in ISO 8601, such as 2026-01-31 or 2026-01-31T12:00:00Z")


Since = Annotated[
    datetime | None,
    BeforeValidator(_not_a_number),
    Query(description="Since when, in ISO 8601; UTC where it has no offset. Default: 7 days ago."),
]
JobKey = Annotated[str, Path(max_length=63, description="The job's id, or its name.")]
EventNumber = Annotated[int, Query(ge=0, lt=2**63, description="The same, for clients that cannot set the header.")]
LastEventId = Annotated[int, Header(ge=0, lt=2**63, description="Number of the last event received.")]


def _series_of(request: Request) -> SeriesOfJobs:
    """Return the series that the app keeps."""
    return cast(SeriesOfJobs, request.app.state.series)


FigureName = Annotated[str, Field(max_length=200)]
Series = Annotated[SeriesOfJobs, Depends(_series_of)]

_LAST_ROW = 2**63 - 1
_LAST_STEP = 2**62 - 1
_length = TrainSpec.model_json_schema()["properties"]["sequence_length"]
_SEQUENCE_LENGTHS = {name: _length[name] for name in ("minimum", "maximum")}


def _only(values: Iterable[str]) -> dict[str, Any]:
    return {"enum": list(values)}


# A body that is made of a record goes into `response_model`: a type that is made while running cannot be an annotation.
router = APIRouter(prefix="/horizon/v1")


@router.get("/me", responses=ERRORS, response_model=bodies.MeBody)
async def get_me(caller: Caller) -> Any:
    """Show who calls, and what they may do."""
    projects = [{"name": name, "role": role} for name, role in sorted(caller.memberships.items())]
    return {**vars(caller), "projects": projects, "may_change": may_change(caller)}


@router.get("/job-schema", responses=ERRORS)
async def get_job_schema(caller: Caller) -> dict[str, Any]:
    """Show the JSON Schema of a job spec."""
    return job_schema()


@router.get("/node", responses=ERRORS, response_model=bodies.NodeBody)
async def get_node(services: Services, caller: Caller) -> Any:
    """Show the machine: memory, disk, accelerators, jobs by state."""
    return await services.node.describe(caller)


@router.get("/queue", responses=ERRORS, response_model=bodies.QueueBody)
async def get_queue(services: Services, caller: Caller) -> Any:
    """Show everybody's resident and waiting jobs, and why each is where it is; of other users' jobs only id, owner,
    state and times."""
    return {"jobs": [QueueEntry.seen_by(caller, job) for job in await services.jobs.queue(caller)]}


@router.get("/usage", responses=_USAGE_ERRORS, response_model=bodies.UsageBody)
async def get_usage(services: Services, caller: Caller, since: Since = None) -> Any:
    """Show device time, tokens, storage and jobs by outcome since a time: the caller's own; everybody's for admins and
    viewers."""
    # A time without an offset is in UTC, as all times of this interface.
    given = since.replace(tzinfo=since.tzinfo or UTC) if since else None
    since_s = given.timestamp() if given else time.time() - USAGE_OF_S
    usages = await services.sharing.usage(caller, since_s)
    return {"since_time": datetime.fromtimestamp(since_s, UTC), "usages": usages}


@router.get("/quota", responses=ERRORS, response_model=bodies.QuotaBody)
async def get_quota(services: Services, caller: Caller) -> Any:
    """Show the weights and quotas of the caller and of their project, and how much of each is used."""
    return {"allowances": AllowanceUse.all_of(await services.sharing.quota(caller))}


@router.get("/projects", responses=ERRORS, response_model=bodies.ProjectList)
async def list_projects(services: Services, caller: Caller) -> Any:
    """List the caller's projects with their members; all projects for admins and viewers."""
    return {"projects": await services.identity.projects(caller)}


@router.get("/jobs", responses=_LIST_ERRORS, response_model=bodies.JobPage)
async def list_jobs(
    services: Services,
    caller: Caller,
    state: Annotated[list[JobState] | None, Query(description="Filter by state (repeatable).")] = None,
    owner: Annotated[str, Query(max_length=63, description="Only jobs of this user.")] = "",
    project: Annotated[str, Query(max_length=63, description="Only jobs of this project.")] = "",
    search: Annotated[
        str, Query(max_length=MAX_SEARCH, description="Part of the name, id, owner, model or dataset, in any case.")
    ] = "",
    page_size: PageSize = 100,
    page_token: PageToken = "",
) -> Any:
    """List the jobs that the caller may see, newest first."""
    jobs, following = await services.jobs.list(
        caller,
        page_size=page_size,
        page_token=page_token,
        states=frozenset(state or ()),
        only=JobFilter(owner=owner, project=project, search=search),
    )
    return bodies.packed(bodies.JobBody, "jobs", jobs, next_page_token=following)


@router.get("/jobs/{job_id}", responses=_JOB_ERRORS, response_model=bodies.JobBody)
async def get_job(services: Services, caller: Caller, job_id: JobKey) -> Any:
    """Show one job."""
    return await services.jobs.get(caller, job_id)


@router.get(
    "/jobs/{job_id}/events",
    response_class=Response,
    responses={
        **_JOB_ERRORS,
        200: {
            "description": "Server-sent events: state, step, prepare, eval, checkpoint, message; `end` after the last "
            "one.",
            "content": {"text/event-stream": {"itemSchema": _EVENT_SCHEMA}},
        },
        204: {"description": "The job has ended and there is nothing after the given event: do not reconnect."},
    },
)
async def watch_job(
    request: Request,
    services: Services,
    caller: Caller,
    job_id: JobKey,
    last_event_id: LastEventId = 0,
    after: EventNumber = 0,
) -> Response:
    """Stream the job's events after a number, as they happen."""
    sequence = last_event_id or after
    job = await services.jobs.get(caller, job_id)
    if job.job_state in ENDED and sequence >= job.last_sequence:
        # A browser's EventSource reconnects after every other end.
        return Response(status_code=204)
    return _streamed(event_frames(services.jobs.watch(caller, job.job_id, sequence), request.app.state.streams, caller))


def _streamed(frames: AsyncIterator[ServerSentEvent]) -> Response:
    return EventSourceResponse(
        frames,
        ping=HEARTBEAT_S,
        ping_message_factory=lambda: ServerSentEvent(comment="heartbeat", sep=SEPARATOR),
        sep=SEPARATOR,
    )


@router.get(
    "/stream",
    response_class=Response,
    responses={
        **_STREAM_ERRORS,
        200: {
            "description": "Server-sent events: `jobs`, `queue`, `node` and `job`, first what there is, then changes, "
            "at most one of each in a second; `problem` before an end that is not the caller's.",
            "content": {"text/event-stream": {"itemSchema": _LIVE_SCHEMA}},
        },
    },
)
async def stream(
    request: Request,
    caller: Caller,
    topics: Annotated[
        str, Query(pattern=f"^({_TOPIC}(,{_TOPIC})*)?$", max_length=40, description="Which of jobs, queue and node.")
    ] = ",".join(TOPICS),
    jobs: Annotated[str, Query(max_length=600, description="Jobs whose events to stream too: ids or names.")] = "",
    after: Annotated[
        str,
        Query(
            pattern=r"^([0-9]{1,18}(,[0-9]{1,18})*)?$",
            max_length=200,
            description="For each of these jobs, the number of the last event received. Default: only new events.",
        ),
    ] = "",
) -> Response:
    """Stream what a page shows, as it changes: the jobs that the caller may see, the queue, the node, and the events of
    some jobs."""
    live: LivePages = request.app.state.live
    live.require_room(caller.name)
    keys = [key for key in jobs.split(",") if key]
    shown = await live.shown_jobs(caller, keys, [int(number) for number in after.split(",") if number])
    return _streamed(live.frames(caller, topics.split(","), shown))


async def event_frames(
    events: AsyncGenerator[JobEvent, None], streams: OpenStreams, principal: Principal
) -> AsyncIterator[ServerSentEvent]:
    """Yield the stream's frames until the job has ended (a last `end` event), the daemon stops, or the caller is gone.

    An error, such as Draining, becomes a `problem` event with the same body as any other answer's.
    """
    yield ServerSentEvent(retry=RETRY_MS, sep=SEPARATOR)
    try:
        async with streams.one(principal), aclosing(events):
            # Ended by a timeout of this very task, so it must be the one that iterates: EventSourceResponse does.
            async for event in events:
                yield cached_on(event, "sse", functools.partial(_event_frame, event))
        yield frame("end", {})
    except HorizonError as error:
        yield frame("problem", error_body(error).model_dump())


def _event_frame(event: JobEvent) -> ServerSentEvent:
    return frame(kind_of(event.payload), event_body(event), number=str(event.sequence))


@router.get("/jobs/{job_id}/metrics", responses=_JOB_ERRORS)
async def get_curve(services: Services, series: Series, caller: Caller, job_id: JobKey) -> CurveBody:
    """Show the job's loss curve: at most 2000 points, each the mean of `every_steps` steps."""
    return await series.curve(services.jobs, await services.jobs.get(caller, job_id))


@router.get("/jobs/{job_id}/series", response_class=Response, responses={**_JOB_ERRORS, 200: {"model": SeriesBody}})
async def get_series(
    services: Services,
    series: Series,
    caller: Caller,
    job_id: JobKey,
    points: Annotated[int, Query(ge=1, le=MAX_POINTS, description="Maximum number of points.")] = 1000,
    from_step: Annotated[int, Query(ge=0, lt=2**62, description="First step to show.")] = 0,
    to_step: Annotated[
        int, Query(ge=0, lt=2**62, description="Last step to show. Default: the last one.")
    ] = _LAST_STEP,
    name: Annotated[
        list[FigureName] | None,
        Query(max_length=MAX_FIGURES, description="Figures to show (repeatable). Default: all."),
    ] = None,
    sketch: Annotated[
        bool,
        Query(description="Where much is to be read first, read some of the steps only; then `complete` is false."),
    ] = False,
) -> Response:
    """Show curves of what the job's steps and evaluations measured, for plots: each point is the mean, the least and
    the greatest value of `every_steps` steps. A range of at most 20,000 steps is read again, in full detail."""
    asked = AskedSeries(points=points, from_step=from_step, to_step=to_step, names=tuple(name or ()), sketch=sketch)
    body = await series.body(services.jobs, await services.jobs.get(caller, job_id), asked)
    return Response(body, media_type="application/json")


@router.get("/jobs/{job_id}/log", responses=_JOB_ERRORS, response_model=bodies.LogBody)
async def get_log(
    services: Services,
    caller: Caller,
    job_id: JobKey,
    attempt: Annotated[int, Query(ge=0, lt=2**31, description="Which attempt. Default: the last one.")] = 0,
    offset: Annotated[int, Query(ge=-1, lt=2**62, description="First byte; -1 for the end of the log.")] = 0,
    limit: Annotated[int, Query(ge=1, le=LOG_PIECE_BYTES, description="Maximum number of bytes.")] = LOG_PIECE_BYTES,
) -> Any:
    """Show a part of what an attempt of the job has logged, in whole lines."""
    from_byte = None if offset < 0 else offset
    return await services.jobs.log_part(caller, job_id, attempt=attempt, offset=from_byte, limit=limit)


@router.get("/jobs/{job_id}/answers", responses=_JOB_ERRORS, response_model=bodies.AnswersBody)
async def get_answers(services: Services, caller: Caller, job_id: JobKey) -> Any:
    """Show the answers that the job's model gave in its last evaluations, at most 50 of these."""
    evaluations = await services.jobs.evaluations(caller, job_id)
    return {
        "evaluations": [
            {"step": one.step, "set_names": [each.name for each in one.sets], "answers": one.answers}
            for one in evaluations
            if one.answers
        ]
    }


@router.get("/jobs/{job_id}/checkpoints", responses=_JOB_ERRORS, response_model=bodies.CheckpointList)
async def list_checkpoints(services: Services, caller: Caller, job_id: JobKey) -> Any:
    """List the job's complete checkpoints, oldest first."""
    return {"checkpoints": await services.jobs.checkpoints(caller, job_id)}


@router.get("/datasets", responses=_LIST_ERRORS, response_model=bodies.DatasetPage)
async def list_datasets(
    services: Services, caller: Caller, page_size: PageSize = 100, page_token: PageToken = ""
) -> Any:
    """List the caller's datasets, newest first."""
    datasets, following = await services.datasets.list(caller, page_size=page_size, page_token=page_token)
    return {"datasets": datasets, "next_page_token": following}


@router.get("/datasets/{name}/preview", responses=_PREVIEW_ERRORS, response_model=bodies.PreviewBody)
async def preview_dataset(
    services: Services,
    caller: Caller,
    name: Annotated[str, Path(max_length=63, description="The dataset's name or id.")],
    model: Annotated[
        str, Query(max_length=4096, description="The model whose template and tokenizer render the rows.")
    ],
    n: Annotated[int, Query(ge=1, le=MAX_ROWS, description="How many rows.")] = 3,
    offset: Annotated[int, Query(ge=0, le=_LAST_ROW, description="Rows to skip first, counted over all files.")] = 0,
    train_on: Annotated[
        str, Query(description="What is trained.", json_schema_extra=_only(get_args(TrainOn)))
    ] = "assistant",
    method: Annotated[str, Query(description="A job's method.", json_schema_extra=_only(get_args(Method)))] = "sft",
    sequence_length: Annotated[
        int, Query(description="Where a job would cut rows.", json_schema_extra=_SEQUENCE_LENGTHS)
    ] = 1024,
) -> Any:
    """Show rows as the model will see them, with the trained part marked."""
    options = PreviewOptions(
        num_rows=n, offset=offset, train_on=train_on, method=method, sequence_length=sequence_length
    )
    return await services.previews.preview(caller, name, model, options)


@router.get("/models", responses=_LIST_ERRORS, response_model=bodies.ModelPage)
async def list_models(services: Services, caller: Caller, page_size: PageSize = 100, page_token: PageToken = "") -> Any:
    """List the caller's models, newest first."""
    models, following = await services.models.list(caller, page_size=page_size, page_token=page_token)
    return {"models": models, "next_page_token": following}

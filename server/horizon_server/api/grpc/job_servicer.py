"""JobService on the wire: a thin layer over `jobs.service`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from horizon_proto.v1 import job_pb2, job_pb2_grpc
from horizon_server.api.grpc.convert import enum_text, set_fields, to_message
from horizon_server.api.grpc.interceptor import caller
from horizon_server.api.open_streams import closing
from horizon_server.errors import InvalidSpec, NotAvailableYet
from horizon_server.records.job import JobRecord, JobState
from horizon_server.services.jobs import JobService
from horizon_server.services.lookup import page_limit
from horizon_server.spec import JobSpec, parse_job_spec


class JobServicer(job_pb2_grpc.JobServiceServicer):
    """Submits, shows, steers and watches jobs."""

    def __init__(self, jobs: JobService) -> None:
        self._jobs = jobs

    async def SubmitJob(self, request: job_pb2.SubmitJobRequest, context: Any) -> job_pb2.SubmitJobResponse:
        job = await self._jobs.submit(caller(), request_id=request.request_id, spec=_spec(request.spec))
        return job_pb2.SubmitJobResponse(job=_job(job))

    async def PlanJob(self, request: job_pb2.PlanJobRequest, context: Any) -> job_pb2.PlanJobResponse:
        spec, plan = await self._jobs.plan(caller(), _spec(request.spec))
        return job_pb2.PlanJobResponse(
            plan=to_message(plan, job_pb2.MemoryPlan), spec=to_message(spec, job_pb2.JobSpec)
        )

    async def GetJob(self, request: job_pb2.GetJobRequest, context: Any) -> job_pb2.GetJobResponse:
        return job_pb2.GetJobResponse(job=_job(await self._jobs.get(caller(), request.job_id)))

    async def ListJobs(self, request: job_pb2.ListJobsRequest, context: Any) -> job_pb2.ListJobsResponse:
        jobs, token = await self._jobs.list(
            caller(),
            page_size=page_limit(request.page_size),
            page_token=request.page_token,
            states=frozenset(_state(i, number) for i, number in enumerate(request.states)),
        )
        return job_pb2.ListJobsResponse(jobs=map(_job, jobs), next_page_token=token)

    async def CancelJob(self, request: job_pb2.CancelJobRequest, context: Any) -> job_pb2.CancelJobResponse:
        return job_pb2.CancelJobResponse(job=_job(await self._jobs.cancel(caller(), request.job_id)))

    async def PauseJob(self, request: job_pb2.PauseJobRequest, context: Any) -> job_pb2.PauseJobResponse:
        return job_pb2.PauseJobResponse(job=_job(await self._jobs.pause(caller(), request.job_id)))

    async def ResumeJob(self, request: job_pb2.ResumeJobRequest, context: Any) -> job_pb2.ResumeJobResponse:
        return job_pb2.ResumeJobResponse(job=_job(await self._jobs.resume(caller(), request.job_id)))

    async def UpdateJob(self, request: job_pb2.UpdateJobRequest, context: Any) -> job_pb2.UpdateJobResponse:
        raise NotAvailableYet("a job cannot be changed after submission in this version; cancel it and submit it again")

    async def WatchJob(self, request: job_pb2.WatchJobRequest, context: Any) -> AsyncIterator[job_pb2.WatchJobResponse]:
        _require_natural("after_sequence", request.after_sequence)
        async with closing(self._jobs.watch(caller(), request.job_id, request.after_sequence)) as events:
            async for event in events:
                yield job_pb2.WatchJobResponse(event=to_message(event, job_pb2.JobEvent))

    async def GetJobLogs(
        self, request: job_pb2.GetJobLogsRequest, context: Any
    ) -> AsyncIterator[job_pb2.GetJobLogsResponse]:
        _require_natural("attempt", request.attempt)
        _require_natural("offset", request.offset)
        pieces = self._jobs.logs(
            caller(), request.job_id, attempt=request.attempt, offset=request.offset, follow=request.follow
        )
        async with closing(pieces):
            async for offset, data in pieces:
                yield job_pb2.GetJobLogsResponse(data=data, offset=offset)


def _spec(message: job_pb2.JobSpec) -> JobSpec:
    return parse_job_spec(set_fields(message))


def _job(job: JobRecord) -> job_pb2.Job:
    return to_message(job, job_pb2.Job)


def _state(index: int, number: int) -> JobState:
    name = enum_text(job_pb2.JobState.DESCRIPTOR, number)
    if name not in JobState.__members__:
        problem = f"states[{index}] is {number}, which is not a state of jobs; leave states out for all"
        raise InvalidSpec.of(f"states[{index}]", problem)
    return JobState(name)


def _require_natural(field: str, value: int) -> None:
    if value < 0:
        raise InvalidSpec.of(field, f"{field} is {value}; it must be 0 or more")

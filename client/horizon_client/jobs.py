"""`client.jobs`: submit, plan, look at, steer and follow jobs."""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from horizon_client.connection import Connection
from horizon_client.conversion import event_from_message, from_message
from horizon_client.datasets import AsyncDatasets
from horizon_client.errors import InvalidRequest, Violation
from horizon_client.following import followed
from horizon_client.job_spec import enum_choices, spec_to_mapping, spec_to_proto
from horizon_client.local_inputs import LocalInputs, load_job_spec
from horizon_client.models import AsyncModels
from horizon_client.paging import all_pages
from horizon_client.progress import OnNotice, OnProgress, ignore_notice, ignore_progress
from horizon_client.resources import ENDED_STATES, Job, JobEvent, MemoryPlan, PlannedJob, StateEvent
from horizon_proto.v1 import job_pb2
from horizon_proto.v1.job_pb2_grpc import JobServiceStub

if TYPE_CHECKING:
    from horizon_proto.v1.job_pb2_grpc import JobServiceAsyncStub

SpecLike: TypeAlias = Mapping[str, Any] | str | os.PathLike[str]
"""A job spec as a mapping, or the path of a YAML or JSON file."""


class AsyncJobs:
    """The caller's jobs. Every `job` is an id, or a name where only one of the caller's jobs has it."""

    def __init__(self, connection: Connection, datasets: AsyncDatasets, models: AsyncModels) -> None:
        self._connection = connection
        self._inputs = LocalInputs(datasets, models)

    async def submit(
        self,
        spec: SpecLike,
        *,
        overrides: Sequence[str] = (),
        request_id: str | None = None,
        push: bool = True,
        on_progress: OnProgress = ignore_progress,
        on_notice: OnNotice = ignore_notice,
    ) -> Job:
        """Queue a job. Local files named as `dataset` or `model` are pushed first, unless `push` is False.

        `overrides` are texts such as `train.learning_rate=1e-5`. The same `request_id` with the same spec gives the same job.

        Raises:
            InvalidRequest: naming the offending fields; nothing is pushed when the spec itself is malformed.
        """
        wire_spec = await self._wire_spec(spec, overrides, push, on_progress, on_notice)
        request = job_pb2.SubmitJobRequest(request_id=request_id or str(uuid.uuid4()), spec=wire_spec)
        return from_message(Job, (await self._connection.unary(self._stub().SubmitJob, request)).job)

    async def plan(
        self,
        spec: SpecLike,
        *,
        overrides: Sequence[str] = (),
        push: bool = True,
        on_progress: OnProgress = ignore_progress,
        on_notice: OnNotice = ignore_notice,
    ) -> PlannedJob:
        """Return how much memory a job would take and whether it fits. Queues nothing; local inputs are pushed as by `submit`."""
        wire_spec = await self._wire_spec(spec, overrides, push, on_progress, on_notice)
        answer = await self._connection.unary(self._stub().PlanJob, job_pb2.PlanJobRequest(spec=wire_spec))
        return PlannedJob(plan=from_message(MemoryPlan, answer.plan), spec=spec_to_mapping(answer.spec))

    async def get(self, job: str) -> Job:
        """Return one job."""
        return from_message(
            Job, (await self._connection.unary(self._stub().GetJob, job_pb2.GetJobRequest(job_id=job))).job
        )

    async def cancel(self, job: str) -> Job:
        """End a job; a running one stops at its next step boundary."""
        request = job_pb2.CancelJobRequest(job_id=job)
        return from_message(Job, (await self._connection.unary(self._stub().CancelJob, request, idempotent=False)).job)

    async def pause(self, job: str) -> Job:
        """Checkpoint a job at its next step boundary and free the device."""
        request = job_pb2.PauseJobRequest(job_id=job)
        return from_message(Job, (await self._connection.unary(self._stub().PauseJob, request, idempotent=False)).job)

    async def resume(self, job: str) -> Job:
        """Put a paused job back in the queue."""
        request = job_pb2.ResumeJobRequest(job_id=job)
        return from_message(Job, (await self._connection.unary(self._stub().ResumeJob, request, idempotent=False)).job)

    async def set_priority(self, job: str, priority: int) -> Job:
        """Change a job's priority: higher first, within the project's share."""
        request = job_pb2.UpdateJobRequest(job_id=job, priority=priority)
        return from_message(Job, (await self._connection.unary(self._stub().UpdateJob, request)).job)

    async def watch(
        self, job: str, *, after_sequence: int = 0, on_notice: OnNotice = ignore_notice
    ) -> AsyncIterator[JobEvent]:
        """Yield the job's events from after `after_sequence` until it has ended: each once and in order, also across cuts.

        Raises:
            NotFound: when there is no such job.
            Unavailable: when the server stays away for minutes; `after_sequence` goes on from there later.
        """
        stub, job_id = self._stub(), (await self.get(job)).job_id
        last_sequence, ended = after_sequence, False

        def reopen() -> AsyncIterator[job_pb2.WatchJobResponse]:
            request = job_pb2.WatchJobRequest(job_id=job_id, after_sequence=last_sequence)
            return self._connection.stream(stub.WatchJob, request, stall_s=None)

        async def is_over() -> bool:
            current = await self.get(job_id)
            return current.ended and (ended or current.last_sequence <= last_sequence)

        async for answer in followed(
            reopen, is_over, retry=self._connection.stream_retry, on_notice=on_notice, what=f"the watch of {job_id}"
        ):
            if answer.event.sequence <= last_sequence:
                continue
            last_sequence = answer.event.sequence
            event = event_from_message(answer.event)
            ended = isinstance(event, StateEvent) and event.state in ENDED_STATES
            yield event

    async def logs(
        self,
        job: str,
        *,
        attempt: int = 0,
        offset: int = 0,
        follow: bool = False,
        on_notice: OnNotice = ignore_notice,
    ) -> AsyncIterator[bytes]:
        """Yield the log of a job's worker from byte `offset` on; `attempt` 0 is the newest.

        `follow` goes on until the attempt has ended.
        """
        stub, current = self._stub(), await self.get(job)
        number = attempt or current.attempt
        at = offset

        def reopen() -> AsyncIterator[job_pb2.GetJobLogsResponse]:
            request = job_pb2.GetJobLogsRequest(job_id=current.job_id, attempt=number, offset=at, follow=follow)
            return self._connection.stream(stub.GetJobLogs, request, stall_s=None)

        async def is_over() -> bool:
            return True

        async for answer in followed(
            reopen, is_over, retry=self._connection.stream_retry, on_notice=on_notice, what="the log"
        ):
            new = answer.data[max(at - answer.offset, 0) :]
            at = max(at, answer.offset + len(answer.data))
            if new:
                yield new

    async def list(self, *, states: Iterable[str] = (), limit: int | None = None) -> list[Job]:
        """Return the caller's jobs, newest first; only those in `states` (such as RUNNING) where given."""
        stub, numbers = self._stub(), [_state_number(state) for state in states]

        async def page(token: str, size: int) -> tuple[Sequence[job_pb2.Job], str]:
            request = job_pb2.ListJobsRequest(page_size=size, page_token=token, states=numbers)
            answer = await self._connection.unary(stub.ListJobs, request)
            return answer.jobs, answer.next_page_token

        return [from_message(Job, item) for item in await all_pages(page, limit)]

    async def _wire_spec(
        self, spec: SpecLike, overrides: Sequence[str], push: bool, on_progress: OnProgress, on_notice: OnNotice
    ) -> job_pb2.JobSpec:
        loaded = load_job_spec(spec, overrides)
        if push:
            spec_to_proto(self._inputs.with_placeholders(loaded))  # refuse a malformed spec before anything is uploaded
            return spec_to_proto(await self._inputs.pushed(loaded, on_progress=on_progress, on_notice=on_notice))
        return spec_to_proto(loaded.mapping)

    def _stub(self) -> JobServiceAsyncStub:
        return cast("JobServiceAsyncStub", self._connection.stub(JobServiceStub))


def _state_number(text: str) -> job_pb2.JobState.ValueType:
    choices = enum_choices(job_pb2.JobState.DESCRIPTOR)
    number = choices.get(text.lower())
    if number is None:
        problem = f"state is {text!r}; it must be one of {', '.join(choices)}"
        raise InvalidRequest(problem, violations=[Violation(field="states", description=problem)])
    return job_pb2.JobState.ValueType(number)

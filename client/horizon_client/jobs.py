"""`client.jobs`: plan, submit, list, watch and control jobs."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from horizon_client.choices import ENDED_STATES
from horizon_client.connection import PREVIEW_DEADLINE_S, UNARY_DEADLINE_S, Connection
from horizon_client.conversion import enum_choices, enum_number, event_from_message, from_message
from horizon_client.errors import (
    BadConfig,
    DeadlineExceeded,
    HorizonClientError,
    InvalidRequest,
    NotFound,
    ServerFailed,
    suggested,
)
from horizon_client.hub import fetch_config
from horizon_client.job_spec import SpecLike, local_config, spec_to_send, without_data
from horizon_client.job_spec_types import JobSpec
from horizon_client.metrics import JobMetrics, MetricsTable
from horizon_client.notebook import Listing
from horizon_client.pushed import AsyncDatasets, AsyncModels
from horizon_client.reporter import SILENT, Reporter
from horizon_client.resources import Job, JobEvent, PlannedJob, QueueEntry, SimulatedJob, StateEvent, TaskResult
from horizon_client.rpc_errors import BY_REASON
from horizon_client.waiting import timeout
from horizon_formats.model_files import is_hub_id
from horizon_proto.v1 import checkpoint_pb2, housekeeping_pb2, job_pb2, sharing_pb2

_SEARCHED_JOBS = 1000
# In a spec that is planned without its data
_NO_DATASET = "not-looked-at"


class AsyncJobs:
    """`client.jobs`: the caller's jobs. Every `job` is an id, the unique beginning of an id, or a name: the newest job
    with that name."""

    def __init__(self, connection: Connection, datasets: AsyncDatasets, models: AsyncModels) -> None:
        self._connection = connection
        self._datasets = datasets
        self._models = models

    async def submit(
        self,
        spec: SpecLike,
        *,
        overrides: Sequence[str] = (),
        request_id: str | None = None,
        push: bool = True,
        reporter: Reporter = SILENT,
    ) -> Job:
        """Queue a job. Local files given as `dataset` or `model` are pushed first, unless `push` is False; so are rows
        in memory, as by `client.datasets.push`.

        `overrides` are texts such as `train.learning_rate=1e-5`. The same `request_id` with the same spec gives the
        same job.

        Raises:
            InvalidRequest: naming the fields; nothing is pushed when the spec itself is malformed.
            NotFound: with similar names, when there is no such model or dataset.
            DoesNotFit: when the node does not have enough memory.
        """
        wire_spec = await self._wire_spec(spec, overrides, push, reporter)
        # With an id, a retry after a lost answer gives the same job
        request = job_pb2.SubmitJobRequest(request_id=request_id or str(uuid.uuid4()), spec=wire_spec)
        try:
            return await self._answered(self._connection.calls.jobs.SubmitJob, request)
        except NotFound as problem:
            raise await self._with_similar(problem) from None

    async def plan(
        self, spec: SpecLike, *, overrides: Sequence[str] = (), push: bool = True, reporter: Reporter = SILENT
    ) -> PlannedJob:
        """Return how much memory and time a job would take and whether it fits. Queues nothing.

        Local files are pushed as by `submit`, and the same jobs are refused. Of a local model folder its config.json
        alone is enough, and of a model of the Hugging Face hub that is not on the node its id (with
        `horizon-train[hub]`): the plan is made of the config then, and no data is looked at.
        """
        if config := await asyncio.to_thread(local_config, spec, overrides):
            return await self._plan_config(spec, overrides, config, reporter=reporter)
        wire_spec = await self._wire_spec(spec, overrides, push, reporter)
        try:
            return await self._planned(job_pb2.PlanJobRequest(spec=wire_spec))
        except NotFound as problem:
            config = await self._config_of_hub(wire_spec.model, problem)
        return await self._plan_config(spec, overrides, config, reporter=reporter)

    async def plan_elsewhere(
        self,
        spec: SpecLike,
        *,
        gpu: str,
        host_gbps: float,
        link_gbps: float | None = None,
        host_memory_bytes: int | None = None,
        drive_read_gbps: float | None = None,
        drive_write_gbps: float | None = None,
        drive_endurance_bytes: int | None = None,
        overrides: Sequence[str] = (),
        push: bool = True,
        reporter: Reporter = SILENT,
    ) -> PlannedJob:
        """Predict a job's steps on a machine that you name, and how much memory it would take there. Its data is not
        looked at.

        `gpu` is a name such as h100. `host_gbps` and `link_gbps` are the bandwidth of its memory and of its link in
        each direction, in 10^9 bytes per second; without a link, the GPU's own is assumed. Without `host_memory_bytes`,
        host memory has no limit. `drive_read_gbps` and `drive_write_gbps` are those of its drives for states
        (memory.tier: drive), and `drive_endurance_bytes` is what they are rated to be written, of all of them together;
        without, it has none.

        Raises:
            InvalidRequest: when the server does not know the GPU; the message lists those it knows.
        """
        machine = job_pb2.PlannedMachine(
            gpu=gpu,
            host_gbps=host_gbps,
            link_gbps=link_gbps,
            host_memory_bytes=host_memory_bytes,
            drive_read_gbps=drive_read_gbps,
            drive_write_gbps=drive_write_gbps,
            drive_endurance_bytes=drive_endurance_bytes,
        )
        if config := await asyncio.to_thread(local_config, spec, overrides):
            return await self._plan_config(spec, overrides, config, machine=machine, reporter=reporter)
        # Data files would be pushed for nothing
        wire_spec = await self._wire_spec(without_data(spec, overrides, _NO_DATASET), (), push, reporter)
        try:
            return await self._planned(job_pb2.PlanJobRequest(spec=wire_spec, machine=machine))
        except NotFound as problem:
            config = await self._config_of_hub(wire_spec.model, problem)
        return await self._plan_config(spec, overrides, config, machine=machine, reporter=reporter)

    async def simulate(
        self, spec: SpecLike, *, overrides: Sequence[str] = (), push: bool = True, reporter: Reporter = SILENT
    ) -> SimulatedJob:
        """Return when a job would start and end if it were submitted now, and why, with its plan. Queues nothing.

        Local files are pushed as by `submit`, and the same jobs are refused.

        Raises:
            DoesNotFit: when the node does not have enough memory.
        """
        wire_spec = await self._wire_spec(spec, overrides, push, reporter)
        request = sharing_pb2.SimulateJobRequest(spec=wire_spec)
        try:
            answer = await self._connection.unary(self._connection.calls.sharing.SimulateJob, request)
        except NotFound as problem:
            raise await self._with_similar(problem) from None
        return from_message(SimulatedJob, answer)

    async def queue(self) -> list[QueueEntry]:
        """Return the resident jobs and then the queue in its order, of all users; of other users' jobs only who and
        when."""
        answer = await self._connection.unary(self._connection.calls.sharing.GetQueue, sharing_pb2.GetQueueRequest())
        return Listing(from_message(QueueEntry, entry) for entry in answer.jobs)

    async def get(self, job: str) -> Job:
        """Return one job.

        Raises:
            NotFound: with similar names, when there is no such job.
        """
        request = job_pb2.GetJobRequest(job_id=job)
        try:
            return await self._answered(self._connection.calls.jobs.GetJob, request)
        except NotFound as problem:
            raise await self._with_similar(problem) from None

    async def cancel(self, job: str) -> Job:
        """End a job; a running one stops after its current step. A job that has ended stays as it is."""
        request = job_pb2.CancelJobRequest(job_id=job)
        return await self._answered(self._connection.calls.jobs.CancelJob, request)

    async def pause(self, job: str) -> Job:
        """Checkpoint a job after its current step and free its memory."""
        request = job_pb2.PauseJobRequest(job_id=job)
        return await self._answered(self._connection.calls.jobs.PauseJob, request)

    async def resume(self, job: str) -> Job:
        """Queue a paused or failed job again; it continues from its newest checkpoint."""
        request = job_pb2.ResumeJobRequest(job_id=job)
        # Not repeatable: a job that is resumed already is refused, although the first call has done what was asked
        return await self._answered(self._connection.calls.jobs.ResumeJob, request, repeatable=False)

    async def delete(self, job: str) -> None:
        """Delete a job that has ended, with its checkpoints, log and events; `client.housekeeping` deletes many.

        Raises:
            NotFound: when there is no such job.
            InUse: when it has not ended.
        """
        request = housekeeping_pb2.DeleteRequest(
            kind=enum_number(housekeeping_pb2.ResourceKind, "kind", "job"), keys=[(await self.get(job)).job_id]
        )
        # No limit between two answers: the files of one job may take minutes to remove
        async for answer in self._connection.stream(self._connection.calls.housekeeping.Delete, request, stall_s=None):
            if answer.deletion.refusal:
                kind = BY_REASON.get(answer.deletion.reason, ServerFailed)
                raise kind(answer.deletion.refusal, reason=answer.deletion.reason)

    async def set_priority(self, job: str, priority: int) -> Job:
        """Change the priority of a job that has not ended.

        It is from -100 to 100, higher first: it orders the jobs of one user. Admins may set up to 1000; above 100 a job
        is served before the jobs of all users.

        Raises:
            NotAllowed: for the job of another user, or a priority that only admins may set.
        """
        request = job_pb2.UpdateJobRequest(job_id=job, priority=priority)
        return await self._answered(self._connection.calls.jobs.UpdateJob, request)

    async def record_task_results(self, job: str, step: int, results: Sequence[TaskResult]) -> Job:
        """Add to the job's record what an evaluation program has measured of its checkpoint of a step; `task_results`
        of the job has it. Step and time of each result are set by the daemon, and results of the same step, task and
        metric are replaced. Without any, it says only whether you may.

        Raises:
            NotFound: when there is no such job.
            NotAllowed: for the job of another user.
            InvalidRequest: when there are more than 200, or one is not a finite number.
        """
        rows = [{name: value for name, value in vars(one).items() if name != "recorded_time"} for one in results]
        request = checkpoint_pb2.RecordTaskResultsRequest(
            job_id=job, step=step, results=[job_pb2.TaskResult(**row) for row in rows]
        )
        return await self._answered(self._connection.calls.checkpoints.RecordTaskResults, request)

    async def watch(self, job: str, *, after_sequence: int = 0, reporter: Reporter = SILENT) -> AsyncIterator[JobEvent]:
        """Yield the job's events after number `after_sequence` until it has ended: each once and in order, also after a
        reconnect.

        Raises:
            NotFound: when there is no such job.
            Unavailable: when the server cannot be reached for minutes; `after_sequence` continues from there later.
        """
        # The id, because after a cut the name may mean a newer job
        stub, job_id = self._connection.calls.jobs, (await self.get(job)).job_id
        last_sequence, ended = after_sequence, False

        def reopen() -> AsyncIterator[job_pb2.WatchJobResponse]:
            request = job_pb2.WatchJobRequest(job_id=job_id, after_sequence=last_sequence)
            # No limit between two events: a step may take minutes, and keepalive notices a dead connection
            return self._connection.stream(stub.WatchJob, request, stall_s=None)

        async def is_over() -> bool:
            current = await self.get(job_id)
            return current.ended and (ended or current.last_sequence <= last_sequence)

        async for answer in self._connection.followed(
            reopen, is_over, reporter=reporter, what=f"the watch of {job_id}"
        ):
            if answer.event.sequence <= last_sequence:  # sent again after a cut
                continue
            last_sequence = answer.event.sequence
            event = event_from_message(answer.event)
            ended = isinstance(event, StateEvent) and event.state in ENDED_STATES
            yield event

    async def watch_several(
        self, jobs: Sequence[str], *, reporter: Reporter = SILENT
    ) -> AsyncIterator[tuple[str, JobEvent]]:
        """Yield the events of several jobs as they come, each with the id of its job, until all have ended.

        Raises:
            NotFound: when there is no such job.
            Unavailable: when the server cannot be reached for minutes.
        """
        arrived: asyncio.Queue[tuple[str, JobEvent] | HorizonClientError | None] = asyncio.Queue(maxsize=100)

        async def follow(job_id: str) -> None:
            try:
                async with aclosing(self.watch(job_id, reporter=reporter)) as events:  # type: ignore[type-var]
                    async for event in events:
                        await arrived.put((job_id, event))
            except HorizonClientError as error:
                await arrived.put(error)
            else:
                await arrived.put(None)

        ids = dict.fromkeys([(await self.get(job)).job_id for job in jobs])
        tasks = [asyncio.ensure_future(follow(job_id)) for job_id in ids]
        num_followed = len(tasks)
        try:
            while num_followed:
                item = await arrived.get()
                if isinstance(item, HorizonClientError):
                    raise item
                if item is None:
                    num_followed -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def metrics(self, job: str, *, reporter: Reporter = SILENT) -> JobMetrics:
        """Return what the job's steps and evaluations have measured up to now: a row for each step, as numbers by name.

        `metrics.to_pandas()` is a DataFrame, `metrics.curve("loss")` the steps and values of one figure.

        Raises:
            NotFound: when there is no such job.
        """
        stub, job_id = self._connection.calls.jobs, (await self.get(job)).job_id
        table = MetricsTable()

        def reopen() -> AsyncIterator[job_pb2.GetJobMetricsResponse]:
            request = job_pb2.GetJobMetricsRequest(job_id=job_id, after_sequence=table.last_sequence)
            return self._connection.stream(stub.GetJobMetrics, request)

        async def is_over() -> bool:
            return True  # it ends at the newest event

        async for part in self._connection.followed(reopen, is_over, reporter=reporter, what="the figures"):
            table.add(part)
        return table.metrics(job_id)

    async def follow(
        self,
        job: str,
        *,
        to: Sequence[str],
        tracker_project: str = "",
        tracker_folder: str | os.PathLike[str] = ".",
        reporter: Reporter = SILENT,
    ) -> Job:
        """Write a job's figures to trackers (wandb, mlflow, tensorboard, trackio) until it has ended, and return it.

        A run begins with the job's first step, whenever it is followed; following again continues the same run.
        `tracker_project` is the project or experiment, by default the job's project. Files, such as those of
        TensorBoard in `runs`, are written below `tracker_folder`.

        Raises:
            InvalidRequest: when there is no such tracker, or its package is not installed.
            TrackerFailed: when a tracker does not take everything. The job continues.
        """
        from horizon_client.tracking import Followers  # only here: most programs follow nothing

        current = await self.get(job)
        followers = await asyncio.to_thread(
            Followers, current, to, project=tracker_project, folder=Path(tracker_folder), notice=reporter.notice
        )
        try:
            async with aclosing(self.watch(current.job_id, reporter=reporter)) as events:  # type: ignore[type-var]
                async for event in events:
                    if followers.is_full:
                        await asyncio.to_thread(followers.wait_for_room)
                    followers.send(event)
        finally:
            await asyncio.to_thread(followers.close)
        return await self.get(current.job_id)

    async def wait(self, job: str, *, timeout_s: float | None = None, reporter: Reporter = SILENT) -> Job:
        """Wait until the job has ended and return it; look at its `state` for whether it succeeded.

        What happens meanwhile goes to `reporter`, such as a `NotebookReporter`.

        Raises:
            DeadlineExceeded: when it has not ended after `timeout_s` seconds. The job continues.
        """
        current = await self.get(job)
        try:
            async with timeout(timeout_s):
                events = self.watch(current.job_id, after_sequence=current.last_sequence, reporter=reporter)
                async with aclosing(events):  # type: ignore[type-var]
                    async for event in events:
                        reporter.event(event)
                return await self.get(current.job_id)
        except asyncio.TimeoutError as error:
            if isinstance(error, DeadlineExceeded):  # is a TimeoutError too: a single call was late, not the job
                raise
            raise DeadlineExceeded(f"job {job} has not ended after {timeout_s:g} s; it continues") from None

    async def logs(
        self, job: str, *, attempt: int = 0, offset: int = 0, follow: bool = False, reporter: Reporter = SILENT
    ) -> AsyncIterator[bytes]:
        """Yield the log of a job's worker from byte `offset`; `attempt` 0 is the newest.

        `follow` waits for more until the attempt has ended.

        Raises:
            NotFound: when there is no such job or attempt.
        """
        stub, current = self._connection.calls.jobs, await self.get(job)
        if attempt > current.attempt:
            had = f"{current.attempt} attempt{'s' if current.attempt != 1 else ''}" if current.attempt else "no attempt"
            raise NotFound(f"job {job} has no attempt {attempt}; it has had {had} so far")
        number = attempt or current.attempt  # fixed, because a resume would make 0 another attempt
        at = offset

        def reopen() -> AsyncIterator[job_pb2.GetJobLogsResponse]:
            request = job_pb2.GetJobLogsRequest(job_id=current.job_id, attempt=number, offset=at, follow=follow)
            return self._connection.stream(stub.GetJobLogs, request, stall_s=None)

        async def is_over() -> bool:
            return True  # without `follow` it ends at the last byte, with it when the attempt has ended

        async for answer in self._connection.followed(reopen, is_over, reporter=reporter, what="the log"):
            new = answer.data[max(at - answer.offset, 0) :]
            at = max(at, answer.offset + len(answer.data))
            if new:
                yield new

    async def list(
        self,
        *,
        states: Iterable[str] = (),
        owner: str = "",
        project: str = "",
        search: str = "",
        limit: int | None = None,
    ) -> list[Job]:
        """Return the jobs that the caller may see, newest first; with `states` (such as RUNNING) only those in one of
        them.

        `owner` and `project` narrow it to those of a user and a project, `search` to those with a text in their name,
        id, owner, model or dataset.
        """
        choices = enum_choices(job_pb2.JobState.DESCRIPTOR)
        states = list(states)
        for state in states:
            if state.lower() not in choices:
                raise InvalidRequest.of("states", f"state is {state!r}; it must be one of {', '.join(choices)}")
        numbers = [job_pb2.JobState.ValueType(choices[state.lower()]) for state in states]
        call, request = (
            self._connection.calls.jobs.ListJobs,
            job_pb2.ListJobsRequest(states=numbers, owner=owner, project=project, search=search),
        )
        found = await self._connection.all_pages(call, request, items="jobs", limit=limit)
        return Listing(from_message(Job, item) for item in found)

    async def _answered(self, call: Any, request: Message, *, repeatable: bool = True) -> Job:
        answer: Any = await self._connection.unary(call, request, repeatable=repeatable)
        return from_message(Job, answer.job)

    async def _names(self) -> Iterable[str]:
        jobs = await self.list(limit=_SEARCHED_JOBS)
        return [text for job in jobs for text in (job.name, job.job_id)]

    async def _planned(self, request: job_pb2.PlanJobRequest) -> PlannedJob:
        # From a config alone, a child of the server builds the model's class
        limit_s = PREVIEW_DEADLINE_S if request.model_config else UNARY_DEADLINE_S
        answer = await self._connection.unary(self._connection.calls.jobs.PlanJob, request, deadline_s=limit_s)
        return from_message(PlannedJob, answer)

    async def _plan_config(
        self,
        spec: SpecLike,
        overrides: Sequence[str],
        config: bytes,
        *,
        machine: job_pb2.PlannedMachine | None = None,
        reporter: Reporter,
    ) -> PlannedJob:
        """Plan a job from the config.json of its model; the model is neither pushed nor looked up."""
        mapping: JobSpec = {**without_data(spec, overrides, _NO_DATASET), "model": _NO_DATASET}
        wire_spec = await self._wire_spec(mapping, (), False, reporter)
        return await self._planned(job_pb2.PlanJobRequest(spec=wire_spec, machine=machine, model_config=config))

    async def _config_of_hub(self, model: str, problem: NotFound) -> bytes:
        """Return the config.json of a model that the node does not have, from the hub. Raises `problem`, with similar
        names, where something else is not found."""
        if not is_hub_id(model) or model not in str(problem):
            raise await self._with_similar(problem) from None
        try:
            return await asyncio.to_thread(fetch_config, model)
        except BadConfig as missing:
            raise NotFound(f"{problem}; to plan from its config.json, {missing}") from None

    async def _with_similar(self, problem: NotFound) -> NotFound:
        """Return the error for a job, model or dataset that does not exist, with similar names."""
        names_of = {"job": self._names, "model": self._models.names, "dataset": self._datasets.names}
        return await suggested(problem, names_of)

    async def _wire_spec(
        self, spec: SpecLike, overrides: Sequence[str], push: bool, reporter: Reporter
    ) -> job_pb2.JobSpec:
        push_to = (self._models, self._datasets) if push else None
        return await spec_to_send(spec, overrides, push_to=push_to, reporter=reporter)

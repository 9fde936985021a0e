"""Every call of gRPC, a row for each: the use case that it calls, and what of its answer that fills.

What a call does, and so how it is limited and audited, is in `api.effects`; who may do what is decided in
`services.access`. A call of the contract that is missing here cannot be served: `start_grpc_server` refuses to start.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from horizon_proto.v1 import (
    account_pb2,
    blob_pb2,
    checkpoint_pb2,
    dataset_pb2,
    housekeeping_pb2,
    job_pb2,
    model_pb2,
    node_pb2,
    session_pb2,
    sharing_pb2,
    webhook_pb2,
)
from horizon_server.api.audited import about_to_change
from horizon_server.api.grpc.convert import choice, enum_text, from_message, seconds_of, set_fields
from horizon_server.api.grpc.metric_rows import MetricRows, metric_rows
from horizon_server.api.grpc.sampling_calls import sample, sampled_fields
from horizon_server.api.grpc.session_calls import session_call, session_result_fields
from horizon_server.api.grpc.transfers import uploader, write_blob
from horizon_server.api.services import Services
from horizon_server.api.sharing import USAGE_OF_S, AllowanceUse, QueueEntry
from horizon_server.datasets.preview import DatasetPreview, PreviewOptions
from horizon_server.errors import InvalidSpec
from horizon_server.events import EvaluationProgress, MergeProgress
from horizon_server.records.account import Principal
from horizon_server.records.blob import BlobFile, BlobRef, PushedRecord, WholeBlob
from horizon_server.records.housekeeping import Selection
from horizon_server.records.job import JobFilter, JobState
from horizon_server.records.plan import PlannedMachine
from horizon_server.records.session import Result
from horizon_server.records.sharing import NodeCondition
from horizon_server.records.task_result import TaskResult
from horizon_server.services.checkpoint_files import read_checkpoint_file
from horizon_server.services.node import NodeStatus
from horizon_server.spec import JobSpec, parse_job_spec

_MODULES = (
    job_pb2,
    blob_pb2,
    dataset_pb2,
    model_pb2,
    checkpoint_pb2,
    session_pb2,
    node_pb2,
    sharing_pb2,
    housekeeping_pb2,
    account_pb2,
    webhook_pb2,
)
SERVICES = tuple(service for module in _MODULES for service in module.DESCRIPTOR.services_by_name.values())
"""The services of the contract."""


@dataclass(frozen=True)
class Call:
    """One call."""

    serve: Callable[[Services, Principal, Any], Any]
    """Given the services, the caller and the request: a coroutine of the result, or a generator of the results of a
    stream."""
    answer: str | tuple[str, ...] | Callable[[Any], Mapping[str, Any]] = ()
    """The field of the answer that the result is, the fields that its parts are, or how the fields are made of it."""
    is_frequent: bool = False
    """Whether what is sent of a record is made once and kept: for calls that many clients repeat."""

    def fields(self, result: Any) -> Mapping[str, Any]:
        """Return the fields of the answer."""
        if isinstance(self.answer, str):
            return {self.answer: result}
        if isinstance(self.answer, tuple):
            return dict(zip(self.answer, result, strict=True)) if self.answer else {}
        return self.answer(result)


def _spec(request: Any) -> JobSpec:
    return parse_job_spec(set_fields(request.spec))


def _states(numbers: Iterable[int]) -> frozenset[JobState]:
    states = set()
    for i, number in enumerate(numbers):
        name = enum_text(job_pb2.JobState.DESCRIPTOR, number)
        if name not in JobState.__members__:
            problem = f"states[{i}] is {number}, which is not a state of jobs; leave states out for all"
            raise InvalidSpec.of(f"states[{i}]", problem)
        states.add(JobState(name))
    return frozenset(states)


def _natural(request: Any, field: str) -> int:
    value: int = getattr(request, field)
    if value < 0:
        raise InvalidSpec.of(field, f"{field} is {value}; it must be 0 or more")
    return value


def _files(request: Any) -> list[BlobFile]:
    return [from_message(file, BlobFile) for file in request.files]


async def _plan(services: Services, caller: Principal, request: job_pb2.PlanJobRequest) -> tuple[Any, ...]:
    machine = from_message(request.machine, PlannedMachine) if request.HasField("machine") else None
    return await services.jobs.plan(caller, _spec(request), machine, config=request.model_config)


async def _update(services: Services, caller: Principal, request: job_pb2.UpdateJobRequest) -> Any:
    if not request.HasField("priority"):
        raise InvalidSpec.of("priority", "priority is missing; it is what can be changed of a job")
    return await services.jobs.update(caller, request.job_id, priority=request.priority)


_FIELDS_OF_METRICS = tuple(field.name for field in dataclasses.fields(MetricRows))


async def _metrics(
    services: Services, caller: Principal, request: job_pb2.GetJobMetricsRequest
) -> AsyncGenerator[tuple[Any, ...], None]:
    job = await services.jobs.get(caller, request.job_id)
    async for rows in metric_rows(services.jobs, job, _natural(request, "after_sequence")):
        yield tuple(getattr(rows, name) for name in _FIELDS_OF_METRICS)


async def _call_session(services: Services, caller: Principal, request: session_pb2.CallSessionRequest) -> int:
    call, number = session_call(request), _natural(request, "number")
    return await services.sessions.call(caller, request.job_id, call, number=number or None)


async def _session_result(
    services: Services, caller: Principal, request: session_pb2.GetSessionResultRequest
) -> tuple[Result | None, int]:
    sessions, number = services.sessions, _natural(request, "number")
    found = await sessions.result(caller, request.job_id, number, wait_s=request.wait_s) if number else None
    return found, await sessions.last_number(caller, request.job_id)


def _merge(services: Services, caller: Principal, request: checkpoint_pb2.MergeCheckpointRequest) -> Any:
    dtype, base = choice(request, "dtype"), choice(request, "base")
    return services.merges.merge(caller, request.job_id, request.step, dtype=dtype, base=base, remove=request.remove)


def _create_dataset(services: Services, caller: Principal, request: dataset_pb2.CreateDatasetRequest) -> Any:
    return services.datasets.create(
        caller,
        request_id=request.request_id,
        name=request.name,
        format=choice(request, "format") or "auto",
        field_map=dict(request.field_map),
        files=_files(request),
    )


async def _preview(services: Services, caller: Principal, request: dataset_pb2.PreviewDatasetRequest) -> DatasetPreview:
    # Only what is set: the defaults of the rest are those of the options.
    given = {name: value for name, value in set_fields(request).items() if name not in ("name", "model")}
    return await services.previews.preview(caller, request.name, request.model, PreviewOptions(**given))


def _preview_fields(preview: DatasetPreview) -> dict[str, Any]:
    # The options have a num_rows too, of the rows that were asked for; the answer's is the dataset's.
    return {**vars(preview.options), **vars(preview)}


async def _set_node(services: Services, caller: Principal, request: node_pb2.SetNodeRequest) -> NodeStatus:
    # Without one the node would be opened.
    if not request.HasField("condition"):
        raise InvalidSpec.of("condition", "condition is missing; it says what the node is to be set to")
    await services.sharing.set_node(caller, from_message(request.condition, NodeCondition))
    return await services.node.describe(caller)


async def _usage(services: Services, caller: Principal, request: sharing_pb2.GetUsageRequest) -> Any:
    since_s = seconds_of(request, "since_time") if request.HasField("since_time") else time.time() - USAGE_OF_S
    return await services.sharing.usage(caller, since_s)


async def _queue(services: Services, caller: Principal, request: sharing_pb2.GetQueueRequest) -> list[QueueEntry]:
    return [QueueEntry.seen_by(caller, job) for job in await services.jobs.queue(caller)]


def _delete(
    services: Services, caller: Principal, request: housekeeping_pb2.DeleteRequest
) -> AsyncGenerator[tuple[Any, int, int], None]:
    kinds = {"dataset", "model", "job", "checkpoint"}
    kind = choice(request, "kind")
    if kind not in kinds:
        raise InvalidSpec.of("kind", f"kind is {request.kind}; it must be one of {', '.join(sorted(kinds))}")
    older_than_s = request.older_than.ToNanoseconds() / 1e9
    if older_than_s < 0:
        raise InvalidSpec.of("older_than", f"older_than is {older_than_s:g} s; it must be 0 or more")
    selection = Selection(
        kind=kind,  # type: ignore[arg-type]  # one of them
        keys=tuple(request.keys),
        states=_states(request.states),
        older_than_s=older_than_s,
        owner=request.owner,
        dry_run=request.dry_run,
    )
    return services.deletions.delete(caller, selection, about_to_delete=about_to_change)


def _create_token(services: Services, caller: Principal, request: account_pb2.CreateTokenRequest) -> Any:
    lifetime_s = request.lifetime.ToNanoseconds() / 1e9 if request.HasField("lifetime") else None
    scope = request.scope or "full"
    return services.identity.create_token(caller, label=request.label, scope=scope, lifetime_s=lifetime_s)


async def _who_am_i(services: Services, caller: Principal, request: account_pb2.WhoAmIRequest) -> Principal:
    return caller


def _sharers(record: PushedRecord) -> dict[str, Any]:
    return {"shared_with": record.shared_with}


# `on` is the services, `r` the request.
CALLS: Mapping[str, Call] = {
    "JobService/SubmitJob": Call(
        lambda on, caller, r: on.jobs.submit(caller, request_id=r.request_id, spec=_spec(r)), "job"
    ),
    "JobService/PlanJob": Call(_plan, ("spec", "plan", "places")),
    "JobService/GetJob": Call(lambda on, caller, r: on.jobs.get(caller, r.job_id), "job", is_frequent=True),
    "JobService/ListJobs": Call(
        lambda on, caller, r: on.jobs.list(
            caller,
            page_size=r.page_size,
            page_token=r.page_token,
            states=_states(r.states),
            only=JobFilter(owner=r.owner, project=r.project, search=r.search),
        ),
        ("jobs", "next_page_token"),
        is_frequent=True,
    ),
    "JobService/CancelJob": Call(lambda on, caller, r: on.jobs.cancel(caller, r.job_id), "job"),
    "JobService/PauseJob": Call(lambda on, caller, r: on.jobs.pause(caller, r.job_id), "job"),
    "JobService/ResumeJob": Call(lambda on, caller, r: on.jobs.resume(caller, r.job_id), "job"),
    "JobService/UpdateJob": Call(_update, "job"),
    "JobService/WatchJob": Call(
        lambda on, caller, r: on.jobs.watch(caller, r.job_id, _natural(r, "after_sequence")), "event"
    ),
    "JobService/GetJobMetrics": Call(_metrics, _FIELDS_OF_METRICS),
    "JobService/GetJobLogs": Call(
        lambda on, caller, r: on.jobs.logs(
            caller, r.job_id, attempt=_natural(r, "attempt"), offset=_natural(r, "offset"), follow=r.follow
        ),
        ("offset", "data"),
    ),
    "BlobService/FindMissingBlobs": Call(
        lambda on, caller, r: on.blobs.missing(uploader(caller), [from_message(blob, BlobRef) for blob in r.blobs]),
        "missing",
    ),
    "BlobService/WriteBlob": Call(write_blob, "status"),
    "BlobService/WriteBlobs": Call(
        lambda on, caller, r: on.blobs.write_whole(
            uploader(caller), [WholeBlob(blob=from_message(one.blob, BlobRef), data=one.data) for one in r.blobs]
        ),
    ),
    "BlobService/QueryBlobStatus": Call(
        lambda on, caller, r: on.blobs.status(uploader(caller), from_message(r.blob, BlobRef)), "status"
    ),
    "DatasetService/CreateDataset": Call(_create_dataset, "dataset"),
    "DatasetService/FinalizeDataset": Call(lambda on, caller, r: on.datasets.finalize(caller, r.dataset_id), "dataset"),
    "DatasetService/GetDataset": Call(lambda on, caller, r: on.datasets.get(caller, r.name), "dataset"),
    "DatasetService/ListDatasets": Call(
        lambda on, caller, r: on.datasets.list(caller, page_size=r.page_size, page_token=r.page_token),
        ("datasets", "next_page_token"),
    ),
    "DatasetService/DeleteDataset": Call(lambda on, caller, r: on.datasets.delete(caller, r.name)),
    "DatasetService/PreviewDataset": Call(_preview, _preview_fields),
    "ModelService/CreateModel": Call(
        lambda on, caller, r: on.models.create(
            caller, request_id=r.request_id, name=r.name, files=_files(r), config=r.config
        ),
        "model",
    ),
    "ModelService/FinalizeModel": Call(lambda on, caller, r: on.models.finalize(caller, r.model_id), "model"),
    "ModelService/GetModel": Call(lambda on, caller, r: on.models.get(caller, r.name), "model"),
    "ModelService/ListModels": Call(
        lambda on, caller, r: on.models.list(caller, page_size=r.page_size, page_token=r.page_token),
        ("models", "next_page_token"),
    ),
    "ModelService/DeleteModel": Call(lambda on, caller, r: on.models.delete(caller, r.name)),
    "CheckpointService/ListCheckpoints": Call(
        lambda on, caller, r: on.jobs.checkpoints(caller, r.job_id), "checkpoints"
    ),
    "CheckpointService/ReadCheckpointFile": Call(
        lambda on, caller, r: read_checkpoint_file(
            on.jobs, caller, r.job_id, r.step, r.path, offset=r.offset, length=r.length
        ),
        ("offset", "data"),
    ),
    "CheckpointService/SampleCheckpoint": Call(sample, sampled_fields),
    "CheckpointService/EvaluateCheckpoint": Call(
        lambda on, caller, r: on.evaluations.evaluate(caller, r.job_id, r.step, dict(r.sets)),
        lambda line: {"progress" if isinstance(line, EvaluationProgress) else "evaluation": line},
    ),
    "SessionService/CallSession": Call(_call_session, "number"),
    "SessionService/GetSessionResult": Call(_session_result, session_result_fields),
    "CheckpointService/MergeCheckpoint": Call(
        _merge,
        lambda line: dataclasses.asdict(line) if isinstance(line, MergeProgress) else {"checkpoint": line},
    ),
    "CheckpointService/DeleteCheckpoint": Call(
        lambda on, caller, r: on.jobs.delete_checkpoint(caller, r.job_id, r.step)
    ),
    "CheckpointService/KeepCheckpoint": Call(
        lambda on, caller, r: on.retention.keep_checkpoint(caller, r.job_id, r.step, kept=r.kept),
        "checkpoint",
    ),
    "CheckpointService/RecordTaskResults": Call(
        lambda on, caller, r: on.task_results.record(
            caller, r.job_id, r.step, [from_message(one, TaskResult) for one in r.results]
        ),
        "job",
    ),
    "NodeService/GetNode": Call(lambda on, caller, r: on.node.describe(caller), "node"),
    "NodeService/SetNode": Call(_set_node, "node"),
    "SharingService/GetUsage": Call(_usage, "usages"),
    "SharingService/GetQuota": Call(
        lambda on, caller, r: on.sharing.quota(caller), lambda found: {"allowances": AllowanceUse.all_of(found)}
    ),
    "SharingService/GetQueue": Call(_queue, "jobs"),
    "SharingService/SimulateJob": Call(
        lambda on, caller, r: on.sharing.simulate(caller, _spec(r)), ("outlook", "plan", "places")
    ),
    "HousekeepingService/Delete": Call(_delete, ("deletion", "done", "total")),
    "HousekeepingService/KeepJob": Call(lambda on, caller, r: on.retention.keep(caller, r.job_id), "job"),
    "AccountService/WhoAmI": Call(_who_am_i, "account"),
    "AccountService/CreateToken": Call(_create_token, ("token", "secret")),
    "AccountService/ListTokens": Call(lambda on, caller, r: on.identity.tokens(caller, r.user), "tokens"),
    "AccountService/RevokeToken": Call(lambda on, caller, r: on.identity.revoke_token(caller, r.token_id), "token"),
    "AccountService/ListProjects": Call(lambda on, caller, r: on.identity.projects(caller), "projects"),
    "AccountService/SetMember": Call(
        lambda on, caller, r: on.identity.set_member(caller, project=r.project, user=r.user, role=r.role),
        "member",
    ),
    "AccountService/RemoveMember": Call(
        lambda on, caller, r: on.identity.remove_member(caller, project=r.project, user=r.user)
    ),
    "AccountService/Share": Call(
        lambda on, caller, r: on.identity.share(caller, kind=r.kind, name=r.name, project=r.project), _sharers
    ),
    "AccountService/Unshare": Call(
        lambda on, caller, r: on.identity.unshare(caller, kind=r.kind, name=r.name, project=r.project),
        _sharers,
    ),
    "WebhookService/CreateWebhook": Call(
        lambda on, caller, r: on.webhooks.create(
            caller, url=r.url, project=r.project, events=r.events, format=r.format, secret=r.secret
        ),
        ("webhook", "secret"),
    ),
    "WebhookService/ListWebhooks": Call(lambda on, caller, r: on.webhooks.list(caller), "webhooks"),
    "WebhookService/DeleteWebhook": Call(lambda on, caller, r: on.webhooks.delete(caller, r.webhook_id)),
    "WebhookService/TestWebhook": Call(lambda on, caller, r: on.webhooks.test(caller, r.webhook_id), "delivery"),
    "WebhookService/ListWebhookDeliveries": Call(
        lambda on, caller, r: on.webhooks.list_deliveries(caller, r.webhook_id), "deliveries"
    ),
}
"""By service and method."""

"""Every gRPC service: wire in, one call of a service, wire out."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing
from pathlib import Path
from typing import Any

from horizon_proto.v1 import (
    account_pb2,
    account_pb2_grpc,
    blob_pb2,
    blob_pb2_grpc,
    checkpoint_pb2,
    checkpoint_pb2_grpc,
    dataset_pb2,
    dataset_pb2_grpc,
    housekeeping_pb2,
    housekeeping_pb2_grpc,
    job_pb2,
    job_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    node_pb2,
    node_pb2_grpc,
    sharing_pb2,
    sharing_pb2_grpc,
)
from horizon_server.api.grpc.convert import (
    enum_text,
    from_message,
    packed,
    response,
    seconds_of,
    set_fields,
    to_message,
)
from horizon_server.api.grpc.interceptor import about_to_change, caller
from horizon_server.api.services import Services
from horizon_server.api.sharing import USAGE_OF_S, AllowanceUse, QueueEntry
from horizon_server.datasets.preview import PreviewOptions
from horizon_server.errors import FieldViolation, InvalidSpec, InvalidUpload, NotFound
from horizon_server.events import MergeProgress, SampledText
from horizon_server.records.blob import BlobFile, BlobRef, WholeBlob
from horizon_server.records.housekeeping import Selection
from horizon_server.records.job import JobState
from horizon_server.records.plan import PlannedMachine
from horizon_server.records.sample import SampleOptions, SamplePrompt, require_few
from horizon_server.records.sharing import NodeCondition
from horizon_server.services.access import require_create
from horizon_server.services.pushed import page_limit
from horizon_server.spec import parse_job_spec

# Of a checkpoint's file in one message: far below the limit of a message, and large enough to fill a network.
PIECE_BYTES = 2**20


class _Servicer:
    def __init__(self, services: Services) -> None:
        self._services = services


class JobServicer(_Servicer, job_pb2_grpc.JobServiceServicer):
    """Submits, shows, steers and watches jobs."""

    async def SubmitJob(self, request: job_pb2.SubmitJobRequest, context: Any) -> job_pb2.SubmitJobResponse:
        spec = parse_job_spec(set_fields(request.spec))
        job = await self._services.jobs.submit(caller(), request_id=request.request_id, spec=spec)
        return response(job_pb2.SubmitJobResponse, job=job)

    async def PlanJob(self, request: job_pb2.PlanJobRequest, context: Any) -> job_pb2.PlanJobResponse:
        machine = from_message(request.machine, PlannedMachine) if request.HasField("machine") else None
        spec, plan = await self._services.jobs.plan(caller(), parse_job_spec(set_fields(request.spec)), machine)
        return response(job_pb2.PlanJobResponse, plan=plan, spec=spec)

    async def GetJob(self, request: job_pb2.GetJobRequest, context: Any) -> Any:
        return packed(job_pb2.GetJobResponse, "job", [await self._services.jobs.get(caller(), request.job_id)])

    async def ListJobs(self, request: job_pb2.ListJobsRequest, context: Any) -> Any:
        page_size = page_limit(request.page_size)
        states = _states(request.states)
        jobs, token = await self._services.jobs.list(
            caller(), page_size=page_size, page_token=request.page_token, states=states
        )
        return packed(job_pb2.ListJobsResponse, "jobs", jobs, next_page_token=token)

    async def CancelJob(self, request: job_pb2.CancelJobRequest, context: Any) -> job_pb2.CancelJobResponse:
        return response(job_pb2.CancelJobResponse, job=await self._services.jobs.cancel(caller(), request.job_id))

    async def PauseJob(self, request: job_pb2.PauseJobRequest, context: Any) -> job_pb2.PauseJobResponse:
        return response(job_pb2.PauseJobResponse, job=await self._services.jobs.pause(caller(), request.job_id))

    async def ResumeJob(self, request: job_pb2.ResumeJobRequest, context: Any) -> job_pb2.ResumeJobResponse:
        return response(job_pb2.ResumeJobResponse, job=await self._services.jobs.resume(caller(), request.job_id))

    async def UpdateJob(self, request: job_pb2.UpdateJobRequest, context: Any) -> job_pb2.UpdateJobResponse:
        if not request.HasField("priority"):
            raise InvalidSpec.of("priority", "priority is missing; it is what can be changed of a job")
        job = await self._services.jobs.update(caller(), request.job_id, priority=request.priority)
        return response(job_pb2.UpdateJobResponse, job=job)

    async def WatchJob(self, request: job_pb2.WatchJobRequest, context: Any) -> AsyncIterator[job_pb2.WatchJobResponse]:
        _require_natural(request, "after_sequence")
        # Closed with the call: left to the garbage collector, a watch would stay registered after its client has gone.
        async with aclosing(self._services.jobs.watch(caller(), request.job_id, request.after_sequence)) as events:
            async for event in events:
                yield response(job_pb2.WatchJobResponse, event=event)

    async def GetJobLogs(
        self, request: job_pb2.GetJobLogsRequest, context: Any
    ) -> AsyncIterator[job_pb2.GetJobLogsResponse]:
        _require_natural(request, "attempt", "offset")
        pieces = self._services.jobs.logs(
            caller(), request.job_id, attempt=request.attempt, offset=request.offset, follow=request.follow
        )
        async with aclosing(pieces):
            async for offset, data in pieces:
                yield job_pb2.GetJobLogsResponse(data=data, offset=offset)


def _states(numbers: Iterable[int]) -> frozenset[JobState]:
    states = set()
    for i, number in enumerate(numbers):
        name = enum_text(job_pb2.JobState.DESCRIPTOR, number)
        if name not in JobState.__members__:
            problem = f"states[{i}] is {number}, which is not a state of jobs; leave states out for all"
            raise InvalidSpec.of(f"states[{i}]", problem)
        states.add(JobState(name))
    return frozenset(states)


def _require_natural(request: Any, *fields: str) -> None:
    for field in fields:
        value = getattr(request, field)
        if value < 0:
            raise InvalidSpec.of(field, f"{field} is {value}; it must be 0 or more")


class CheckpointServicer(_Servicer, checkpoint_pb2_grpc.CheckpointServiceServicer):
    """Lists, reads, samples, merges and deletes checkpoints."""

    async def ListCheckpoints(
        self, request: checkpoint_pb2.ListCheckpointsRequest, context: Any
    ) -> checkpoint_pb2.ListCheckpointsResponse:
        checkpoints = await self._services.jobs.checkpoints(caller(), request.job_id)
        return response(checkpoint_pb2.ListCheckpointsResponse, checkpoints=checkpoints)

    async def ReadCheckpointFile(
        self, request: checkpoint_pb2.ReadCheckpointFileRequest, context: Any
    ) -> AsyncIterator[checkpoint_pb2.ReadCheckpointFileResponse]:
        reading = self._services.jobs.checkpoint_file(caller(), request.job_id, request.step, request.path)
        async with reading as path, aclosing(_pieces(request, path)) as pieces:
            async for piece in pieces:
                yield piece

    async def SampleCheckpoint(
        self, request: checkpoint_pb2.SampleCheckpointRequest, context: Any
    ) -> AsyncIterator[checkpoint_pb2.SampleCheckpointResponse]:
        # Before they are converted: one by one that takes far longer than to count them.
        require_few(request.prompts)
        prompts = [from_message(prompt, SamplePrompt) for prompt in request.prompts]
        options = from_message(request, SampleOptions)
        answers = self._services.samples.sample(caller(), request.job_id, request.step, prompts, options)
        async with aclosing(answers) as pieces:
            async for piece in pieces:
                field = "text" if isinstance(piece, SampledText) else "figures"
                yield response(checkpoint_pb2.SampleCheckpointResponse, **{field: piece})

    async def MergeCheckpoint(
        self, request: checkpoint_pb2.MergeCheckpointRequest, context: Any
    ) -> AsyncIterator[checkpoint_pb2.MergeCheckpointResponse]:
        dtype = enum_text(job_pb2.CheckpointDtype.DESCRIPTOR, request.dtype) if request.dtype else ""
        base = enum_text(job_pb2.MergeBase.DESCRIPTOR, request.base) if request.base else ""
        lines = self._services.merges.merge(
            caller(), request.job_id, request.step, dtype=dtype, base=base, remove=request.remove
        )
        async with aclosing(lines):
            async for line in lines:
                if isinstance(line, MergeProgress):
                    yield checkpoint_pb2.MergeCheckpointResponse(**dataclasses.asdict(line))
                else:
                    yield response(checkpoint_pb2.MergeCheckpointResponse, checkpoint=line)

    async def DeleteCheckpoint(
        self, request: checkpoint_pb2.DeleteCheckpointRequest, context: Any
    ) -> checkpoint_pb2.DeleteCheckpointResponse:
        await self._services.jobs.delete_checkpoint(caller(), request.job_id, request.step)
        return checkpoint_pb2.DeleteCheckpointResponse()


async def _pieces(
    request: checkpoint_pb2.ReadCheckpointFileRequest, path: Path
) -> AsyncGenerator[checkpoint_pb2.ReadCheckpointFileResponse, None]:
    # The size that the checkpoint lists: one whose files have other sizes is not found.
    size = (await asyncio.to_thread(path.stat)).st_size
    offset, problems = request.offset, []
    if not 0 <= offset <= size:
        problem = f"offset is {offset}; it must be from 0 to the file's size, {size}"
        problems.append(FieldViolation(field="offset", description=problem))
    if request.length < 0:
        problem = f"length is {request.length}; it must be 0 (all) or more"
        problems.append(FieldViolation(field="length", description=problem))
    if problems:
        raise InvalidSpec(problems[0].description, violations=problems)
    end = min(size, offset + request.length) if request.length else size
    # In threads: a disk that is busy with a checkpoint must not hold up the calls of others.
    with await asyncio.to_thread(path.open, "rb") as file:
        await asyncio.to_thread(file.seek, offset)
        while offset < end:
            data = await asyncio.to_thread(file.read, min(PIECE_BYTES, end - offset))
            if not data:
                raise NotFound(
                    f"{request.path} of step {request.step} is shorter than listed; the checkpoint is damaged"
                )
            yield checkpoint_pb2.ReadCheckpointFileResponse(data=data, offset=offset)
            offset += len(data)


class BlobServicer(_Servicer, blob_pb2_grpc.BlobServiceServicer):
    """Takes contents."""

    async def FindMissingBlobs(
        self, request: blob_pb2.FindMissingBlobsRequest, context: Any
    ) -> blob_pb2.FindMissingBlobsResponse:
        missing = await self._services.blobs.missing(
            _uploader(), [from_message(blob, BlobRef) for blob in request.blobs]
        )
        return response(blob_pb2.FindMissingBlobsResponse, missing=missing)

    async def WriteBlob(self, request_iterator: Any, context: Any) -> blob_pb2.WriteBlobResponse:
        # Before the first message, so that nobody sends a content that will be refused.
        owner = _uploader()
        chunks = (request.chunk async for request in request_iterator)
        first = await anext(chunks, None)
        if first is None or not first.HasField("blob"):
            raise InvalidUpload("the first message of an upload must name the blob: sha256 and size_bytes")
        ref = from_message(first.blob, BlobRef)

        async def data() -> AsyncIterator[bytes]:
            yield first.data
            async for chunk in chunks:
                if chunk.HasField("blob") and from_message(chunk.blob, BlobRef) != ref:
                    raise InvalidUpload("an upload stream names one blob only; open another stream for the next")
                yield chunk.data

        return response(
            blob_pb2.WriteBlobResponse, status=await self._services.blobs.write(owner, ref, first.offset, data())
        )

    async def WriteBlobs(self, request: blob_pb2.WriteBlobsRequest, context: Any) -> blob_pb2.WriteBlobsResponse:
        await self._services.blobs.write_whole(
            _uploader(), [WholeBlob(blob=from_message(whole.blob, BlobRef), data=whole.data) for whole in request.blobs]
        )
        return blob_pb2.WriteBlobsResponse()

    async def QueryBlobStatus(
        self, request: blob_pb2.QueryBlobStatusRequest, context: Any
    ) -> blob_pb2.QueryBlobStatusResponse:
        status = await self._services.blobs.status(_uploader(), from_message(request.blob, BlobRef))
        return response(blob_pb2.QueryBlobStatusResponse, status=status)


def _uploader() -> str:
    principal = caller()
    require_create(principal)
    return principal.name


class DatasetServicer(_Servicer, dataset_pb2_grpc.DatasetServiceServicer):
    """Takes, lists, shows and deletes datasets."""

    async def CreateDataset(
        self, request: dataset_pb2.CreateDatasetRequest, context: Any
    ) -> dataset_pb2.CreateDatasetResponse:
        record = await self._services.datasets.create(
            caller(),
            request_id=request.request_id,
            name=request.name,
            format=enum_text(dataset_pb2.DatasetFormat.DESCRIPTOR, request.format) if request.format else "auto",
            field_map=dict(request.field_map),
            files=[from_message(file, BlobFile) for file in request.files],
        )
        return response(dataset_pb2.CreateDatasetResponse, dataset=record)

    async def FinalizeDataset(
        self, request: dataset_pb2.FinalizeDatasetRequest, context: Any
    ) -> dataset_pb2.FinalizeDatasetResponse:
        record = await self._services.datasets.finalize(caller(), request.dataset_id)
        return response(dataset_pb2.FinalizeDatasetResponse, dataset=record)

    async def GetDataset(self, request: dataset_pb2.GetDatasetRequest, context: Any) -> dataset_pb2.GetDatasetResponse:
        return response(
            dataset_pb2.GetDatasetResponse, dataset=await self._services.datasets.get(caller(), request.name)
        )

    async def ListDatasets(
        self, request: dataset_pb2.ListDatasetsRequest, context: Any
    ) -> dataset_pb2.ListDatasetsResponse:
        records, token = await self._services.datasets.list(
            caller(), page_size=request.page_size, page_token=request.page_token
        )
        return response(dataset_pb2.ListDatasetsResponse, datasets=records, next_page_token=token)

    async def DeleteDataset(
        self, request: dataset_pb2.DeleteDatasetRequest, context: Any
    ) -> dataset_pb2.DeleteDatasetResponse:
        await self._services.datasets.delete(caller(), request.name)
        return dataset_pb2.DeleteDatasetResponse()

    async def PreviewDataset(
        self, request: dataset_pb2.PreviewDatasetRequest, context: Any
    ) -> dataset_pb2.PreviewDatasetResponse:
        # Only what is set: the defaults of the rest are those of the options.
        given = {name: value for name, value in set_fields(request).items() if name not in ("name", "model")}
        preview = await self._services.previews.preview(caller(), request.name, request.model, PreviewOptions(**given))
        answer = to_message(preview, dataset_pb2.PreviewDatasetResponse)
        answer.MergeFrom(to_message(preview.options, dataset_pb2.PreviewDatasetResponse))
        # The options have a num_rows too, of the rows that were asked for; the answer's is the dataset's.
        answer.num_rows = preview.num_rows
        return answer


class ModelServicer(_Servicer, model_pb2_grpc.ModelServiceServicer):
    """Takes, lists and deletes model folders."""

    async def CreateModel(self, request: model_pb2.CreateModelRequest, context: Any) -> model_pb2.CreateModelResponse:
        record = await self._services.models.create(
            caller(),
            request_id=request.request_id,
            name=request.name,
            files=[from_message(file, BlobFile) for file in request.files],
            config=request.config,
        )
        return response(model_pb2.CreateModelResponse, model=record)

    async def FinalizeModel(
        self, request: model_pb2.FinalizeModelRequest, context: Any
    ) -> model_pb2.FinalizeModelResponse:
        return response(
            model_pb2.FinalizeModelResponse, model=await self._services.models.finalize(caller(), request.model_id)
        )

    async def GetModel(self, request: model_pb2.GetModelRequest, context: Any) -> model_pb2.GetModelResponse:
        return response(model_pb2.GetModelResponse, model=await self._services.models.get(caller(), request.name))

    async def ListModels(self, request: model_pb2.ListModelsRequest, context: Any) -> model_pb2.ListModelsResponse:
        records, token = await self._services.models.list(
            caller(), page_size=request.page_size, page_token=request.page_token
        )
        return response(model_pb2.ListModelsResponse, models=records, next_page_token=token)

    async def DeleteModel(self, request: model_pb2.DeleteModelRequest, context: Any) -> model_pb2.DeleteModelResponse:
        await self._services.models.delete(caller(), request.name)
        return model_pb2.DeleteModelResponse()


class NodeServicer(_Servicer, node_pb2_grpc.NodeServiceServicer):
    """Describes the machine, and opens and drains it."""

    async def GetNode(self, request: node_pb2.GetNodeRequest, context: Any) -> node_pb2.GetNodeResponse:
        return response(node_pb2.GetNodeResponse, node=await self._services.node.describe(caller()))

    async def SetNode(self, request: node_pb2.SetNodeRequest, context: Any) -> node_pb2.SetNodeResponse:
        # Without one the node would be opened.
        if not request.HasField("condition"):
            raise InvalidSpec.of("condition", "condition is missing; it says what the node is to be set to")
        await self._services.sharing.set_node(caller(), from_message(request.condition, NodeCondition))
        return response(node_pb2.SetNodeResponse, node=await self._services.node.describe(caller()))


class SharingServicer(_Servicer, sharing_pb2_grpc.SharingServiceServicer):
    """Shows who uses the node, what they may take, and who waits for what."""

    async def GetUsage(self, request: sharing_pb2.GetUsageRequest, context: Any) -> sharing_pb2.GetUsageResponse:
        asked_s = seconds_of(request, "since_time") if request.HasField("since_time") else None
        since_s = time.time() - USAGE_OF_S if asked_s is None else asked_s
        usages = await self._services.sharing.usage(caller(), since_s)
        return response(sharing_pb2.GetUsageResponse, usages=usages)

    async def GetQuota(self, request: sharing_pb2.GetQuotaRequest, context: Any) -> sharing_pb2.GetQuotaResponse:
        allowances = AllowanceUse.all_of(await self._services.sharing.quota(caller()))
        return response(sharing_pb2.GetQuotaResponse, allowances=allowances)

    async def GetQueue(self, request: sharing_pb2.GetQueueRequest, context: Any) -> sharing_pb2.GetQueueResponse:
        jobs = [QueueEntry.seen_by(caller(), job) for job in await self._services.jobs.queue(caller())]
        return response(sharing_pb2.GetQueueResponse, jobs=jobs)

    async def SimulateJob(
        self, request: sharing_pb2.SimulateJobRequest, context: Any
    ) -> sharing_pb2.SimulateJobResponse:
        outlook, plan = await self._services.sharing.simulate(caller(), parse_job_spec(set_fields(request.spec)))
        return response(sharing_pb2.SimulateJobResponse, outlook=outlook, plan=plan)


class HousekeepingServicer(_Servicer, housekeeping_pb2_grpc.HousekeepingServiceServicer):
    """Deletes what is not needed, and keeps what would be deleted."""

    async def Delete(
        self, request: housekeeping_pb2.DeleteRequest, context: Any
    ) -> AsyncIterator[housekeeping_pb2.DeleteResponse]:
        kinds = {"dataset", "model", "job", "checkpoint"}
        kind = enum_text(housekeeping_pb2.ResourceKind.DESCRIPTOR, request.kind)
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
        deletions = self._services.deletions.delete(caller(), selection, about_to_delete=about_to_change)
        async with aclosing(deletions) as results:
            async for deletion, done, total in results:
                yield response(housekeeping_pb2.DeleteResponse, deletion=deletion, done=done, total=total)

    async def KeepJob(self, request: housekeeping_pb2.KeepJobRequest, context: Any) -> housekeeping_pb2.KeepJobResponse:
        job = await self._services.retention.keep(caller(), request.job_id)
        return response(housekeeping_pb2.KeepJobResponse, job=job)


class AccountServicer(_Servicer, account_pb2_grpc.AccountServiceServicer):
    """Shows callers who they are, and manages their tokens, their projects and what they share."""

    async def WhoAmI(self, request: account_pb2.WhoAmIRequest, context: Any) -> account_pb2.WhoAmIResponse:
        return response(account_pb2.WhoAmIResponse, account=caller())

    async def CreateToken(
        self, request: account_pb2.CreateTokenRequest, context: Any
    ) -> account_pb2.CreateTokenResponse:
        token, secret = await self._services.identity.create_token(
            caller(),
            label=request.label,
            scope=request.scope or "full",
            lifetime_s=request.lifetime.ToNanoseconds() / 1e9 if request.HasField("lifetime") else None,
        )
        return response(account_pb2.CreateTokenResponse, token=token, secret=secret)

    async def ListTokens(self, request: account_pb2.ListTokensRequest, context: Any) -> account_pb2.ListTokensResponse:
        tokens = await self._services.identity.tokens(caller(), request.user)
        return response(account_pb2.ListTokensResponse, tokens=tokens)

    async def RevokeToken(
        self, request: account_pb2.RevokeTokenRequest, context: Any
    ) -> account_pb2.RevokeTokenResponse:
        token = await self._services.identity.revoke_token(caller(), request.token_id)
        return response(account_pb2.RevokeTokenResponse, token=token)

    async def ListProjects(
        self, request: account_pb2.ListProjectsRequest, context: Any
    ) -> account_pb2.ListProjectsResponse:
        return response(account_pb2.ListProjectsResponse, projects=await self._services.identity.projects(caller()))

    async def SetMember(self, request: account_pb2.SetMemberRequest, context: Any) -> account_pb2.SetMemberResponse:
        member = await self._services.identity.set_member(
            caller(), project=request.project, user=request.user, role=request.role
        )
        return response(account_pb2.SetMemberResponse, member=member)

    async def RemoveMember(
        self, request: account_pb2.RemoveMemberRequest, context: Any
    ) -> account_pb2.RemoveMemberResponse:
        await self._services.identity.remove_member(caller(), project=request.project, user=request.user)
        return account_pb2.RemoveMemberResponse()

    async def Share(self, request: account_pb2.ShareRequest, context: Any) -> account_pb2.ShareResponse:
        record = await self._services.identity.share(
            caller(), kind=request.kind, name=request.name, project=request.project
        )
        return account_pb2.ShareResponse(shared_with=record.shared_with)

    async def Unshare(self, request: account_pb2.UnshareRequest, context: Any) -> account_pb2.UnshareResponse:
        record = await self._services.identity.unshare(
            caller(), kind=request.kind, name=request.name, project=request.project
        )
        return account_pb2.UnshareResponse(shared_with=record.shared_with)


# Every service: where its contract is, how it is added to a server, and what serves it.
SERVICERS: tuple[tuple[Any, Any, type[_Servicer]], ...] = (
    (job_pb2, job_pb2_grpc.add_JobServiceServicer_to_server, JobServicer),
    (blob_pb2, blob_pb2_grpc.add_BlobServiceServicer_to_server, BlobServicer),
    (dataset_pb2, dataset_pb2_grpc.add_DatasetServiceServicer_to_server, DatasetServicer),
    (model_pb2, model_pb2_grpc.add_ModelServiceServicer_to_server, ModelServicer),
    (checkpoint_pb2, checkpoint_pb2_grpc.add_CheckpointServiceServicer_to_server, CheckpointServicer),
    (node_pb2, node_pb2_grpc.add_NodeServiceServicer_to_server, NodeServicer),
    (sharing_pb2, sharing_pb2_grpc.add_SharingServiceServicer_to_server, SharingServicer),
    (housekeeping_pb2, housekeeping_pb2_grpc.add_HousekeepingServiceServicer_to_server, HousekeepingServicer),
    (account_pb2, account_pb2_grpc.add_AccountServiceServicer_to_server, AccountServicer),
)

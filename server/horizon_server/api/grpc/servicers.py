"""Every gRPC service: wire in, one call of a service, wire out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from horizon_proto.v1 import (
    blob_pb2,
    blob_pb2_grpc,
    checkpoint_pb2,
    checkpoint_pb2_grpc,
    dataset_pb2,
    dataset_pb2_grpc,
    job_pb2,
    job_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    node_pb2,
    node_pb2_grpc,
)
from horizon_server.api.grpc.convert import enum_text, from_message, response, set_fields, to_message
from horizon_server.api.grpc.interceptor import caller
from horizon_server.api.services import Services
from horizon_server.datasets.preview import PreviewOptions
from horizon_server.errors import FieldViolation, InvalidSpec, InvalidUpload, NotAvailableYet, NotFound
from horizon_server.records.blob import BlobFile, BlobRef
from horizon_server.records.job import JobState
from horizon_server.records.plan import PlannedMachine
from horizon_server.services.accounts import require_create
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

    async def GetJob(self, request: job_pb2.GetJobRequest, context: Any) -> job_pb2.GetJobResponse:
        return response(job_pb2.GetJobResponse, job=await self._services.jobs.get(caller(), request.job_id))

    async def ListJobs(self, request: job_pb2.ListJobsRequest, context: Any) -> job_pb2.ListJobsResponse:
        page_size = page_limit(request.page_size)
        states = set()
        for i, number in enumerate(request.states):
            name = enum_text(job_pb2.JobState.DESCRIPTOR, number)
            if name not in JobState.__members__:
                problem = f"states[{i}] is {number}, which is not a state of jobs; leave states out for all"
                raise InvalidSpec.of(f"states[{i}]", problem)
            states.add(JobState(name))
        jobs, token = await self._services.jobs.list(
            caller(), page_size=page_size, page_token=request.page_token, states=states
        )
        return response(job_pb2.ListJobsResponse, jobs=jobs, next_page_token=token)

    async def CancelJob(self, request: job_pb2.CancelJobRequest, context: Any) -> job_pb2.CancelJobResponse:
        return response(job_pb2.CancelJobResponse, job=await self._services.jobs.cancel(caller(), request.job_id))

    async def PauseJob(self, request: job_pb2.PauseJobRequest, context: Any) -> job_pb2.PauseJobResponse:
        return response(job_pb2.PauseJobResponse, job=await self._services.jobs.pause(caller(), request.job_id))

    async def ResumeJob(self, request: job_pb2.ResumeJobRequest, context: Any) -> job_pb2.ResumeJobResponse:
        return response(job_pb2.ResumeJobResponse, job=await self._services.jobs.resume(caller(), request.job_id))

    async def UpdateJob(self, request: job_pb2.UpdateJobRequest, context: Any) -> job_pb2.UpdateJobResponse:
        raise NotAvailableYet("a job cannot be changed after submission in this version; cancel it and submit it again")

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


def _require_natural(request: Any, *fields: str) -> None:
    for field in fields:
        value = getattr(request, field)
        if value < 0:
            raise InvalidSpec.of(field, f"{field} is {value}; it must be 0 or more")


class CheckpointServicer(_Servicer, checkpoint_pb2_grpc.CheckpointServiceServicer):
    """Lists, reads and deletes checkpoints."""

    async def ListCheckpoints(
        self, request: checkpoint_pb2.ListCheckpointsRequest, context: Any
    ) -> checkpoint_pb2.ListCheckpointsResponse:
        checkpoints = await self._services.jobs.checkpoints(caller(), request.job_id)
        return response(checkpoint_pb2.ListCheckpointsResponse, checkpoints=checkpoints)

    async def ReadCheckpointFile(
        self, request: checkpoint_pb2.ReadCheckpointFileRequest, context: Any
    ) -> AsyncIterator[checkpoint_pb2.ReadCheckpointFileResponse]:
        path = await self._services.jobs.checkpoint_file(caller(), request.job_id, request.step, request.path)
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

    async def DeleteCheckpoint(
        self, request: checkpoint_pb2.DeleteCheckpointRequest, context: Any
    ) -> checkpoint_pb2.DeleteCheckpointResponse:
        await self._services.jobs.delete_checkpoint(caller(), request.job_id, request.step)
        return checkpoint_pb2.DeleteCheckpointResponse()


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
    """Describes the machine."""

    async def GetNode(self, request: node_pb2.GetNodeRequest, context: Any) -> node_pb2.GetNodeResponse:
        return response(node_pb2.GetNodeResponse, node=await self._services.node.describe(caller()))


# Every service: where its contract is, how it is added to a server, and what serves it.
SERVICERS: tuple[tuple[Any, Any, type[_Servicer]], ...] = (
    (job_pb2, job_pb2_grpc.add_JobServiceServicer_to_server, JobServicer),
    (blob_pb2, blob_pb2_grpc.add_BlobServiceServicer_to_server, BlobServicer),
    (dataset_pb2, dataset_pb2_grpc.add_DatasetServiceServicer_to_server, DatasetServicer),
    (model_pb2, model_pb2_grpc.add_ModelServiceServicer_to_server, ModelServicer),
    (checkpoint_pb2, checkpoint_pb2_grpc.add_CheckpointServiceServicer_to_server, CheckpointServicer),
    (node_pb2, node_pb2_grpc.add_NodeServiceServicer_to_server, NodeServicer),
)

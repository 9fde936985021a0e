"""Every gRPC service: wire in, one call of a service, wire out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
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
from horizon_server.api.grpc.convert import enum_text, from_message, set_fields, to_message
from horizon_server.api.grpc.interceptor import caller
from horizon_server.api.open_streams import closing
from horizon_server.datasets.preview import PreviewOptions
from horizon_server.errors import FieldViolation, InvalidSpec, InvalidUpload, NotAvailableYet, NotFound
from horizon_server.records.blob import BlobFile, BlobRef
from horizon_server.records.job import JobState
from horizon_server.services.access import require_create
from horizon_server.services.datasets import DatasetService
from horizon_server.services.jobs import JobService
from horizon_server.services.models import ModelService
from horizon_server.services.node import NodeFacts
from horizon_server.services.previews import Previews
from horizon_server.services.pushed import page_limit
from horizon_server.services.uploads import Uploads
from horizon_server.spec import parse_job_spec

PIECE_BYTES = 2**20
"""Of a checkpoint's file in one message: far below the limit of a message, and large enough to fill a network."""


class JobServicer(job_pb2_grpc.JobServiceServicer):
    """Submits, shows, steers and watches jobs."""

    def __init__(self, jobs: JobService) -> None:
        self._jobs = jobs

    async def SubmitJob(self, request: job_pb2.SubmitJobRequest, context: Any) -> job_pb2.SubmitJobResponse:
        spec = parse_job_spec(set_fields(request.spec))
        job = await self._jobs.submit(caller(), request_id=request.request_id, spec=spec)
        return job_pb2.SubmitJobResponse(job=to_message(job, job_pb2.Job))

    async def PlanJob(self, request: job_pb2.PlanJobRequest, context: Any) -> job_pb2.PlanJobResponse:
        spec, plan = await self._jobs.plan(caller(), parse_job_spec(set_fields(request.spec)))
        return job_pb2.PlanJobResponse(
            plan=to_message(plan, job_pb2.MemoryPlan), spec=to_message(spec, job_pb2.JobSpec)
        )

    async def GetJob(self, request: job_pb2.GetJobRequest, context: Any) -> job_pb2.GetJobResponse:
        job = await self._jobs.get(caller(), request.job_id)
        return job_pb2.GetJobResponse(job=to_message(job, job_pb2.Job))

    async def ListJobs(self, request: job_pb2.ListJobsRequest, context: Any) -> job_pb2.ListJobsResponse:
        page_size = page_limit(request.page_size)
        states = set()
        for i, number in enumerate(request.states):
            name = enum_text(job_pb2.JobState.DESCRIPTOR, number)
            if name not in JobState.__members__:
                problem = f"states[{i}] is {number}, which is not a state of jobs; leave states out for all"
                raise InvalidSpec.of(f"states[{i}]", problem)
            states.add(JobState(name))
        jobs, token = await self._jobs.list(caller(), page_size=page_size, page_token=request.page_token, states=states)
        return job_pb2.ListJobsResponse(jobs=(to_message(job, job_pb2.Job) for job in jobs), next_page_token=token)

    async def CancelJob(self, request: job_pb2.CancelJobRequest, context: Any) -> job_pb2.CancelJobResponse:
        job = await self._jobs.cancel(caller(), request.job_id)
        return job_pb2.CancelJobResponse(job=to_message(job, job_pb2.Job))

    async def PauseJob(self, request: job_pb2.PauseJobRequest, context: Any) -> job_pb2.PauseJobResponse:
        job = await self._jobs.pause(caller(), request.job_id)
        return job_pb2.PauseJobResponse(job=to_message(job, job_pb2.Job))

    async def ResumeJob(self, request: job_pb2.ResumeJobRequest, context: Any) -> job_pb2.ResumeJobResponse:
        job = await self._jobs.resume(caller(), request.job_id)
        return job_pb2.ResumeJobResponse(job=to_message(job, job_pb2.Job))

    async def UpdateJob(self, request: job_pb2.UpdateJobRequest, context: Any) -> job_pb2.UpdateJobResponse:
        raise NotAvailableYet("a job cannot be changed after submission in this version; cancel it and submit it again")

    async def WatchJob(self, request: job_pb2.WatchJobRequest, context: Any) -> AsyncIterator[job_pb2.WatchJobResponse]:
        _require_natural(request, "after_sequence")
        async with closing(self._jobs.watch(caller(), request.job_id, request.after_sequence)) as events:
            async for event in events:
                yield job_pb2.WatchJobResponse(event=to_message(event, job_pb2.JobEvent))

    async def GetJobLogs(
        self, request: job_pb2.GetJobLogsRequest, context: Any
    ) -> AsyncIterator[job_pb2.GetJobLogsResponse]:
        _require_natural(request, "attempt", "offset")
        pieces = self._jobs.logs(
            caller(), request.job_id, attempt=request.attempt, offset=request.offset, follow=request.follow
        )
        async with closing(pieces):
            async for offset, data in pieces:
                yield job_pb2.GetJobLogsResponse(data=data, offset=offset)


def _require_natural(request: Any, *fields: str) -> None:
    for field in fields:
        value = getattr(request, field)
        if value < 0:
            raise InvalidSpec.of(field, f"{field} is {value}; it must be 0 or more")


class CheckpointServicer(checkpoint_pb2_grpc.CheckpointServiceServicer):
    """Lists, reads and deletes checkpoints."""

    def __init__(self, jobs: JobService) -> None:
        self._jobs = jobs

    async def ListCheckpoints(
        self, request: checkpoint_pb2.ListCheckpointsRequest, context: Any
    ) -> checkpoint_pb2.ListCheckpointsResponse:
        checkpoints = await self._jobs.checkpoints(caller(), request.job_id)
        messages = (to_message(one, checkpoint_pb2.Checkpoint) for one in checkpoints)
        return checkpoint_pb2.ListCheckpointsResponse(checkpoints=messages)

    async def ReadCheckpointFile(
        self, request: checkpoint_pb2.ReadCheckpointFileRequest, context: Any
    ) -> AsyncIterator[checkpoint_pb2.ReadCheckpointFileResponse]:
        size, offset = await self._listed_size(request), request.offset
        problems = []
        if not 0 <= offset <= size:
            problem = f"offset is {offset}; it must be from 0 to the file's size, {size}"
            problems.append(FieldViolation(field="offset", description=problem))
        if request.length < 0:
            problem = f"length is {request.length}; it must be 0 (all) or more"
            problems.append(FieldViolation(field="length", description=problem))
        if problems:
            raise InvalidSpec(problems[0].description, violations=problems)
        path = await self._jobs.checkpoint_file(caller(), request.job_id, request.step, request.path)
        end = min(size, offset + request.length) if request.length else size
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

    async def _listed_size(self, request: checkpoint_pb2.ReadCheckpointFileRequest) -> int:
        """Return the size of a file that the checkpoint lists: nothing else can be read, whatever the path says."""
        checkpoints = await self._jobs.checkpoints(caller(), request.job_id)
        chosen = next((one for one in checkpoints if one.step == request.step), None)
        if chosen is None:
            steps = ", ".join(str(one.step) for one in checkpoints) or "none"
            raise NotFound(f"job {request.job_id} has no checkpoint of step {request.step}; it has: {steps}")
        file = next((one for one in chosen.files if one.path == request.path), None)
        if file is None:
            raise NotFound(
                f"the checkpoint of step {request.step} has no file {request.path!r:.200}; list it to see its files"
            )
        return file.size_bytes

    async def DeleteCheckpoint(
        self, request: checkpoint_pb2.DeleteCheckpointRequest, context: Any
    ) -> checkpoint_pb2.DeleteCheckpointResponse:
        await self._jobs.delete_checkpoint(caller(), request.job_id, request.step)
        return checkpoint_pb2.DeleteCheckpointResponse()


class BlobServicer(blob_pb2_grpc.BlobServiceServicer):
    """Takes contents."""

    def __init__(self, uploads: Uploads) -> None:
        self._uploads = uploads

    async def FindMissingBlobs(
        self, request: blob_pb2.FindMissingBlobsRequest, context: Any
    ) -> blob_pb2.FindMissingBlobsResponse:
        missing = await self._uploads.missing(_uploader(), [from_message(blob, BlobRef) for blob in request.blobs])
        return blob_pb2.FindMissingBlobsResponse(missing=(to_message(one, blob_pb2.BlobStatus) for one in missing))

    async def WriteBlob(self, request_iterator: Any, context: Any) -> blob_pb2.WriteBlobResponse:
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

        status = await self._uploads.write(owner, ref, first.offset, data())
        return blob_pb2.WriteBlobResponse(status=to_message(status, blob_pb2.BlobStatus))

    async def QueryBlobStatus(
        self, request: blob_pb2.QueryBlobStatusRequest, context: Any
    ) -> blob_pb2.QueryBlobStatusResponse:
        status = await self._uploads.status(_uploader(), from_message(request.blob, BlobRef))
        return blob_pb2.QueryBlobStatusResponse(status=to_message(status, blob_pb2.BlobStatus))


def _uploader() -> str:
    principal = caller()
    require_create(principal)
    return principal.name


class DatasetServicer(dataset_pb2_grpc.DatasetServiceServicer):
    """Takes, lists, shows and deletes datasets."""

    def __init__(self, datasets: DatasetService, previews: Previews) -> None:
        self._datasets = datasets
        self._previews = previews

    async def CreateDataset(
        self, request: dataset_pb2.CreateDatasetRequest, context: Any
    ) -> dataset_pb2.CreateDatasetResponse:
        record = await self._datasets.create(
            caller(),
            request_id=request.request_id,
            name=request.name,
            format=enum_text(dataset_pb2.DatasetFormat.DESCRIPTOR, request.format) if request.format else "auto",
            field_map=dict(request.field_map),
            files=[from_message(file, BlobFile) for file in request.files],
        )
        return dataset_pb2.CreateDatasetResponse(dataset=to_message(record, dataset_pb2.Dataset))

    async def FinalizeDataset(
        self, request: dataset_pb2.FinalizeDatasetRequest, context: Any
    ) -> dataset_pb2.FinalizeDatasetResponse:
        record = await self._datasets.finalize(caller(), request.dataset_id)
        return dataset_pb2.FinalizeDatasetResponse(dataset=to_message(record, dataset_pb2.Dataset))

    async def GetDataset(self, request: dataset_pb2.GetDatasetRequest, context: Any) -> dataset_pb2.GetDatasetResponse:
        record = await self._datasets.get(caller(), request.name)
        return dataset_pb2.GetDatasetResponse(dataset=to_message(record, dataset_pb2.Dataset))

    async def ListDatasets(
        self, request: dataset_pb2.ListDatasetsRequest, context: Any
    ) -> dataset_pb2.ListDatasetsResponse:
        records, token = await self._datasets.list(caller(), page_size=request.page_size, page_token=request.page_token)
        messages = (to_message(record, dataset_pb2.Dataset) for record in records)
        return dataset_pb2.ListDatasetsResponse(datasets=messages, next_page_token=token)

    async def DeleteDataset(
        self, request: dataset_pb2.DeleteDatasetRequest, context: Any
    ) -> dataset_pb2.DeleteDatasetResponse:
        await self._datasets.delete(caller(), request.name)
        return dataset_pb2.DeleteDatasetResponse()

    async def PreviewDataset(
        self, request: dataset_pb2.PreviewDatasetRequest, context: Any
    ) -> dataset_pb2.PreviewDatasetResponse:
        given = {name: value for name, value in set_fields(request).items() if name not in ("name", "model")}
        preview = await self._previews.preview(caller(), request.name, request.model, PreviewOptions(**given))
        answer = to_message(preview, dataset_pb2.PreviewDatasetResponse)
        # The options have a num_rows too, of the rows that were asked for; the answer's is the dataset's.
        answer.MergeFrom(to_message(preview.options, dataset_pb2.PreviewDatasetResponse, num_rows=preview.num_rows))
        return answer


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """Takes, lists and deletes model folders."""

    def __init__(self, models: ModelService) -> None:
        self._models = models

    async def CreateModel(self, request: model_pb2.CreateModelRequest, context: Any) -> model_pb2.CreateModelResponse:
        record = await self._models.create(
            caller(),
            request_id=request.request_id,
            name=request.name,
            files=[from_message(file, BlobFile) for file in request.files],
            config=request.config,
        )
        return model_pb2.CreateModelResponse(model=to_message(record, model_pb2.Model))

    async def FinalizeModel(
        self, request: model_pb2.FinalizeModelRequest, context: Any
    ) -> model_pb2.FinalizeModelResponse:
        record = await self._models.finalize(caller(), request.model_id)
        return model_pb2.FinalizeModelResponse(model=to_message(record, model_pb2.Model))

    async def GetModel(self, request: model_pb2.GetModelRequest, context: Any) -> model_pb2.GetModelResponse:
        record = await self._models.get(caller(), request.name)
        return model_pb2.GetModelResponse(model=to_message(record, model_pb2.Model))

    async def ListModels(self, request: model_pb2.ListModelsRequest, context: Any) -> model_pb2.ListModelsResponse:
        records, token = await self._models.list(caller(), page_size=request.page_size, page_token=request.page_token)
        messages = (to_message(record, model_pb2.Model) for record in records)
        return model_pb2.ListModelsResponse(models=messages, next_page_token=token)

    async def DeleteModel(self, request: model_pb2.DeleteModelRequest, context: Any) -> model_pb2.DeleteModelResponse:
        await self._models.delete(caller(), request.name)
        return model_pb2.DeleteModelResponse()


class NodeServicer(node_pb2_grpc.NodeServiceServicer):
    """Describes the machine."""

    def __init__(self, node: NodeFacts) -> None:
        self._node = node

    async def GetNode(self, request: node_pb2.GetNodeRequest, context: Any) -> node_pb2.GetNodeResponse:
        return node_pb2.GetNodeResponse(node=to_message(await self._node.describe(caller()), node_pb2.Node))

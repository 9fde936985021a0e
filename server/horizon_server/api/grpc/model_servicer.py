"""ModelService on the wire: a thin layer over `models.service` and `blobs.uploads`."""

from __future__ import annotations

from typing import Any

from horizon_proto.v1 import model_pb2, model_pb2_grpc
from horizon_server.api.grpc.interceptor import caller
from horizon_server.api.grpc.wire_blob import find_missing, from_files, query_status, to_files, write_blob
from horizon_server.api.grpc.wire_time import to_timestamp
from horizon_server.blobs.uploads import Uploads
from horizon_server.records.model import ModelRecord
from horizon_server.services.models import ModelService


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """Takes, lists and deletes model folders."""

    def __init__(self, models: ModelService, uploads: Uploads) -> None:
        self._models = models
        self._uploads = uploads

    async def CreateModel(self, request: model_pb2.CreateModelRequest, context: Any) -> model_pb2.CreateModelResponse:
        record = await self._models.create(
            caller(), request_id=request.request_id, name=request.name, files=from_files(request.files)
        )
        return model_pb2.CreateModelResponse(model=to_model(record))

    async def FindMissingModelBlobs(
        self, request: model_pb2.FindMissingModelBlobsRequest, context: Any
    ) -> model_pb2.FindMissingModelBlobsResponse:
        return model_pb2.FindMissingModelBlobsResponse(missing=await find_missing(self._uploads, request.blobs))

    async def WriteModelBlob(self, request_iterator: Any, context: Any) -> model_pb2.WriteModelBlobResponse:
        chunks = (request.chunk async for request in request_iterator)
        return model_pb2.WriteModelBlobResponse(status=await write_blob(self._uploads, chunks))

    async def QueryModelBlobStatus(
        self, request: model_pb2.QueryModelBlobStatusRequest, context: Any
    ) -> model_pb2.QueryModelBlobStatusResponse:
        return model_pb2.QueryModelBlobStatusResponse(status=await query_status(self._uploads, request.blob))

    async def FinalizeModel(
        self, request: model_pb2.FinalizeModelRequest, context: Any
    ) -> model_pb2.FinalizeModelResponse:
        return model_pb2.FinalizeModelResponse(model=to_model(await self._models.finalize(caller(), request.model_id)))

    async def GetModel(self, request: model_pb2.GetModelRequest, context: Any) -> model_pb2.GetModelResponse:
        return model_pb2.GetModelResponse(model=to_model(await self._models.get(caller(), request.name)))

    async def ListModels(self, request: model_pb2.ListModelsRequest, context: Any) -> model_pb2.ListModelsResponse:
        records, token = await self._models.list(caller(), page_size=request.page_size, page_token=request.page_token)
        return model_pb2.ListModelsResponse(models=map(to_model, records), next_page_token=token)

    async def DeleteModel(self, request: model_pb2.DeleteModelRequest, context: Any) -> model_pb2.DeleteModelResponse:
        await self._models.delete(caller(), request.name)
        return model_pb2.DeleteModelResponse()


def to_model(record: ModelRecord) -> model_pb2.Model:
    """Return a model for an answer."""
    return model_pb2.Model(
        model_id=record.model_id,
        name=record.name,
        owner=record.owner,
        files=to_files(record.files),
        state=model_pb2.MODEL_STATE_READY if record.ready else model_pb2.MODEL_STATE_UPLOADING,
        architecture=record.architecture,
        num_parameters=record.num_parameters,
        size_bytes=record.size_bytes,
        create_time=to_timestamp(record.created_s),
        digest=record.digest,
    )

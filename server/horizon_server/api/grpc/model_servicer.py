"""ModelService on the wire: a thin layer over `services.models`."""

from __future__ import annotations

from typing import Any

from horizon_proto.v1 import model_pb2, model_pb2_grpc
from horizon_server.api.grpc.convert import from_message, to_message
from horizon_server.api.grpc.interceptor import caller
from horizon_server.records.blob import BlobFile
from horizon_server.records.pushed import ModelRecord
from horizon_server.services.models import ModelService


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
        return model_pb2.CreateModelResponse(model=_model(record))

    async def FinalizeModel(
        self, request: model_pb2.FinalizeModelRequest, context: Any
    ) -> model_pb2.FinalizeModelResponse:
        return model_pb2.FinalizeModelResponse(model=_model(await self._models.finalize(caller(), request.model_id)))

    async def GetModel(self, request: model_pb2.GetModelRequest, context: Any) -> model_pb2.GetModelResponse:
        return model_pb2.GetModelResponse(model=_model(await self._models.get(caller(), request.name)))

    async def ListModels(self, request: model_pb2.ListModelsRequest, context: Any) -> model_pb2.ListModelsResponse:
        records, token = await self._models.list(caller(), page_size=request.page_size, page_token=request.page_token)
        return model_pb2.ListModelsResponse(models=map(_model, records), next_page_token=token)

    async def DeleteModel(self, request: model_pb2.DeleteModelRequest, context: Any) -> model_pb2.DeleteModelResponse:
        await self._models.delete(caller(), request.name)
        return model_pb2.DeleteModelResponse()


def _model(record: ModelRecord) -> model_pb2.Model:
    return to_message(record, model_pb2.Model)

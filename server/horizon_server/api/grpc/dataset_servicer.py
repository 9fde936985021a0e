"""DatasetService on the wire: a thin layer over `services.datasets` and `services.previews`."""

from __future__ import annotations

from typing import Any

from horizon_proto.v1 import dataset_pb2, dataset_pb2_grpc
from horizon_server.api.grpc.convert import enum_text, from_message, set_fields, to_message
from horizon_server.api.grpc.interceptor import caller
from horizon_server.datasets.preview.request import PreviewOptions
from horizon_server.records.blob import BlobFile
from horizon_server.records.pushed import DatasetRecord
from horizon_server.services.datasets import DatasetService
from horizon_server.services.previews import Previews

_AUTO = "auto"


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
            format=enum_text(dataset_pb2.DatasetFormat.DESCRIPTOR, request.format) if request.format else _AUTO,
            field_map=dict(request.field_map),
            files=[from_message(file, BlobFile) for file in request.files],
        )
        return dataset_pb2.CreateDatasetResponse(dataset=_dataset(record))

    async def FinalizeDataset(
        self, request: dataset_pb2.FinalizeDatasetRequest, context: Any
    ) -> dataset_pb2.FinalizeDatasetResponse:
        record = await self._datasets.finalize(caller(), request.dataset_id)
        return dataset_pb2.FinalizeDatasetResponse(dataset=_dataset(record))

    async def GetDataset(self, request: dataset_pb2.GetDatasetRequest, context: Any) -> dataset_pb2.GetDatasetResponse:
        return dataset_pb2.GetDatasetResponse(dataset=_dataset(await self._datasets.get(caller(), request.name)))

    async def ListDatasets(
        self, request: dataset_pb2.ListDatasetsRequest, context: Any
    ) -> dataset_pb2.ListDatasetsResponse:
        records, token = await self._datasets.list(caller(), page_size=request.page_size, page_token=request.page_token)
        return dataset_pb2.ListDatasetsResponse(datasets=map(_dataset, records), next_page_token=token)

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
        # The options that the rows were rendered with; among them the number of rows that were asked for, not of the dataset.
        answer.MergeFrom(to_message(preview.options, dataset_pb2.PreviewDatasetResponse, num_rows=preview.num_rows))
        return answer


def _dataset(record: DatasetRecord) -> dataset_pb2.Dataset:
    return to_message(record, dataset_pb2.Dataset)

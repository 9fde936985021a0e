"""DatasetService on the wire: a thin layer over `datasets.service` and `blobs.uploads`."""

# ruff: noqa: D102, N802  # the contract names and documents the calls
from __future__ import annotations

from typing import Any

from horizon_proto.v1 import dataset_pb2, dataset_pb2_grpc
from horizon_server.api.grpc.interceptor import caller
from horizon_server.api.grpc.wire_blob import find_missing, from_files, query_status, to_files, write_blob
from horizon_server.api.grpc.wire_preview import from_preview, preview_options
from horizon_server.api.grpc.wire_time import to_timestamp
from horizon_server.blobs.uploads import Uploads
from horizon_server.errors import InvalidSpec
from horizon_server.records.dataset import DatasetRecord
from horizon_server.services.datasets import DatasetService
from horizon_server.services.previews import Previews

_AUTO = "auto"


class DatasetServicer(dataset_pb2_grpc.DatasetServiceServicer):
    """Takes, lists, shows and deletes datasets."""

    def __init__(self, datasets: DatasetService, previews: Previews, uploads: Uploads) -> None:
        self._datasets = datasets
        self._previews = previews
        self._uploads = uploads

    async def CreateDataset(
        self, request: dataset_pb2.CreateDatasetRequest, context: Any
    ) -> dataset_pb2.CreateDatasetResponse:
        record = await self._datasets.create(
            caller(),
            request_id=request.request_id,
            name=request.name,
            format=_from_format(request.format),
            field_map=dict(request.field_map),
            files=from_files(request.files),
        )
        return dataset_pb2.CreateDatasetResponse(dataset=to_dataset(record))

    async def FindMissingBlobs(
        self, request: dataset_pb2.FindMissingBlobsRequest, context: Any
    ) -> dataset_pb2.FindMissingBlobsResponse:
        return dataset_pb2.FindMissingBlobsResponse(missing=await find_missing(self._uploads, request.blobs))

    async def WriteBlob(self, request_iterator: Any, context: Any) -> dataset_pb2.WriteBlobResponse:
        chunks = (request.chunk async for request in request_iterator)
        return dataset_pb2.WriteBlobResponse(status=await write_blob(self._uploads, chunks))

    async def QueryBlobStatus(
        self, request: dataset_pb2.QueryBlobStatusRequest, context: Any
    ) -> dataset_pb2.QueryBlobStatusResponse:
        return dataset_pb2.QueryBlobStatusResponse(status=await query_status(self._uploads, request.blob))

    async def FinalizeDataset(
        self, request: dataset_pb2.FinalizeDatasetRequest, context: Any
    ) -> dataset_pb2.FinalizeDatasetResponse:
        record = await self._datasets.finalize(caller(), request.dataset_id)
        return dataset_pb2.FinalizeDatasetResponse(dataset=to_dataset(record))

    async def GetDataset(self, request: dataset_pb2.GetDatasetRequest, context: Any) -> dataset_pb2.GetDatasetResponse:
        return dataset_pb2.GetDatasetResponse(dataset=to_dataset(await self._datasets.get(caller(), request.name)))

    async def ListDatasets(
        self, request: dataset_pb2.ListDatasetsRequest, context: Any
    ) -> dataset_pb2.ListDatasetsResponse:
        records, token = await self._datasets.list(caller(), page_size=request.page_size, page_token=request.page_token)
        return dataset_pb2.ListDatasetsResponse(datasets=map(to_dataset, records), next_page_token=token)

    async def DeleteDataset(
        self, request: dataset_pb2.DeleteDatasetRequest, context: Any
    ) -> dataset_pb2.DeleteDatasetResponse:
        await self._datasets.delete(caller(), request.name)
        return dataset_pb2.DeleteDatasetResponse()

    async def PreviewDataset(
        self, request: dataset_pb2.PreviewDatasetRequest, context: Any
    ) -> dataset_pb2.PreviewDatasetResponse:
        options = preview_options(request)
        preview = await self._previews.preview(caller(), request.name, request.model, options)
        return from_preview(preview, format=_to_format(preview.format))


def to_dataset(record: DatasetRecord) -> dataset_pb2.Dataset:
    """Return a dataset for an answer."""
    return dataset_pb2.Dataset(
        dataset_id=record.dataset_id,
        name=record.name,
        owner=record.owner,
        format=_to_format(record.format),
        field_map=record.field_map,
        files=to_files(record.files),
        state=dataset_pb2.DATASET_STATE_READY if record.ready else dataset_pb2.DATASET_STATE_UPLOADING,
        num_rows=record.num_rows,
        size_bytes=record.size_bytes,
        create_time=to_timestamp(record.created_s),
        digest=record.digest,
    )


def _to_format(name: str) -> dataset_pb2.DatasetFormat.ValueType:
    return dataset_pb2.DatasetFormat.Value("DATASET_FORMAT_" + name.upper().replace("-", "_"))


def _from_format(number: dataset_pb2.DatasetFormat.ValueType) -> str:
    """Return the format's name as people write it: prompt-completion."""
    if number == dataset_pb2.DATASET_FORMAT_UNSPECIFIED:
        return _AUTO
    if number not in dataset_pb2.DatasetFormat.values():
        sentence = f"format {number} is not known to this daemon; it is older than the client: upgrade it"
        raise InvalidSpec.of("format", sentence)
    name = dataset_pb2.DatasetFormat.Name(number)
    return name.removeprefix("DATASET_FORMAT_").lower().replace("_", "-")

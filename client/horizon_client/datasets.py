"""`client.datasets`: push, list, get, delete and preview datasets."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from horizon_client.blob_upload import BlobUpload
from horizon_client.connection import FINALIZE_DEADLINE_S, PREVIEW_DEADLINE_S, Connection
from horizon_client.conversion import from_message
from horizon_client.dataset_files import check_dataset_files, dataset_sources
from horizon_client.errors import InvalidRequest, Violation
from horizon_client.job_spec import enum_choices
from horizon_client.local_files import HashedFile, hash_files
from horizon_client.paging import all_pages
from horizon_client.progress import OnNotice, OnProgress, Progress, ignore_notice, ignore_progress
from horizon_client.resources import Dataset, DatasetPreview, DatasetPush
from horizon_proto.v1 import blob_pb2, dataset_pb2, job_pb2
from horizon_proto.v1.dataset_pb2_grpc import DatasetServiceStub

if TYPE_CHECKING:
    from horizon_proto.v1.dataset_pb2_grpc import DatasetServiceAsyncStub


class AsyncDatasets:
    """The caller's datasets."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def push(
        self,
        files: Sequence[str | os.PathLike[str]],
        *,
        name: str,
        format: str = "auto",  # noqa: A002 - the name users know from the command and the contract
        field_map: Mapping[str, str] | None = None,
        request_id: str | None = None,
        on_progress: OnProgress = ignore_progress,
        on_notice: OnNotice = ignore_notice,
    ) -> DatasetPush:
        """Push local data files as dataset `name`; what the server has already does not travel again.

        Raises:
            BadFile: naming file and line, when a file is unusable; nothing is sent then.
            InvalidRequest: with one violation a line, when the server refuses rows.
            HorizonClientError: whatever else the server answers.
        """
        wire_format = _enum_number(dataset_pb2.DatasetFormat, "format", format)
        sources = dataset_sources(files, on_notice)
        await check_dataset_files(sources, on_progress, format=format, field_map=field_map)
        hashed = await hash_files(sources, on_progress)
        return await self.push_hashed(
            hashed,
            name=name,
            wire_format=wire_format,
            field_map=field_map,
            request_id=request_id,
            on_progress=on_progress,
            on_notice=on_notice,
        )

    async def push_hashed(
        self,
        files: Sequence[HashedFile],
        *,
        name: str,
        wire_format: dataset_pb2.DatasetFormat.ValueType = dataset_pb2.DATASET_FORMAT_AUTO,
        field_map: Mapping[str, str] | None = None,
        request_id: str | None = None,
        on_progress: OnProgress = ignore_progress,
        on_notice: OnNotice = ignore_notice,
    ) -> DatasetPush:
        """Push files that were checked and hashed before."""
        request = dataset_pb2.CreateDatasetRequest(
            request_id=request_id or str(uuid.uuid4()),
            name=name,
            format=wire_format,
            field_map=dict(field_map or {}),
            files=[blob_pb2.FileEntry(path=f.file.path, sha256=f.sha256, size_bytes=f.file.size_bytes) for f in files],
        )
        stub = self._stub()
        created = (await self._connection.unary(stub.CreateDataset, request)).dataset
        if created.state == dataset_pb2.DATASET_STATE_READY:
            return DatasetPush(dataset=from_message(Dataset, created), sent_bytes=0)
        upload = BlobUpload(
            self._connection, _DatasetBlobs(self._connection), on_progress=on_progress, on_notice=on_notice
        )
        sent_bytes = await upload.send_missing(files)
        on_progress(Progress(phase="finalize", name=name, done_bytes=0, total_bytes=0))
        finalized = await self._connection.unary(
            stub.FinalizeDataset,
            dataset_pb2.FinalizeDatasetRequest(dataset_id=created.dataset_id),
            deadline_s=FINALIZE_DEADLINE_S,
            retry=self._connection.stream_retry,
        )
        return DatasetPush(dataset=from_message(Dataset, finalized.dataset), sent_bytes=sent_bytes)

    async def get(self, name: str) -> Dataset:
        """Return one dataset by name or id."""
        request = dataset_pb2.GetDatasetRequest(name=name)
        return from_message(Dataset, (await self._connection.unary(self._stub().GetDataset, request)).dataset)

    async def delete(self, name: str) -> None:
        """Delete a dataset that no job still needs."""
        request = dataset_pb2.DeleteDatasetRequest(name=name)
        await self._connection.unary(self._stub().DeleteDataset, request, idempotent=False)

    async def preview(
        self,
        name: str,
        *,
        model: str,
        num_rows: int = 3,
        offset: int = 0,
        train_on: str = "assistant",
        method: str = "sft",
        sequence_length: int = 1024,
    ) -> DatasetPreview:
        """Return rows as `model` would see them in a job with these options, with the trained part marked.

        `offset` rows are passed over first, counted over all files.

        Raises:
            InvalidRequest: for options out of range, and when the model cannot render the dataset.
            NotFound: when there is no such dataset or model.
            DeadlineExceeded: when rendering takes too long.
        """
        request = dataset_pb2.PreviewDatasetRequest(
            name=name,
            model=model,
            num_rows=_in_range("num_rows", num_rows, 1),
            offset=_in_range("offset", offset, 0),
            train_on=_enum_number(job_pb2.TrainOn, "train_on", train_on),
            method=_enum_number(job_pb2.Method, "method", method),
            sequence_length=_in_range("sequence_length", sequence_length, 1),
        )
        answer = await self._connection.unary(self._stub().PreviewDataset, request, deadline_s=PREVIEW_DEADLINE_S)
        return from_message(DatasetPreview, answer)

    async def list(self, *, limit: int | None = None) -> list[Dataset]:
        """Return the caller's datasets, newest first; all of them, or at most `limit`."""
        stub = self._stub()

        async def page(token: str, size: int) -> tuple[Sequence[dataset_pb2.Dataset], str]:
            request = dataset_pb2.ListDatasetsRequest(page_size=size, page_token=token)
            answer = await self._connection.unary(stub.ListDatasets, request)
            return answer.datasets, answer.next_page_token

        return [from_message(Dataset, item) for item in await all_pages(page, limit)]

    def _stub(self) -> DatasetServiceAsyncStub:
        return cast("DatasetServiceAsyncStub", self._connection.stub(DatasetServiceStub))


class _DatasetBlobs:
    """The blob calls of DatasetService."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._stub = cast("DatasetServiceAsyncStub", connection.stub(DatasetServiceStub))

    async def find_missing(self, blobs: Sequence[blob_pb2.BlobRef]) -> list[blob_pb2.BlobStatus]:
        request = dataset_pb2.FindMissingBlobsRequest(blobs=blobs)
        return list((await self._connection.unary(self._stub.FindMissingBlobs, request)).missing)

    async def query(self, blob: blob_pb2.BlobRef) -> blob_pb2.BlobStatus:
        request = dataset_pb2.QueryBlobStatusRequest(blob=blob)
        answer = await self._connection.unary(self._stub.QueryBlobStatus, request, retry=self._connection.stream_retry)
        return answer.status

    def open_write(self) -> Any:
        writer: Any = self._stub.WriteBlob  # the stubs do not know that the requests may be written one by one
        return writer(metadata=self._connection.metadata)

    def write_request(self) -> dataset_pb2.WriteBlobRequest:
        return dataset_pb2.WriteBlobRequest()


def _enum_number(enum: Any, field: str, text: str) -> Any:
    """Return the number of an enumeration's value as users write it: `prompt-completion`."""
    choices = enum_choices(enum.DESCRIPTOR)
    if text not in choices:
        raise _invalid(field, f"{field} is {text!r}; it must be one of {', '.join(choices)}")
    return choices[text]


def _in_range(field: str, number: int, least: int) -> int:
    """Refuse what the wire would take for "not given", or cannot carry; the server knows the upper bounds."""
    if not least <= number < 2**31:
        raise _invalid(field, f"{field} is {number}; it must be {least} or more")
    return number


def _invalid(field: str, problem: str) -> InvalidRequest:
    return InvalidRequest(problem, violations=[Violation(field=field, description=problem)])

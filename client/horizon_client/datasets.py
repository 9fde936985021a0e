"""`client.datasets`: push, list, get, delete and preview datasets."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from horizon_client.connection import FINALIZE_DEADLINE_S, PREVIEW_DEADLINE_S, Connection, all_pages
from horizon_client.conversion import from_message
from horizon_client.dataset_files import check_dataset_files, dataset_sources
from horizon_client.errors import FieldViolation, InvalidRequest, NotFound
from horizon_client.job_spec import enum_choices
from horizon_client.models import AsyncModels
from horizon_client.near_names import suggested
from horizon_client.resources import Dataset, DatasetPreview, DatasetPush
from horizon_client.transfer.files import HashedFile, hash_files
from horizon_client.transfer.reporter import SILENT, Progress, Reporter
from horizon_client.transfer.upload import BlobUpload
from horizon_proto.v1 import blob_pb2, dataset_pb2, job_pb2
from horizon_proto.v1.dataset_pb2_grpc import DatasetServiceStub

if TYPE_CHECKING:
    from horizon_proto.v1.dataset_pb2_grpc import DatasetServiceAsyncStub


class AsyncDatasets:
    """`client.datasets`: the caller's datasets."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def push(
        self,
        files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        name: str,
        format: str = "auto",  # noqa: A002 - the name users know from the command and the contract
        field_map: Mapping[str, str] | None = None,
        request_id: str | None = None,
        reporter: Reporter = SILENT,
    ) -> DatasetPush:
        """Push one or several local data files or folders as dataset `name`; content that the server has is not sent again.

        Raises:
            BadFile: naming file and line, when a file is unusable; nothing is sent then.
            InvalidRequest: with one violation per line, when the server refuses rows.
        """
        number = _enum_number(dataset_pb2.DatasetFormat, "format", format)
        sources = dataset_sources(files, reporter)
        await check_dataset_files(sources, reporter.progress, format=format, field_map=field_map)
        request = dataset_pb2.CreateDatasetRequest(
            request_id=request_id or str(uuid.uuid4()), name=name, format=number, field_map=dict(field_map or {})
        )
        return await push_dataset(self._connection, request, await hash_files(sources, reporter), reporter)

    async def get(self, name: str) -> Dataset:
        """Return one dataset by name or id.

        Raises:
            NotFound: with similar names, when there is no such dataset.
        """
        request = dataset_pb2.GetDatasetRequest(name=name)
        try:
            answer = await self._connection.unary(_stub(self._connection).GetDataset, request)
        except NotFound as problem:
            raise await suggested(problem, "dataset", name, self.names) from None
        return from_message(Dataset, answer.dataset)

    async def delete(self, name: str) -> None:
        """Delete a dataset that no active job needs."""
        request = dataset_pb2.DeleteDatasetRequest(name=name)
        await self._connection.unary(_stub(self._connection).DeleteDataset, request, idempotent=False)

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
        """Return rows as `model` sees them in a job with these options, with the trained part marked.

        `offset` is the number of rows to skip, counted over all files.

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
        call = _stub(self._connection).PreviewDataset
        try:
            answer = await self._connection.unary(call, request, deadline_s=PREVIEW_DEADLINE_S)
        except NotFound as problem:
            if problem.message.startswith("model "):
                raise await suggested(problem, "model", model, AsyncModels(self._connection).names) from None
            raise await suggested(problem, "dataset", name, self.names) from None
        return from_message(DatasetPreview, answer)

    async def list(self, *, limit: int | None = None) -> list[Dataset]:
        """Return the caller's datasets, newest first; all of them, or at most `limit`."""

        async def page(token: str, size: int) -> tuple[Sequence[dataset_pb2.Dataset], str]:
            request = dataset_pb2.ListDatasetsRequest(page_size=size, page_token=token)
            answer = await self._connection.unary(_stub(self._connection).ListDatasets, request)
            return answer.datasets, answer.next_page_token

        return [from_message(Dataset, item) for item in await all_pages(page, limit)]

    async def names(self) -> Iterable[str]:
        """Return the names of the caller's datasets, newest first."""
        return [dataset.name for dataset in await self.list(limit=1000)]


async def push_dataset(
    connection: Connection,
    request: dataset_pb2.CreateDatasetRequest,
    files: Sequence[HashedFile],
    reporter: Reporter,
) -> DatasetPush:
    """Create the dataset that `request` describes from `files`: announce them, send what is missing, finalize."""
    stub = _stub(connection)
    request.files.extend(
        blob_pb2.FileEntry(path=f.file.path, sha256=f.sha256, size_bytes=f.file.size_bytes) for f in files
    )
    created = (await connection.unary(stub.CreateDataset, request)).dataset
    if created.state == dataset_pb2.DATASET_STATE_READY:
        return DatasetPush(dataset=from_message(Dataset, created), sent_bytes=0)
    sent_bytes = await BlobUpload(connection, reporter).send_missing(files)
    reporter.progress(Progress(phase="finalize", name=request.name, done_bytes=0, total_bytes=0))
    finalized = await connection.unary(
        stub.FinalizeDataset,
        dataset_pb2.FinalizeDatasetRequest(dataset_id=created.dataset_id),
        deadline_s=FINALIZE_DEADLINE_S,
        retry=connection.stream_retry,
    )
    return DatasetPush(dataset=from_message(Dataset, finalized.dataset), sent_bytes=sent_bytes)


def _stub(connection: Connection) -> DatasetServiceAsyncStub:
    return cast("DatasetServiceAsyncStub", connection.stub(DatasetServiceStub))


def _enum_number(enum: Any, field: str, text: str) -> Any:
    """Return the number of an enumeration's value as users write it: `prompt-completion`."""
    choices = enum_choices(enum.DESCRIPTOR)
    if text not in choices:
        raise _invalid(field, f"{field} is {text!r}; it must be one of {', '.join(choices)}")
    return choices[text]


def _in_range(field: str, number: int, least: int) -> int:
    """Refuse what means "not given" on the wire, or does not fit into it; the server checks the upper limits."""
    if not least <= number < 2**31:
        raise _invalid(field, f"{field} is {number}; it must be {least} or more")
    return number


def _invalid(field: str, problem: str) -> InvalidRequest:
    return InvalidRequest(problem, violations=[FieldViolation(field=field, description=problem)])

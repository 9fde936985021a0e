"""`client.datasets`: push, list, get, delete and preview datasets."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from horizon_client.connection import PREVIEW_DEADLINE_S, Connection
from horizon_client.conversion import from_message
from horizon_client.dataset_files import check_dataset_files, dataset_sources
from horizon_client.errors import FieldViolation, InvalidRequest, NotFound, suggested
from horizon_client.job_spec import enum_choices
from horizon_client.models import AsyncModels
from horizon_client.resources import Dataset, DatasetPreview, DatasetPush
from horizon_client.transfer.files import HashedFile, hash_files
from horizon_client.transfer.reporter import SILENT, Reporter
from horizon_client.transfer.upload import push_files
from horizon_proto.v1 import dataset_pb2, job_pb2


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
            request_id=request_id or "", name=name, format=number, field_map=field_map
        )
        return await push_dataset(self._connection, request, await hash_files(sources, reporter), reporter)

    async def get(self, name: str) -> Dataset:
        """Return one dataset by name or id.

        Raises:
            NotFound: with similar names, when there is no such dataset.
        """
        request = dataset_pb2.GetDatasetRequest(name=name)
        try:
            answer = await self._connection.unary(self._connection.calls.datasets.GetDataset, request)
        except NotFound as problem:
            raise await suggested(problem, "dataset", name, self.names) from None
        return from_message(Dataset, answer.dataset)

    async def delete(self, name: str) -> None:
        """Delete a dataset that no active job needs."""
        request = dataset_pb2.DeleteDatasetRequest(name=name)
        await self._connection.unary(self._connection.calls.datasets.DeleteDataset, request, idempotent=False)

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
        call = self._connection.calls.datasets.PreviewDataset
        try:
            answer = await self._connection.unary(call, request, deadline_s=PREVIEW_DEADLINE_S)
        except NotFound as problem:
            if problem.message.startswith("model "):
                raise await suggested(problem, "model", model, AsyncModels(self._connection).names) from None
            raise await suggested(problem, "dataset", name, self.names) from None
        return from_message(DatasetPreview, answer)

    async def list(self, *, limit: int | None = None) -> list[Dataset]:
        """Return the caller's datasets, newest first; all of them, or at most `limit`."""
        call, request = self._connection.calls.datasets.ListDatasets, dataset_pb2.ListDatasetsRequest()
        found = await self._connection.all_pages(call, request, lambda answer: answer.datasets, limit)
        return [from_message(Dataset, item) for item in found]

    async def names(self) -> Iterable[str]:
        """Return the names of the caller's datasets, newest first."""
        return [dataset.name for dataset in await self.list(limit=1000)]


async def push_dataset(
    connection: Connection, request: dataset_pb2.CreateDatasetRequest, files: Sequence[HashedFile], reporter: Reporter
) -> DatasetPush:
    """Create the dataset that `request` describes from `files`: announce them, send what is missing, finalize."""
    stub = connection.calls.datasets
    dataset, sent_bytes = await push_files(
        connection,
        files,
        reporter,
        request=request,
        create=stub.CreateDataset,
        finalize=stub.FinalizeDataset,
        to_finalize=lambda created: dataset_pb2.FinalizeDatasetRequest(dataset_id=created.dataset_id),
        read=lambda answer: from_message(Dataset, answer.dataset),
    )
    return DatasetPush(dataset=dataset, sent_bytes=sent_bytes)


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

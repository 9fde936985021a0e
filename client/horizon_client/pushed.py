"""`client.datasets` and `client.models`: push, list, get and delete what jobs are made from."""

from __future__ import annotations

import asyncio
import hashlib
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from horizon_client.connection import FINALIZE_DEADLINE_S, PREVIEW_DEADLINE_S, Connection
from horizon_client.conversion import enum_number, from_message
from horizon_client.errors import AlreadyExists, InvalidRequest, NotFound, suggested
from horizon_client.local_files import (
    MAX_NAME,
    HashedFile,
    Sources,
    check_dataset_files,
    dataset_sources,
    hash_files,
    links_outside,
    model_files,
    valid_name,
)
from horizon_client.memory_data import DataLike, as_file, is_in_memory
from horizon_client.notebook import Listing
from horizon_client.reporter import SILENT, Progress, Reporter
from horizon_client.resources import Dataset, DatasetPreview, Model
from horizon_client.upload import BlobUpload
from horizon_proto.v1 import blob_pb2, dataset_pb2, job_pb2, model_pb2

ItemT = TypeVar("ItemT", Dataset, Model)

_MAX_ANNOUNCED_CONFIG_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class DatasetPush:
    """A finished push. `sent_bytes` is 0 when the server already had all of it."""

    dataset: Dataset
    sent_bytes: int


@dataclass(frozen=True, kw_only=True)
class ModelPush:
    """A finished push. `sent_bytes` is 0 when the server already had all of it."""

    model: Model
    sent_bytes: int


class AsyncPushed(ABC, Generic[ItemT]):
    """What `client.datasets` and `client.models` share: the calls of their services differ in the noun only."""

    _kind: type[ItemT]
    _messages: ModuleType
    _digest_head: tuple[str, ...] = ()

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._noun = self._kind.__name__.lower()

    async def get(self, name: str) -> ItemT:
        """Return one by name or id.

        Raises:
            NotFound: with similar names, when there is none.
        """
        try:
            return self._item(await self._connection.unary(*self._rpc("Get", name=name)))
        except NotFound as problem:
            raise await suggested(problem, {self._noun: self.names}) from None

    async def delete(self, name: str) -> None:
        """Delete one that no active job needs."""
        await self._connection.unary(*self._rpc("Delete", name=name), repeatable=False)

    async def names(self) -> Iterable[str]:
        """Return all names, newest first."""
        return [item.name for item in await self.list(limit=1000)]

    async def list(self, *, limit: int | None = None) -> list[ItemT]:
        """Return all of them, newest first, or at most `limit`."""
        found = await self._connection.all_pages(*self._rpc("List", "s"), items=f"{self._noun}s", limit=limit)
        return Listing(from_message(self._kind, item) for item in found)

    def _rpc(self, verb: str, ending: str = "", **fields: Any) -> tuple[Any, Any]:
        """Return a call of the service, such as GetDataset, and its request."""
        name = f"{verb}{self._kind.__name__}{ending}"
        request = getattr(self._messages, f"{name}Request")(**fields)
        return getattr(getattr(self._connection.calls, f"{self._noun}s"), name), request

    def _item(self, answer: Any) -> ItemT:
        return from_message(self._kind, getattr(answer, self._noun))

    @abstractmethod
    async def _read(
        self, sources: Any, reporter: Reporter, **options: Any
    ) -> tuple[Sequence[HashedFile], dict[str, Any]]:
        """Check and hash local files; return them, and what is announced with them."""

    async def _push(self, files: Sequence[HashedFile], reporter: Reporter, **announced: Any) -> tuple[ItemT, int]:
        """Announce the files, send what is missing, finalize; return what they have become and the number of bytes
        sent."""
        create, request = self._rpc("Create", **announced)
        request.request_id = request.request_id or str(uuid.uuid4())
        request.files.extend(
            blob_pb2.FileEntry(path=file.path, sha256=file.sha256, size_bytes=file.size_bytes) for file in files
        )
        created = self._item(await self._connection.unary(create, request))
        if created.state == "READY":  # the same push has finished before
            return created, 0
        sent_bytes = await BlobUpload(self._connection, reporter).send_missing(files)
        reporter.progress(Progress(phase="finalize", name=request.name, done_bytes=0, total_bytes=0))
        key = f"{self._noun}_id"
        # Retried as long as a transfer, because a restart of the daemon at this moment must not waste the upload
        finalized = await self._connection.unary(
            *self._rpc("Finalize", **{key: getattr(created, key)}),
            deadline_s=FINALIZE_DEADLINE_S,
            retry=self._connection.stream_retry,
        )
        return self._item(finalized), sent_bytes


async def push_under_free_name(
    kind: AsyncPushed[Any], sources: Sequence[Path], reporter: Reporter, **options: Mapping[str, str] | str
) -> str:
    """Push under the source's name without its endings, with part of the content's hash appended where that name is
    taken.

    `options` are those of `_read`.
    """
    files, announced = await kind._read(sources, reporter, **options)
    name = valid_name(sources[0])
    try:
        # The same content under this name is not an error, it is the same dataset or model
        item, _ = await kind._push(files, reporter, name=name, **announced)
    except AlreadyExists:
        # Over the paths and contents, so that another push of the same files gets the same name
        lines = sorted(f"{file.path}\0{file.sha256}" for file in files)
        pairs = [value.items() if isinstance(value, Mapping) else [(name, value)] for name, value in options.items()]
        lines += sorted(f"{name}\0{value}" for some in pairs for name, value in some)
        digest = hashlib.sha256("\n".join([*kind._digest_head, *lines]).encode()).hexdigest()
        item, _ = await kind._push(files, reporter, name=f"{name[: MAX_NAME - 9]}-{digest[:8]}", **announced)
    return str(item.name)


class AsyncModels(AsyncPushed[Model]):
    """`client.models`: the caller's models."""

    _kind = Model
    _messages = model_pb2

    async def push(
        self, folder: str | os.PathLike[str], *, name: str, request_id: str | None = None, reporter: Reporter = SILENT
    ) -> ModelPush:
        """Push a local model folder as model `name`: config, tokenizer and safetensors only.

        Raises:
            BadFile: naming the file, when the folder is not a complete safetensors model; nothing is sent then.
        """
        files, announced = await self._read([folder], reporter)
        model, sent_bytes = await self._push(files, reporter, name=name, request_id=request_id or "", **announced)
        return ModelPush(model=model, sent_bytes=sent_bytes)

    async def _read(
        self, sources: Sequence[str | os.PathLike[str]], reporter: Reporter, **options: Any
    ) -> tuple[Sequence[HashedFile], dict[str, Any]]:
        found = await asyncio.to_thread(model_files, sources[0])
        if notice := links_outside(sources[0], found):
            reporter.notice(notice)
        files = await hash_files(found, reporter)
        # An adapter has none; its own config is checked when it has arrived
        config = next((file for file in files if file.path == "config.json"), None)
        if config is None or config.size_bytes > _MAX_ANNOUNCED_CONFIG_BYTES:
            return files, {}
        # The server judges the config before anything is sent
        return files, {"config": await asyncio.to_thread(config.source.read_bytes)}


class AsyncDatasets(AsyncPushed[Dataset]):
    """`client.datasets`: the caller's datasets."""

    _kind = Dataset
    _messages = dataset_pb2
    _digest_head = ("auto",)  # the format is part of what a dataset is

    async def push(
        self,
        data: DataLike,
        *,
        name: str,
        format: str = "auto",  # noqa: A002 - the name users know from the command and the contract
        field_map: Mapping[str, str] | None = None,
        request_id: str | None = None,
        reporter: Reporter = SILENT,
    ) -> DatasetPush:
        """Push local data files or folders, or rows in memory, as dataset `name`; content that the server has is not
        sent again.

        Rows are any iterable of dicts, a `datasets.Dataset`, a DataFrame of pandas or polars, or a pyarrow.Table. They
        are written to a temporary file first, row by row.

        Raises:
            BadFile: naming file and line, when a file is unusable; nothing is sent then.
            InvalidRequest: with one violation per line, when the server refuses rows; or naming the row in memory that
                JSON cannot write.
        """
        with ExitStack() as stack:
            files: Any = data
            if is_in_memory(data):
                files = await asyncio.to_thread(stack.enter_context, as_file(data, name))
            return await self._push_files(files, name, format, field_map, request_id or "", reporter)

    async def _push_files(
        self,
        files: Sources,
        name: str,
        row_format: str,
        field_map: Mapping[str, str] | None,
        request_id: str,
        reporter: Reporter,
    ) -> DatasetPush:
        hashed, announced = await self._read(files, reporter, row_format=row_format, field_map=field_map)
        dataset, sent_bytes = await self._push(hashed, reporter, name=name, request_id=request_id, **announced)
        return DatasetPush(dataset=dataset, sent_bytes=sent_bytes)

    async def _read(
        self,
        sources: Sources,
        reporter: Reporter,
        *,
        row_format: str = "auto",
        field_map: Mapping[str, str] | None = None,
        **options: Any,
    ) -> tuple[Sequence[HashedFile], dict[str, Any]]:
        number = enum_number(dataset_pb2.DatasetFormat, "format", row_format)
        found = dataset_sources(sources, reporter)
        await check_dataset_files(found, reporter.progress, format=row_format, field_map=field_map)
        return await hash_files(found, reporter), {"format": number, "field_map": field_map}

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
        for field, value, least in (
            ("num_rows", num_rows, 1),
            ("offset", offset, 0),
            ("sequence_length", sequence_length, 1),
        ):
            # What is less means "not given" on the wire; the server checks the upper limits
            if not least <= value < 2**31:
                raise InvalidRequest.of(field, f"{field} is {value}; it must be {least} or more")
        request = dataset_pb2.PreviewDatasetRequest(
            name=name,
            model=model,
            num_rows=num_rows,
            offset=offset,
            train_on=enum_number(job_pb2.TrainOn, "train_on", train_on),
            method=enum_number(job_pb2.Method, "method", method),
            sequence_length=sequence_length,
        )
        call = self._connection.calls.datasets.PreviewDataset
        try:
            answer = await self._connection.unary(call, request, deadline_s=PREVIEW_DEADLINE_S)
        except NotFound as problem:
            names_of = {"dataset": self.names, "model": AsyncModels(self._connection).names}
            raise await suggested(problem, names_of) from None
        return from_message(DatasetPreview, answer)

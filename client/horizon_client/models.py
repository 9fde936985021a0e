"""`client.models`: push, list, get and delete model folders."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence

from horizon_client.connection import Connection
from horizon_client.conversion import from_message
from horizon_client.errors import NotFound, suggested
from horizon_client.model_folder import model_files
from horizon_client.resources import Model, ModelPush
from horizon_client.transfer.files import HashedFile, hash_files
from horizon_client.transfer.reporter import SILENT, Reporter
from horizon_client.transfer.upload import push_files
from horizon_proto.v1 import model_pb2

_MAX_ANNOUNCED_CONFIG_BYTES = 2**20


class AsyncModels:
    """`client.models`: the caller's models."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def push(
        self, folder: str | os.PathLike[str], *, name: str, request_id: str | None = None, reporter: Reporter = SILENT
    ) -> ModelPush:
        """Push a local model folder as model `name`: config, tokenizer and safetensors only.

        Raises:
            BadFile: naming the file, when the folder is not a complete safetensors model; nothing is sent then.
        """
        files = await hash_files(await asyncio.to_thread(model_files, folder), reporter)
        request = model_pb2.CreateModelRequest(request_id=request_id or "", name=name)
        return await push_model(self._connection, request, files, reporter)

    async def get(self, name: str) -> Model:
        """Return one model by name or id.

        Raises:
            NotFound: with similar names, when there is no such model.
        """
        request = model_pb2.GetModelRequest(name=name)
        try:
            answer = await self._connection.unary(self._connection.calls.models.GetModel, request)
        except NotFound as problem:
            raise await suggested(problem, "model", name, self.names) from None
        return from_message(Model, answer.model)

    async def delete(self, name: str) -> None:
        """Delete a model that no active job needs."""
        request = model_pb2.DeleteModelRequest(name=name)
        await self._connection.unary(self._connection.calls.models.DeleteModel, request, idempotent=False)

    async def list(self, *, limit: int | None = None) -> list[Model]:
        """Return the caller's models, newest first; all of them, or at most `limit`."""
        call, request = self._connection.calls.models.ListModels, model_pb2.ListModelsRequest()
        found = await self._connection.all_pages(call, request, lambda answer: answer.models, limit)
        return [from_message(Model, item) for item in found]

    async def names(self) -> Iterable[str]:
        """Return the names of the caller's models, newest first."""
        return [model.name for model in await self.list(limit=1000)]


async def push_model(
    connection: Connection, request: model_pb2.CreateModelRequest, files: Sequence[HashedFile], reporter: Reporter
) -> ModelPush:
    """Create the model that `request` describes from `files`: announce them, send what is missing, finalize."""
    stub = connection.calls.models
    # The server judges the config before anything is sent.
    for file in files:
        if file.file.path == "config.json" and file.file.size_bytes <= _MAX_ANNOUNCED_CONFIG_BYTES:
            request.config = await asyncio.to_thread(file.file.source.read_bytes)
    model, sent_bytes = await push_files(
        connection,
        files,
        reporter,
        request=request,
        create=stub.CreateModel,
        finalize=stub.FinalizeModel,
        to_finalize=lambda created: model_pb2.FinalizeModelRequest(model_id=created.model_id),
        read=lambda answer: from_message(Model, answer.model),
    )
    return ModelPush(model=model, sent_bytes=sent_bytes)

"""`client.models`: push, list, get and delete model folders."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from horizon_client.blob_upload import BlobUpload
from horizon_client.connection import FINALIZE_DEADLINE_S, Connection
from horizon_client.conversion import from_message
from horizon_client.local_files import HashedFile, hash_files
from horizon_client.model_folder import model_files
from horizon_client.paging import all_pages
from horizon_client.progress import OnNotice, OnProgress, Progress, ignore_notice, ignore_progress
from horizon_client.resources import Model, ModelPush
from horizon_proto.v1 import blob_pb2, model_pb2
from horizon_proto.v1.model_pb2_grpc import ModelServiceStub

if TYPE_CHECKING:
    from horizon_proto.v1.model_pb2_grpc import ModelServiceAsyncStub


class AsyncModels:
    """The caller's models."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def push(
        self,
        folder: str | os.PathLike[str],
        *,
        name: str,
        request_id: str | None = None,
        on_progress: OnProgress = ignore_progress,
        on_notice: OnNotice = ignore_notice,
    ) -> ModelPush:
        """Push a local model folder as model `name`: config, tokenizer and safetensors only.

        Raises:
            BadFile: naming the file, when the folder is not a complete safetensors model; nothing is sent then.
            HorizonClientError: whatever the server answers.
        """
        sources = await asyncio.to_thread(model_files, folder)
        hashed = await hash_files(sources, on_progress)
        return await self.push_hashed(
            hashed, name=name, request_id=request_id, on_progress=on_progress, on_notice=on_notice
        )

    async def push_hashed(
        self,
        files: Sequence[HashedFile],
        *,
        name: str,
        request_id: str | None = None,
        on_progress: OnProgress = ignore_progress,
        on_notice: OnNotice = ignore_notice,
    ) -> ModelPush:
        """Push files that were checked and hashed before."""
        request = model_pb2.CreateModelRequest(
            request_id=request_id or str(uuid.uuid4()),
            name=name,
            files=[blob_pb2.FileEntry(path=f.file.path, sha256=f.sha256, size_bytes=f.file.size_bytes) for f in files],
        )
        stub = self._stub()
        created = (await self._connection.unary(stub.CreateModel, request)).model
        if created.state == model_pb2.MODEL_STATE_READY:
            return ModelPush(model=from_message(Model, created), sent_bytes=0)
        upload = BlobUpload(
            self._connection, _ModelBlobs(self._connection), on_progress=on_progress, on_notice=on_notice
        )
        sent_bytes = await upload.send_missing(files)
        on_progress(Progress(phase="finalize", name=name, done_bytes=0, total_bytes=0))
        finalized = await self._connection.unary(
            stub.FinalizeModel,
            model_pb2.FinalizeModelRequest(model_id=created.model_id),
            deadline_s=FINALIZE_DEADLINE_S,
            retry=self._connection.stream_retry,
        )
        return ModelPush(model=from_message(Model, finalized.model), sent_bytes=sent_bytes)

    async def list(self, *, limit: int | None = None) -> list[Model]:
        """Return the caller's models, newest first; all of them, or at most `limit`."""
        stub = self._stub()

        async def page(token: str, size: int) -> tuple[Sequence[model_pb2.Model], str]:
            answer = await self._connection.unary(
                stub.ListModels, model_pb2.ListModelsRequest(page_size=size, page_token=token)
            )
            return answer.models, answer.next_page_token

        return [from_message(Model, item) for item in await all_pages(page, limit)]

    async def get(self, name: str) -> Model:
        """Return one model by name or id."""
        request = model_pb2.GetModelRequest(name=name)
        return from_message(Model, (await self._connection.unary(self._stub().GetModel, request)).model)

    async def delete(self, name: str) -> None:
        """Delete a model that no job still needs."""
        request = model_pb2.DeleteModelRequest(name=name)
        await self._connection.unary(self._stub().DeleteModel, request, idempotent=False)

    def _stub(self) -> ModelServiceAsyncStub:
        return cast("ModelServiceAsyncStub", self._connection.stub(ModelServiceStub))


class _ModelBlobs:
    """The blob calls of ModelService."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._stub = cast("ModelServiceAsyncStub", connection.stub(ModelServiceStub))

    async def find_missing(self, blobs: Sequence[blob_pb2.BlobRef]) -> list[blob_pb2.BlobStatus]:
        request = model_pb2.FindMissingModelBlobsRequest(blobs=blobs)
        return list((await self._connection.unary(self._stub.FindMissingModelBlobs, request)).missing)

    async def query(self, blob: blob_pb2.BlobRef) -> blob_pb2.BlobStatus:
        request = model_pb2.QueryModelBlobStatusRequest(blob=blob)
        answer = await self._connection.unary(
            self._stub.QueryModelBlobStatus, request, retry=self._connection.stream_retry
        )
        return answer.status

    def open_write(self) -> Any:
        writer: Any = self._stub.WriteModelBlob  # the stubs do not know that the requests may be written one by one
        return writer(metadata=self._connection.metadata)

    def write_request(self) -> model_pb2.WriteModelBlobRequest:
        return model_pb2.WriteModelBlobRequest()

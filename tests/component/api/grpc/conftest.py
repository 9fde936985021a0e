"""A real gRPC server on loopback over a real daemon, and callers with the users' tokens."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from horizon_proto.v1 import (
    blob_pb2,
    blob_pb2_grpc,
    checkpoint_pb2_grpc,
    dataset_pb2,
    dataset_pb2_grpc,
    housekeeping_pb2_grpc,
    job_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    node_pb2_grpc,
    sharing_pb2_grpc,
)
from horizon_server.api.grpc.server import GrpcServer, start_grpc_server
from horizon_server.blobs.store import BlobStore

Calls = list[tuple[str, str, str]]


class Caller:
    """One user's stubs; every call carries their token."""

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        self.metadata = (("authorization", f"Bearer {token}"),)
        self.stubs = {
            "blobs": blob_pb2_grpc.BlobServiceStub(channel),
            "datasets": dataset_pb2_grpc.DatasetServiceStub(channel),
            "models": model_pb2_grpc.ModelServiceStub(channel),
            "jobs": job_pb2_grpc.JobServiceStub(channel),
            "checkpoints": checkpoint_pb2_grpc.CheckpointServiceStub(channel),
            "node": node_pb2_grpc.NodeServiceStub(channel),
            "housekeeping": housekeeping_pb2_grpc.HousekeepingServiceStub(channel),
            "sharing": sharing_pb2_grpc.SharingServiceStub(channel),
        }

    def ref_of(self, content: bytes) -> blob_pb2.BlobRef:
        return ref_of(content)

    def call(self, service: str, method: str, request: Any, *extra: tuple[str, str]) -> Any:
        return getattr(self.stubs[service], method)(request, metadata=(*self.metadata, *extra), timeout=240)

    async def create(self, name: str, files: dict[str, bytes], **options: Any) -> Any:
        request = dataset_pb2.CreateDatasetRequest(
            request_id=options.pop("request_id", str(uuid.uuid4())), name=name, files=entries_of(files), **options
        )
        return (await self.call("datasets", "CreateDataset", request)).dataset

    async def missing(self, files: dict[str, bytes]) -> list[Any]:
        request = blob_pb2.FindMissingBlobsRequest(blobs=[ref_of(content) for content in files.values()])
        return list((await self.call("blobs", "FindMissingBlobs", request)).missing)

    async def write(self, content: bytes, offset: int = 0, *, ref: Any = None, size: int = 2**20) -> Any:
        return (await self.call("blobs", "WriteBlob", requests_of(content, offset, ref=ref, size=size))).status

    async def status(self, content: bytes) -> Any:
        request = blob_pb2.QueryBlobStatusRequest(blob=ref_of(content))
        return (await self.call("blobs", "QueryBlobStatus", request)).status

    async def push(self, name: str, files: dict[str, bytes], **options: Any) -> Any:
        dataset = await self.create(name, files, **options)
        contents = {ref_of(content).sha256: content for content in files.values()}
        for status in await self.missing(files):
            content = contents[status.blob.sha256]
            await self.write(content[status.committed_bytes :], status.committed_bytes, ref=ref_of(content))
        request = dataset_pb2.FinalizeDatasetRequest(dataset_id=dataset.dataset_id)
        return (await self.call("datasets", "FinalizeDataset", request)).dataset

    async def push_model(self, name: str, files: dict[str, bytes]) -> Any:
        created = model_pb2.CreateModelRequest(request_id=str(uuid.uuid4()), name=name, files=entries_of(files))
        model = (await self.call("models", "CreateModel", created)).model
        for content in files.values():
            await self.write(content)
        request = model_pb2.FinalizeModelRequest(model_id=model.model_id)
        return (await self.call("models", "FinalizeModel", request)).model


def ref_of(content: bytes) -> blob_pb2.BlobRef:
    return blob_pb2.BlobRef(sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content))


def entries_of(files: dict[str, bytes]) -> list[blob_pb2.FileEntry]:
    return [
        blob_pb2.FileEntry(path=path, sha256=ref_of(content).sha256, size_bytes=len(content))
        for path, content in files.items()
    ]


def requests_of(
    content: bytes, offset: int, *, ref: Any = None, size: int = 2**20
) -> Iterator[blob_pb2.WriteBlobRequest]:
    chunk = blob_pb2.BlobChunk(blob=ref or ref_of(content), offset=offset)
    for start in range(0, max(1, len(content)), size):
        chunk.data = content[start : start + size]
        yield blob_pb2.WriteBlobRequest(chunk=chunk)
        chunk = blob_pb2.BlobChunk()


class GrpcWorld:
    """A running server over the daemon, and four callers; everything else is the daemon's `World`."""

    def __init__(self, base: Any, server: GrpcServer, channel: grpc.aio.Channel, calls: Calls) -> None:
        self.base, self.server, self.channel, self.calls = base, server, channel, calls
        self.address = f"127.0.0.1:{server.port}"
        self.ann, self.bob, self.root_user, self.eve = (
            Caller(channel, base.tokens[name]) for name in ("ann", "bob", "root", "eve")
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base, name)

    @property
    def stored_bytes(self) -> float:
        """Bytes of contents that were uploaded whole."""
        sample = self.base.metrics.registry.get_sample_value("horizon_upload_bytes_total", {"result": "stored"})
        return sample or 0.0

    def blob(self, content: bytes) -> Path:
        """Where a content is kept."""
        return BlobStore(self.base.root).path(hashlib.sha256(content).hexdigest())


@asynccontextmanager
async def served(base: Any, **replaced: Any) -> AsyncIterator[GrpcWorld]:
    """Serve the daemon's services, some of them `replaced`, on loopback."""
    calls: Calls = []
    server = await start_grpc_server(
        dataclasses.replace(base.services, **replaced),
        address="127.0.0.1:0",
        tls=None,
        observe=lambda service, method, code, seconds: calls.append((service, method, code)),
    )
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield GrpcWorld(base, server, channel, calls)
    await server.stop(0)


@pytest.fixture
def serve() -> Any:
    """`async with serve(base_world, blobs=...)`: a server of which some service is another."""
    return served


@pytest_asyncio.fixture
async def world(base_world: Any) -> AsyncIterator[GrpcWorld]:
    async with served(base_world) as world:
        yield world


@pytest.fixture
def chats() -> bytes:
    rows = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "yes"}]} for i in range(50)
    ]
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)

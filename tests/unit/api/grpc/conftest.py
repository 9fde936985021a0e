"""A real gRPC server on loopback over real blobs, datasets, models and accounts; only jobs are a small fake at their port."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import shutil
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from horizon_proto.v1 import (
    blob_pb2,
    checkpoint_pb2_grpc,
    dataset_pb2,
    dataset_pb2_grpc,
    job_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    node_pb2_grpc,
)
from horizon_server.api.grpc.server import start_grpc_server
from horizon_server.api.services import Services
from horizon_server.blobs.disk import SystemDisk
from horizon_server.blobs.store import BlobStore
from horizon_server.blobs.uploads import Uploads
from horizon_server.datasets.preview.request import DatasetPreview, PreviewOptions, PreviewRow, PreviewSpan
from horizon_server.db.accounts import AccountStore
from horizon_server.db.blobs import BlobReferences
from horizon_server.db.database import Database, migrate
from horizon_server.db.datasets import DatasetStore
from horizon_server.db.jobs import JobStore
from horizon_server.db.models import ModelStore
from horizon_server.db.requests import Requests
from horizon_server.errors import NotFound
from horizon_server.events import JobEvent, Payload
from horizon_server.jobs.node import NodeFacts
from horizon_server.planning.machine import Accelerator
from horizon_server.records.account import Principal
from horizon_server.records.job import CheckpointFile, CheckpointRecord, JobRecord, JobState
from horizon_server.records.plan import JobPlan, StepPrediction
from horizon_server.services.access import require_visible
from horizon_server.services.accounts import Accounts
from horizon_server.services.datasets import DatasetService
from horizon_server.services.models import ModelService
from horizon_server.spec import JobSpec

GIB = 2**30
USERS = {"ann": "user", "bob": "user", "root": "admin", "eve": "viewer"}


class FakeJobs:
    """Jobs in a dictionary; watching waits for more until `over`."""

    def __init__(self) -> None:
        self.jobs: dict[str, JobRecord] = {}
        self.events: list[JobEvent] = []
        self.over = False
        self.news = asyncio.Event()
        self.num_watching = 0
        self.log = b""
        self.folder = Path()
        self.kept: list[CheckpointRecord] = []
        self.bug: Exception | None = None
        self.users_of: dict[str, str] = {}
        self.asked: dict[str, Any] = {}
        self.plan_made = JobPlan(
            host_bytes={"weights": 4 * GIB, "moments": 8 * GIB},
            device_bytes={"weights": GIB},
            host_limit_bytes=10 * GIB,
            device_limit_bytes=2 * GIB,
            num_parameters=10**9,
            device="cuda",
            message="12 GiB are needed, 10 GiB are there",
            prediction=StepPrediction(
                step_s=2.0, tokens_per_second=500.0, bound="h2d", peak_flops_per_s=1e12, total_s=40.0
            ),
        )

    def tell(self, *payloads: Payload) -> None:
        for payload in payloads:
            self.events.append(JobEvent(job_id="job_1", sequence=len(self.events) + 1, time_s=1.75e9, payload=payload))
        self.news.set()
        self.news = asyncio.Event()

    async def submit(self, principal: Principal, *, request_id: str, spec: JobSpec) -> JobRecord:
        self.asked["request_id"] = request_id
        job = JobRecord(
            job_id=f"job_{len(self.jobs) + 1}",
            owner=principal.name,
            spec=spec,
            model_id="model_1",
            dataset_id="dataset_1",
            eval_dataset_id="",
            job_state=JobState.QUEUED,
            created_s=1.75e9,
            queue_position=1,
            plan=self.plan_made,
        )
        self.jobs[job.job_id] = job
        return job

    async def plan(self, principal: Principal, spec: JobSpec) -> tuple[JobSpec, JobPlan]:
        return spec, self.plan_made

    async def get(self, principal: Principal, key: str) -> JobRecord:
        if self.bug is not None:
            raise self.bug
        if key not in self.jobs:
            raise NotFound(f"job {key} does not exist, or is not yours")
        require_visible(principal, self.jobs[key].owner, f"job {key}")
        return self.jobs[key]

    cancel = pause = resume = get

    async def list(
        self, principal: Principal, *, page_size: int = 100, page_token: str = "", states: Any = frozenset()
    ) -> tuple[list[JobRecord], str]:
        self.asked.update(page_size=page_size, page_token=page_token, states=states)
        return list(self.jobs.values()), "more"

    async def watch(self, principal: Principal, key: str, after_sequence: int = 0) -> AsyncIterator[JobEvent]:
        await self.get(principal, key)
        self.num_watching += 1
        try:
            while True:
                news = self.news
                for event in self.events[after_sequence:]:
                    yield event
                    after_sequence = event.sequence
                if self.over:
                    return
                await news.wait()
        finally:
            self.num_watching -= 1

    async def logs(
        self, principal: Principal, key: str, *, attempt: int = 0, offset: int = 0, follow: bool = False
    ) -> AsyncIterator[tuple[int, bytes]]:
        await self.get(principal, key)
        yield offset, self.log[offset:]

    async def checkpoints(self, principal: Principal, key: str) -> Any:
        await self.get(principal, key)
        return self.kept

    async def checkpoint_file(self, principal: Principal, key: str, step: int, path: str) -> Path:
        return self.folder / path

    async def delete_checkpoint(self, principal: Principal, key: str, step: int) -> None:
        self.kept = [one for one in self.kept if one.step != step]

    async def queue(self) -> Any:
        return list(self.jobs.values())

    async def in_use(self, resource_id: str) -> str | None:
        return self.users_of.get(resource_id)

    def keep_checkpoint(self, folder: Path, files: dict[str, bytes]) -> None:
        self.folder = folder
        for path, content in files.items():
            place = folder / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
        entries = tuple(
            CheckpointFile(path=path, sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content))
            for path, content in files.items()
        )
        self.kept = [CheckpointRecord(job_id="job_1", step=20, files=entries, created_s=1.75e9, last=True)]


class FakePreviews:
    """One row, whatever is asked; remembers what was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str, PreviewOptions]] = []

    async def preview(self, principal: Principal, dataset: str, model: str, options: PreviewOptions) -> DatasetPreview:
        options.check()
        self.asked.append((principal.name, dataset, model, options))
        spans = (PreviewSpan(text="hi ", trained=False), PreviewSpan(text="there", trained=True))
        row = PreviewRow(
            file="a.jsonl", unit="line", number=7, spans=spans, num_tokens=5, num_trained_tokens=2, num_cut_tokens=3,
            num_documents=1, clipped=True, problems=("too long",),
        )  # fmt: skip
        return DatasetPreview(rows=(row,), num_rows=50, format="prompt-completion", options=options)


class RoomDisk(SystemDisk):
    """The real disk, with room for so many bytes more where `room` is set."""

    room: int | None = None

    def write(self, descriptor: int, data: memoryview) -> int:
        if self.room is not None:
            self.room -= len(data)
            if self.room < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(descriptor, data)


class Caller:
    """One user's stubs; every call carries their token."""

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        self.metadata = (("authorization", f"Bearer {token}"),)
        self.stubs = {
            "datasets": dataset_pb2_grpc.DatasetServiceStub(channel),
            "models": model_pb2_grpc.ModelServiceStub(channel),
            "jobs": job_pb2_grpc.JobServiceStub(channel),
            "checkpoints": checkpoint_pb2_grpc.CheckpointServiceStub(channel),
            "node": node_pb2_grpc.NodeServiceStub(channel),
        }

    def ref_of(self, content: bytes) -> blob_pb2.BlobRef:
        return ref_of(content)

    def call(self, service: str, method: str, request: Any, *extra: tuple[str, str]) -> Any:
        return getattr(self.stubs[service], method)(request, metadata=(*self.metadata, *extra), timeout=20)

    async def create(self, name: str, files: dict[str, bytes], **options: Any) -> Any:
        request = dataset_pb2.CreateDatasetRequest(
            request_id=options.pop("request_id", str(uuid.uuid4())), name=name, files=entries_of(files), **options
        )
        return (await self.call("datasets", "CreateDataset", request)).dataset

    async def missing(self, files: dict[str, bytes]) -> list[Any]:
        request = dataset_pb2.FindMissingBlobsRequest(blobs=[ref_of(content) for content in files.values()])
        return list((await self.call("datasets", "FindMissingBlobs", request)).missing)

    async def write(self, content: bytes, offset: int = 0, *, ref: Any = None, size: int = 2**20) -> Any:
        return (await self.call("datasets", "WriteBlob", requests_of(content, offset, ref=ref, size=size))).status

    async def status(self, content: bytes) -> Any:
        request = dataset_pb2.QueryBlobStatusRequest(blob=ref_of(content))
        return (await self.call("datasets", "QueryBlobStatus", request)).status

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
            chunks = (model_pb2.WriteModelBlobRequest(chunk=request.chunk) for request in requests_of(content, 0))
            await self.call("models", "WriteModelBlob", chunks)
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
) -> Iterator[dataset_pb2.WriteBlobRequest]:
    chunk = blob_pb2.BlobChunk(blob=ref or ref_of(content), offset=offset)
    for start in range(0, max(1, len(content)), size):
        chunk.data = content[start : start + size]
        yield dataset_pb2.WriteBlobRequest(chunk=chunk)
        chunk = blob_pb2.BlobChunk()


class World:
    """The running server, its insides, and four callers."""

    def __init__(self) -> None:
        self.jobs = FakeJobs()
        self.previews = FakePreviews()
        self.calls: list[tuple[str, str, str]] = []
        self.uploads_seen: list[tuple[int, str]] = []

    def observe(self, service: str, method: str, code: str, seconds: float) -> None:
        assert seconds >= 0
        self.calls.append((service, method, code))

    async def open(self, root: Path, template: Path) -> None:
        self.root = root
        shutil.copy(template, root / "horizon.db")
        self.database = await Database.open(root / "horizon.db")
        accounts = Accounts(AccountStore(self.database))
        tokens = {}
        for name, role in USERS.items():
            await accounts.add_user(name, role=role)
            _, tokens[name] = await accounts.create_token(name, lifetime_s=None)
        self.tokens = tokens
        requests = Requests()
        self.disk = RoomDisk()
        self.store = BlobStore(root, disk=self.disk)
        uploads = Uploads(
            self.store,
            BlobReferences(self.database),
            max_blob_bytes=64 * 2**20,
            on_upload=lambda num_bytes, result: self.uploads_seen.append((num_bytes, result)),
        )
        self.services = Services(
            accounts=accounts,
            jobs=self.jobs,
            datasets=DatasetService(
                DatasetStore(self.database, requests), uploads, max_bytes=64 * 2**20, in_use=self.jobs.in_use
            ),
            previews=self.previews,
            models=ModelService(
                ModelStore(self.database, requests),
                uploads,
                root=root / "models",
                max_bytes=64 * 2**20,
                in_use=self.jobs.in_use,
            ),
            blobs=uploads,
            node=NodeFacts(
                JobStore(self.database, requests),
                state_dir=root,
                accelerators=(Accelerator(index=0, name="GPU", memory_bytes=GIB),),
            ),
        )
        self.server = await start_grpc_server(self.services, address="127.0.0.1:0", tls=None, observe=self.observe)
        self.address = f"127.0.0.1:{self.server.port}"
        self.channel = grpc.aio.insecure_channel(self.address)
        self.ann, self.bob, self.root_user, self.eve = (Caller(self.channel, tokens[name]) for name in USERS)

    async def close(self) -> None:
        await self.channel.close(None)
        await self.server.stop(0)
        await self.services.datasets.close()
        await self.services.models.close()
        await self.database.close()


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("database") / "horizon.db"
    migrate(path)
    return path


@pytest_asyncio.fixture
async def world(tmp_path: Path, empty_database: Path) -> AsyncIterator[World]:
    world = World()
    await world.open(tmp_path, empty_database)
    yield world
    await world.close()


@pytest.fixture
def chats() -> bytes:
    rows = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "yes"}]} for i in range(50)
    ]
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)

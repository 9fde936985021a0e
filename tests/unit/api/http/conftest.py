"""Small services behind the real app: records in dictionaries, and the authorisation rules of accounts.principal."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import httpx
import pytest
from fastapi import FastAPI

from horizon_server.api.http.app import make_app
from horizon_server.datasets.preview.request import DatasetPreview, PreviewOptions, PreviewRow, PreviewSpan
from horizon_server.errors import HorizonError, InvalidSpec, NotFound, Unauthenticated
from horizon_server.events import EvalDone, JobEvent, StateChanged, StepDone
from horizon_server.jobs.node import NodeStatus
from horizon_server.planning.machine import Accelerator
from horizon_server.records.account import Principal
from horizon_server.records.blob import BlobFile
from horizon_server.records.dataset import DatasetRecord
from horizon_server.records.job import ENDED, CheckpointFile, CheckpointRecord, JobRecord, JobState
from horizon_server.records.model import ModelRecord
from horizon_server.records.plan import JobPlan, StepPrediction
from horizon_server.services.access import may_see, require_visible
from horizon_server.spec import JobSpec
from horizon_server.telemetry.metrics import Metrics

TOKENS = {
    "token-ada": Principal(name="ada", role="user", project="lab"),
    "token-bob": Principal(name="bob", role="user", project="lab"),
    "token-root": Principal(name="root", role="admin", project="ops"),
    "token-eve": Principal(name="eve", role="viewer", project="ops"),
}


class Accounts:
    """Knows four tokens."""

    async def authenticate(self, token: str) -> Principal:
        if token not in TOKENS:
            raise Unauthenticated("this token is not known; ask for a new one")
        return TOKENS[token]


class Jobs:
    """Jobs and their events in memory; a watch waits for more until the job has ended."""

    def __init__(self) -> None:
        self.records: dict[str, JobRecord] = {}
        self.events: dict[str, list[JobEvent]] = {}
        self.kept: list[CheckpointRecord] = []
        self.bug: Exception | None = None
        self.fault: HorizonError | None = None
        self.num_watching = 0
        self._news = asyncio.Event()

    def add(self, job: JobRecord) -> JobRecord:
        self.records[job.job_id] = job
        self.events[job.job_id] = []
        return job

    def tell(self, job_id: str, *payloads: StepDone | EvalDone | StateChanged) -> None:
        for payload in payloads:
            events, job = self.events[job_id], self.records[job_id]
            events.append(JobEvent(job_id=job_id, sequence=len(events) + 1, time_s=1e9, payload=payload))
            state = JobState(payload.job_state) if isinstance(payload, StateChanged) else job.job_state
            self.records[job_id] = dataclasses.replace(job, last_sequence=len(events), job_state=state)
        self._news.set()
        self._news = asyncio.Event()

    async def get(self, principal: Principal, key: str) -> JobRecord:
        if self.bug is not None:
            raise self.bug
        if key not in self.records:
            raise NotFound(f"job {key} does not exist, or is not yours")
        require_visible(principal, self.records[key].owner, f"job {key}")
        return self.records[key]

    async def list(
        self,
        principal: Principal,
        *,
        page_size: int = 100,
        page_token: str = "",
        states: frozenset[JobState] = frozenset(),
    ) -> tuple[list[JobRecord], str]:
        if page_token and not page_token.isdigit():
            raise InvalidSpec("page_token must be one that an earlier answer gave as next_page_token")
        seen = [
            job
            for job in reversed(self.records.values())
            if may_see(principal, job.owner) and (not states or job.job_state in states)
        ]
        start = int(page_token or 0)
        rest = start + page_size < len(seen)
        return seen[start : start + page_size], str(start + page_size) if rest else ""

    async def watch(self, principal: Principal, key: str, after_sequence: int = 0) -> AsyncIterator[JobEvent]:
        await self.get(principal, key)
        self.num_watching += 1
        try:
            while True:
                news = self._news
                for event in self.events[key][after_sequence:]:
                    yield event
                    after_sequence = event.sequence
                if self.fault is not None:
                    raise self.fault
                if self.records[key].job_state in ENDED:
                    return
                await news.wait()
        finally:
            self.num_watching -= 1

    async def checkpoints(self, principal: Principal, key: str) -> Sequence[CheckpointRecord]:
        await self.get(principal, key)
        return self.kept

    async def queue(self) -> Sequence[JobRecord]:
        return [job for job in self.records.values() if job.job_state not in ENDED]


class Datasets:
    """One dataset of ada's."""

    async def list(
        self, principal: Principal, *, page_size: int = 100, page_token: str = ""
    ) -> tuple[list[DatasetRecord], str]:
        files = (BlobFile(path="a.jsonl", sha256="0" * 64, size_bytes=7),)
        record = DatasetRecord(
            dataset_id="d-1", owner="ada", name="chats", format="messages", field_map={}, files=files, ready=True,
            num_rows=3, digest="abc", created_s=1e9,
        )  # fmt: skip
        return ([record] if may_see(principal, record.owner) else []), ""


class Previews:
    """One row of ada's dataset, which says what was asked."""

    async def preview(self, principal: Principal, dataset: str, model: str, options: PreviewOptions) -> DatasetPreview:
        options.check()
        if dataset != "chats":
            raise NotFound(f"dataset {dataset} does not exist, or is not yours")
        require_visible(principal, "ada", f"dataset {dataset}")
        spans = (PreviewSpan(text=f"{model} {options.offset}", trained=True),)
        row = PreviewRow(file="a.jsonl", unit="line", number=1, spans=spans, num_tokens=2, num_trained_tokens=1)
        return DatasetPreview(rows=(row,) * options.num_rows, num_rows=50, format="messages", options=options)


class Models:
    """One model of ada's, still uploading."""

    async def list(
        self, principal: Principal, *, page_size: int = 100, page_token: str = ""
    ) -> tuple[list[ModelRecord], str]:
        record = ModelRecord(model_id="m-1", owner="ada", name="tiny", files=(), created_s=1e9)
        return ([record] if may_see(principal, record.owner) else []), ""


class Node:
    """A small machine."""

    async def describe(self, principal: Principal) -> NodeStatus:
        return NodeStatus(
            hostname="box", version="9.9", host_memory_limit_bytes=100, host_memory_available_bytes=40, num_cpus=2,
            accelerators=(Accelerator(index=0, name="GPU", memory_bytes=8),), disk_free_bytes=5,
            num_jobs={"RUNNING": 1}, draining=False, user=principal.name, role=principal.role,
        )  # fmt: skip


class Services:
    """Everything the app is given."""

    def __init__(self) -> None:
        self.accounts = Accounts()
        self.jobs = Jobs()
        self.datasets = Datasets()
        self.previews = Previews()
        self.models = Models()
        self.node = Node()


@pytest.fixture
def services() -> Services:
    return Services()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(version="9.9")


@pytest.fixture
def readiness() -> list[str]:
    """Reasons why the daemon is not ready; the first one is given."""
    return []


@pytest.fixture
def app(services: Services, metrics: Metrics, readiness: list[str]) -> FastAPI:
    return make_app(
        services, metrics, metrics_open=True, version="9.9", ready=lambda: readiness[0] if readiness else None
    )


Connect = Callable[..., httpx.AsyncClient]


@pytest.fixture
async def connect(app: FastAPI) -> AsyncIterator[Connect]:
    """Make clients of the app, or of another; without a token unless one is named."""
    clients: list[httpx.AsyncClient] = []

    def make(token: str | None = None, other: FastAPI | None = None) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app=other or app, raise_app_exceptions=False)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        clients.append(httpx.AsyncClient(transport=transport, base_url="http://node", headers=headers))
        return clients[-1]

    yield make
    for client in clients:
        await client.aclose()


@pytest.fixture
def ada(connect: Connect) -> Iterator[httpx.AsyncClient]:
    yield connect("token-ada")


@pytest.fixture
def make_job() -> Callable[..., JobRecord]:
    """Make a job record; owner ada, RUNNING, unless told otherwise."""

    def make(job_id: str = "j-1", *, owner: str = "ada", job_state: JobState = JobState.RUNNING) -> JobRecord:
        return JobRecord(
            job_id=job_id,
            owner=owner,
            spec=JobSpec(name=f"name-of-{job_id}", model="tiny", dataset="chats", project="lab"),
            model_id="m-1",
            dataset_id="d-1",
            eval_dataset_id="",
            job_state=job_state,
            step=5,
            num_steps=10,
            attempt=1,
            created_s=1e9,
            started_s=1e9 + 60,
            plan=JobPlan(
                host_bytes={"weights": 2, "moments": 3}, device_bytes={"weights": 1}, host_limit_bytes=10,
                device_limit_bytes=0, num_parameters=1, device="host",
                prediction=StepPrediction(
                    step_s=2.0, tokens_per_second=500.0, bound="h2d", peak_flops_per_s=1e12, total_s=40.0
                ),
            ),
        )  # fmt: skip

    return make


@pytest.fixture
def make_step() -> Callable[..., StepDone]:
    """Make a finished step."""

    def make(step: int, loss: float = 1.0) -> StepDone:
        return StepDone(
            step=step, num_steps=10, loss=loss, grad_norm=0.5, learning_rate=1e-4, epoch=0.5,
            num_input_tokens_seen=step, num_tokens=1, tokens_per_second=3.0, duration_s=0.5, eta_s=2.5,
        )  # fmt: skip

    return make


@pytest.fixture
def checkpoint() -> CheckpointRecord:
    files = (CheckpointFile(path="model.safetensors", sha256="f" * 64, size_bytes=9),)
    return CheckpointRecord(job_id="j-1", step=10, files=files, created_s=1e9, eval_loss=1.5, last=True)

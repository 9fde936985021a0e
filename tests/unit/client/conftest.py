"""A small daemon at the port: real gRPC servicers over dictionaries, with cuts and damage on demand.

The true daemon is tested in tests/scenarios. This one exists to fail at exactly the byte or the event a test names.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from click.testing import CliRunner, Result
from tests.unit.client.fake_blobs import Blobs, Refusal

from horizon_client.cli.root import horizon
from horizon_client.connection import RetryPolicy
from horizon_proto.v1 import (
    blob_pb2,
    blob_pb2_grpc,
    checkpoint_pb2,
    checkpoint_pb2_grpc,
    dataset_pb2,
    dataset_pb2_grpc,
    job_pb2,
    job_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    node_pb2,
    node_pb2_grpc,
)

TOKEN = "hzn-test-token"
QUICK = RetryPolicy(max_attempts=30, max_elapsed_s=20.0, first_wait_s=0.001, longest_wait_s=0.05)


class FakeDaemon:
    """State and faults of the daemon; tests write to it, servicers read it."""

    def __init__(self) -> None:
        self.blobs = Blobs()
        self.datasets: dict[str, dataset_pb2.Dataset] = {}
        self.models: dict[str, model_pb2.Model] = {}
        self.requests: dict[str, bytes] = {}
        self.jobs: dict[str, job_pb2.Job] = {}
        self.events: list[job_pb2.JobEvent] = []
        self.log = b""
        self.checkpoints: list[checkpoint_pb2.Checkpoint] = []
        self.files: dict[str, bytes] = {}
        self.refusals: dict[str, list[Refusal]] = {}
        self.calls: list[str] = []
        self.stream_cuts: list[int] = []
        self.hanging: set[str] = set()
        self.read_offsets: list[int] = []
        self.never_ending = False
        self.plan_fits = True
        self.plan_device = "cuda"
        self.address = ""
        self.tls: tuple[bytes, bytes] | None = None
        self._port = 0
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda loop, context: None)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server: Any = None

    def start(self) -> None:
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)

    def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            asyncio.run_coroutine_threadsafe(server.stop(None), self._loop).result(10)

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def add_job(
        self, spec: job_pb2.JobSpec, state: job_pb2.JobState.ValueType = job_pb2.JOB_STATE_QUEUED
    ) -> job_pb2.Job:
        job = job_pb2.Job(job_id=f"job-{len(self.jobs) + 1}", spec=spec, owner="ada", state=state, queue_position=1)
        self.jobs[job.job_id] = job
        return job

    def add_checkpoint(self, step: int, files: dict[str, bytes], **fields: Any) -> None:
        entries = [
            blob_pb2.FileEntry(path=path, sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content))
            for path, content in files.items()
        ]
        size = sum(len(content) for content in files.values())
        self.checkpoints.append(
            checkpoint_pb2.Checkpoint(job_id="job-1", step=step, files=entries, size_bytes=size, **fields)
        )
        self.files.update({f"{step}/{path}": content for path, content in files.items()})

    def refuse(self, method: str, code: str, message: str, *, times: int = 1, **details: Any) -> None:
        """Answer the next calls of `method` with an error."""
        refusal = Refusal(grpc.StatusCode[code], message, **details)
        self.refusals.setdefault(method, []).extend([refusal] * times)

    async def _start(self) -> None:
        server = grpc.aio.server(interceptors=[_Gate(self)])
        job_pb2_grpc.add_JobServiceServicer_to_server(_Jobs(self), server)
        blob_pb2_grpc.add_BlobServiceServicer_to_server(_Blobs(self), server)
        dataset_pb2_grpc.add_DatasetServiceServicer_to_server(_Datasets(self), server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(_Models(self), server)
        checkpoint_pb2_grpc.add_CheckpointServiceServicer_to_server(_Checkpoints(self), server)
        node_pb2_grpc.add_NodeServiceServicer_to_server(_Node(self), server)
        if self.tls is None:
            self._port = server.add_insecure_port(f"127.0.0.1:{self._port}")
        else:
            credentials = grpc.ssl_server_credentials([self.tls])
            self._port = server.add_secure_port(f"127.0.0.1:{self._port}", credentials)
        self.address = f"127.0.0.1:{self._port}"
        await server.start()
        self._server = server


class _Gate(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Checks the token, notes the call, and answers the refusals a test has laid out."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self._daemon = daemon

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method.rpartition("/")[2]
        metadata = dict(handler_call_details.invocation_metadata)
        self._daemon.calls.append(method)
        waiting = self._daemon.refusals.get(method)
        refusal = waiting.pop(0) if waiting else None
        if method in self._daemon.hanging:
            await asyncio.Event().wait()
        if metadata.get("authorization") != f"Bearer {TOKEN}":
            refusal = Refusal(grpc.StatusCode.UNAUTHENTICATED, "this token is not known here", reason="UNAUTHENTICATED")
        return _guarded(handler, refusal)


def _guarded(handler: Any, refusal: Refusal | None) -> Any:
    coders = {
        "request_deserializer": handler.request_deserializer,
        "response_serializer": handler.response_serializer,
    }

    async def single(request: Any, context: Any) -> Any:
        try:
            if refusal is not None:
                raise refusal
            inner = handler.stream_unary if handler.request_streaming else handler.unary_unary
            return await inner(request, context)
        except Refusal as refused:
            await context.abort(refused.code, refused.message, refused.trailing)

    async def streaming(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            if refusal is not None:
                raise refusal
            async for answer in handler.unary_stream(request, context):
                yield answer
        except Refusal as refused:
            await context.abort(refused.code, refused.message, refused.trailing)

    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(streaming, **coders)
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler(single, **coders)
    return grpc.unary_unary_rpc_method_handler(single, **coders)


def _not_found(what: str) -> Refusal:
    return Refusal(grpc.StatusCode.NOT_FOUND, f"{what} does not exist", reason="NOT_FOUND")


class _Blobs(blob_pb2_grpc.BlobServiceServicer):
    def __init__(self, daemon: FakeDaemon) -> None:
        self.d = daemon

    async def FindMissingBlobs(self, request: Any, context: Any) -> Any:
        return blob_pb2.FindMissingBlobsResponse(missing=self.d.blobs.missing(request.blobs))

    async def WriteBlob(self, request_iterator: Any, context: Any) -> Any:
        return blob_pb2.WriteBlobResponse(status=await self.d.blobs.write(request_iterator))

    async def QueryBlobStatus(self, request: Any, context: Any) -> Any:
        return blob_pb2.QueryBlobStatusResponse(status=self.d.blobs.status(request.blob))


class _Datasets(dataset_pb2_grpc.DatasetServiceServicer):
    def __init__(self, daemon: FakeDaemon) -> None:
        self.d = daemon

    async def CreateDataset(self, request: Any, context: Any) -> Any:
        known = self.d.datasets.get(request.name)
        if known is not None and known.files != request.files:
            raise Refusal(grpc.StatusCode.ALREADY_EXISTS, f"{request.name} is taken", reason="ALREADY_EXISTS")
        created = known or dataset_pb2.Dataset(
            dataset_id=f"ds-{len(self.d.datasets) + 1}",
            name=request.name,
            owner="ada",
            format=request.format,
            field_map=request.field_map,
            files=request.files,
            state=dataset_pb2.DATASET_STATE_UPLOADING,
            size_bytes=sum(f.size_bytes for f in request.files),
        )
        self.d.datasets[request.name] = created
        return dataset_pb2.CreateDatasetResponse(dataset=created)

    async def FinalizeDataset(self, request: Any, context: Any) -> Any:
        found = next(d for d in self.d.datasets.values() if d.dataset_id == request.dataset_id)
        assert not self.d.blobs.missing(blob_pb2.BlobRef(sha256=f.sha256, size_bytes=f.size_bytes) for f in found.files)
        found.state, found.num_rows = dataset_pb2.DATASET_STATE_READY, 7
        return dataset_pb2.FinalizeDatasetResponse(dataset=found)

    async def GetDataset(self, request: Any, context: Any) -> Any:
        if request.name not in self.d.datasets:
            raise _not_found(f"dataset {request.name}")
        return dataset_pb2.GetDatasetResponse(dataset=self.d.datasets[request.name])

    async def ListDatasets(self, request: Any, context: Any) -> Any:
        every = list(self.d.datasets.values())
        start = int(request.page_token or 0)
        end = start + min(request.page_size, 2)  # pages of two, so that every list is paged
        token = str(end) if end < len(every) else ""
        return dataset_pb2.ListDatasetsResponse(datasets=every[start:end], next_page_token=token)

    async def DeleteDataset(self, request: Any, context: Any) -> Any:
        self.d.datasets = {n: d for n, d in self.d.datasets.items() if d.dataset_id != request.name}
        return dataset_pb2.DeleteDatasetResponse()

    async def PreviewDataset(self, request: Any, context: Any) -> Any:
        spans = [dataset_pb2.PreviewSpan(text="Q: 1+1?"), dataset_pb2.PreviewSpan(text=" 2", trained=True)]
        at = {"file": "a.jsonl", "unit": "line", "number": request.offset + 1}
        row = dataset_pb2.PreviewRow(spans=spans, num_tokens=5, num_trained_tokens=1, **at)
        options = {name: getattr(request, name) for name in ("train_on", "method", "sequence_length")}
        wire_format = dataset_pb2.DATASET_FORMAT_MESSAGES
        return dataset_pb2.PreviewDatasetResponse(
            rows=[row] * request.num_rows, num_rows=1234, format=wire_format, **options
        )


class _Models(model_pb2_grpc.ModelServiceServicer):
    def __init__(self, daemon: FakeDaemon) -> None:
        self.d = daemon

    async def CreateModel(self, request: Any, context: Any) -> Any:
        created = model_pb2.Model(
            model_id="m-1",
            name=request.name,
            owner="ada",
            files=request.files,
            state=model_pb2.MODEL_STATE_UPLOADING,
        )
        self.d.models[request.name] = created
        return model_pb2.CreateModelResponse(model=created)

    async def FinalizeModel(self, request: Any, context: Any) -> Any:
        found = next(m for m in self.d.models.values() if m.model_id == request.model_id)
        found.state, found.architecture, found.num_parameters = model_pb2.MODEL_STATE_READY, "llama", 12
        return model_pb2.FinalizeModelResponse(model=found)

    async def GetModel(self, request: Any, context: Any) -> Any:
        if request.name not in self.d.models:
            raise _not_found(f"model {request.name}")
        return model_pb2.GetModelResponse(model=self.d.models[request.name])

    async def ListModels(self, request: Any, context: Any) -> Any:
        return model_pb2.ListModelsResponse(models=list(self.d.models.values()))

    async def DeleteModel(self, request: Any, context: Any) -> Any:
        self.d.models = {n: m for n, m in self.d.models.items() if m.model_id != request.name}
        return model_pb2.DeleteModelResponse()


class _Jobs(job_pb2_grpc.JobServiceServicer):
    def __init__(self, daemon: FakeDaemon) -> None:
        self.d = daemon

    def _job(self, key: str) -> job_pb2.Job:
        jobs = [*self.d.jobs.values()]
        found = [job for job in jobs if key in (job.job_id, job.spec.name)]
        found = found or [job for job in jobs if job.job_id.startswith(key)]
        if not found:
            raise _not_found(f"job {key}")
        return found[-1]

    async def SubmitJob(self, request: Any, context: Any) -> Any:
        body = request.spec.SerializeToString(deterministic=True)
        if request.request_id in self.d.requests:
            job_id = self.d.requests[request.request_id].decode()
            assert self.d.jobs[job_id].spec.SerializeToString(deterministic=True) == body
            return job_pb2.SubmitJobResponse(job=self.d.jobs[job_id])
        job = self.d.add_job(request.spec)
        self.d.requests[request.request_id] = job.job_id.encode()
        return job_pb2.SubmitJobResponse(job=job)

    async def PlanJob(self, request: Any, context: Any) -> Any:
        plan = job_pb2.MemoryPlan(
            host_bytes={"weights": 4096, "moments": 8192},
            device_bytes={"weights": 512},
            host_total_bytes=12288,
            device_total_bytes=512,
            host_limit_bytes=1 << 30,
            fits=self.d.plan_fits,
            message="" if self.d.plan_fits else "needs 2 GiB",
            num_parameters=1024,
            device=self.d.plan_device,
            prediction=job_pb2.StepPrediction(
                step_s=0.25, tokens_per_second=2048, bound="compute", total_s=90, peak_flops_per_s=1e11
            ),
        )
        return job_pb2.PlanJobResponse(plan=plan, spec=request.spec)

    async def GetJob(self, request: Any, context: Any) -> Any:
        return job_pb2.GetJobResponse(job=self._job(request.job_id))

    async def ListJobs(self, request: Any, context: Any) -> Any:
        jobs = [job for job in self.d.jobs.values() if not request.states or job.state in request.states]
        return job_pb2.ListJobsResponse(jobs=reversed(jobs))  # newest first

    async def CancelJob(self, request: Any, context: Any) -> Any:
        self._job(request.job_id).state = job_pb2.JOB_STATE_CANCELLED
        return job_pb2.CancelJobResponse(job=self._job(request.job_id))

    async def PauseJob(self, request: Any, context: Any) -> Any:
        if self._job(request.job_id).state != job_pb2.JOB_STATE_RUNNING:
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, "it does not run", reason="WRONG_JOB_STATE")
        self._job(request.job_id).state = job_pb2.JOB_STATE_PAUSED
        return job_pb2.PauseJobResponse(job=self._job(request.job_id))

    async def ResumeJob(self, request: Any, context: Any) -> Any:
        self._job(request.job_id).state = job_pb2.JOB_STATE_QUEUED
        return job_pb2.ResumeJobResponse(job=self._job(request.job_id))

    async def UpdateJob(self, request: Any, context: Any) -> Any:
        self._job(request.job_id).spec.priority = request.priority
        return job_pb2.UpdateJobResponse(job=self._job(request.job_id))

    async def WatchJob(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self._job(request.job_id)
        cut_after = self.d.stream_cuts.pop(0) if self.d.stream_cuts else None
        for sent, event in enumerate(e for e in self.d.events if e.sequence > request.after_sequence):
            if sent == cut_after:
                raise Refusal(grpc.StatusCode.UNAVAILABLE, "the line went dead")
            yield job_pb2.WatchJobResponse(event=event)
        if self.d.never_ending:
            await asyncio.Event().wait()

    async def GetJobLogs(self, request: Any, context: Any) -> AsyncIterator[Any]:
        cut_after = self.d.stream_cuts.pop(0) if self.d.stream_cuts else None
        for sent, start in enumerate(range(request.offset, len(self.d.log), 10)):
            if cut_after is not None and sent == cut_after:
                raise Refusal(grpc.StatusCode.UNAVAILABLE, "the line went dead")
            yield job_pb2.GetJobLogsResponse(data=self.d.log[start : start + 10], offset=start)


class _Checkpoints(checkpoint_pb2_grpc.CheckpointServiceServicer):
    def __init__(self, daemon: FakeDaemon) -> None:
        self.d = daemon

    async def ListCheckpoints(self, request: Any, context: Any) -> Any:
        return checkpoint_pb2.ListCheckpointsResponse(checkpoints=self.d.checkpoints)

    async def ReadCheckpointFile(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.d.read_offsets.append(request.offset)
        content = self.d.files[f"{request.step}/{request.path}"]
        cut_after = self.d.stream_cuts.pop(0) if self.d.stream_cuts else None
        for sent, start in enumerate(range(request.offset, len(content), 1000)):
            if cut_after is not None and sent == cut_after:
                raise Refusal(grpc.StatusCode.UNAVAILABLE, "the line went dead")
            yield checkpoint_pb2.ReadCheckpointFileResponse(data=content[start : start + 1000], offset=start)

    async def DeleteCheckpoint(self, request: Any, context: Any) -> Any:
        self.d.checkpoints = [c for c in self.d.checkpoints if c.step != request.step]
        return checkpoint_pb2.DeleteCheckpointResponse()


class _Node(node_pb2_grpc.NodeServiceServicer):
    def __init__(self, daemon: FakeDaemon) -> None:
        self.d = daemon

    async def GetNode(self, request: Any, context: Any) -> Any:
        node = node_pb2.Node(
            hostname="gpubox",
            version="9.9",
            host_memory_limit_bytes=1 << 40,
            host_memory_available_bytes=1 << 39,
            num_cpus=64,
            num_jobs={"RUNNING": 1},
            user="ada",
            role="user",
        )
        return node_pb2.GetNodeResponse(node=node)


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeDaemon]:
    """A running fake daemon, and an environment that leads nowhere else."""
    for name in ("HORIZON_SERVER", "HORIZON_TOKEN", "HORIZON_CA", "HORIZON_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HORIZON_CONFIG_DIR", str(tmp_path / "config"))
    fake = FakeDaemon()
    fake.start()
    yield fake
    fake.close()


@pytest.fixture
def client(daemon: FakeDaemon) -> Iterator[Any]:
    """A blocking client of the fake daemon that retries quickly."""
    from horizon_client import Client

    with Client(daemon.address, token=TOKEN, unary_retry=QUICK, stream_retry=QUICK) as opened:
        yield opened


@pytest.fixture
def finished_job(daemon: FakeDaemon) -> str:
    """A job that has succeeded after ten steps, with twelve events."""
    job = daemon.add_job(job_pb2.JobSpec(name="first", model="m", dataset="d"), job_pb2.JOB_STATE_SUCCEEDED)
    running = job_pb2.StateEvent(state=job_pb2.JOB_STATE_RUNNING, message="on the device")
    daemon.events = [job_pb2.JobEvent(sequence=1, state=running)]
    for step in range(1, 11):
        event = job_pb2.StepEvent(step=step, num_steps=10, loss=1 / step, tokens_per_second=100, overlap_ratio=0.5)
        daemon.events.append(job_pb2.JobEvent(sequence=step + 1, step=event))
    end = job_pb2.StateEvent(state=job_pb2.JOB_STATE_SUCCEEDED)
    daemon.events.append(job_pb2.JobEvent(sequence=12, state=end))
    job.last_sequence, job.step, job.num_steps, job.queue_position = 12, 10, 10, 0
    return job.job_id


@pytest.fixture
def run(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    """Run a command line that speaks to the fake daemon, in an empty folder."""
    monkeypatch.setenv("HORIZON_SERVER", daemon.address)
    monkeypatch.setenv("HORIZON_TOKEN", TOKEN)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")

    def invoke(*args: str, stdin: str | None = None) -> Result:
        return CliRunner().invoke(horizon, list(args), input=stdin)

    return invoke

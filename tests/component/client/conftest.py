"""A real daemon in a thread, and a connection to it that fails where a test says so.

Its queue does not run: a job is in the state that a test has moved it to.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from click.testing import CliRunner, Result
from tests.daemon_parts import blob_file, daemon_parts
from tests.support.line import Line
from tests.support.served_daemon import ServedDaemon

from horizon_client import Client
from horizon_client.cli.root import horizon
from horizon_client.connection import RetryPolicy
from horizon_proto.v1 import job_pb2
from horizon_server.events import Payload, StepDone
from horizon_server.records.account import Principal
from horizon_server.records.job import JobRecord, JobState

ADA = Principal(name="ada", role="user", project="ada")
QUICK = RetryPolicy(max_attempts=1000, max_elapsed_s=120.0, first_wait_s=0.001, longest_wait_s=0.05)


class Daemon:
    """The daemon that `ada` uses, the line to it, and short ways to make what a test starts from."""

    def __init__(self, served: ServedDaemon, line: Line, token: str) -> None:
        self.served, self.line, self.token = served, line, token

    @property
    def address(self) -> str:
        return self.line.address

    @property
    def calls(self) -> list[str]:
        return self.line.calls

    def restart(self) -> None:
        """Stop and start it at the same address; what it has stored stays."""
        self.line.stop()
        self.served.terminate()
        self.served.start()
        self.line.upstream = self.served.endpoints["grpc"]
        self.line.start()

    def add_job(
        self,
        name: str = "job",
        *payloads: Payload,
        state: JobState = JobState.QUEUED,
        message: str = "",
        **changes: Any,
    ) -> JobRecord:
        """Submit a job of ada's and move it to `state`; `payloads` happen before the last move."""
        given = {"model": "tiny-base", "dataset": "gsm8k"} | changes
        return self.served.call(self.served.parts.job_in(state, ADA, *payloads, name=name, message=message, **given))

    def append(self, job: JobRecord, *payloads: Payload) -> JobRecord:
        """Let events happen to a job."""
        return self.served.call(self.served.parts.append(job, *payloads))

    def move(self, job: JobRecord, state: JobState, **fields: Any) -> JobRecord:
        """Change a job's state."""
        return self.served.call(self.served.parts.parts.journal.move(job, state, **fields))

    def job(self, job_id: str) -> JobRecord:
        return self.served.call(self.served.parts.job(job_id))

    def jobs(self) -> list[JobRecord]:
        """All of ada's, newest first."""
        return self.served.call(self.served.parts.services.jobs.list(ADA))[0]

    def add_dataset(self, name: str, content: bytes = b'{"text": "a"}\n') -> None:
        self.served.call(self.served.parts.dataset(ADA, name, content))

    def upload_start(self, content: bytes, arrived: bytes) -> None:
        """Leave the partial upload of an interrupted push of `content`."""

        async def chunks() -> AsyncIterator[bytes]:
            yield arrived

        blobs = self.served.parts.services.blobs
        self.served.call(blobs.write(ADA.name, blob_file("content", content).ref, 0, chunks()))

    def stored(self, content: bytes) -> bool:
        """Whether the daemon has that content whole."""
        return self.served.parts.services.blobs.store.holds(blob_file("content", content).ref)

    def write_log(self, job: JobRecord, content: bytes) -> None:
        self.served.parts.write_log(job, content)

    def add_checkpoint(self, job: JobRecord, step: int, files: dict[str, bytes], **fields: Any) -> None:
        self.served.parts.write_checkpoint(job, step, files, **fields)


@pytest.fixture(scope="session")
def stocked_state(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> tuple[Path, str]:
    """A state folder in which ada has the model `tiny-base` and the dataset `gsm8k`, and her token."""
    folder = tmp_path_factory.mktemp("stocked") / "state"

    async def stock() -> str:
        async with daemon_parts(folder, model_folder=model_folder, queue=False) as parts:
            ada = await parts.user("ada")
            await parts.dataset(ada, "gsm8k")
            await parts.model(ada, "tiny-base")
            return await parts.token("ada")

    return folder, asyncio.run(stock())


@pytest.fixture
def daemon(
    stocked_state: tuple[Path, str],
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
) -> Iterator[Daemon]:
    """A running daemon, and an environment that leads nowhere else."""
    for name in ("HORIZON_SERVER", "HORIZON_TOKEN", "HORIZON_CA", "HORIZON_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HORIZON_CONFIG_DIR", str(tmp_path / "config"))
    # Past what CliRunner takes for the output of the command.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.__stderr__))
    state = tmp_path_factory.mktemp("daemon") / "state"
    shutil.copytree(stocked_state[0], state)
    served = ServedDaemon(state, model_folder=model_folder, queue=False)
    try:
        line = Line(served.start().endpoints["grpc"])
        try:
            line.start()
            yield Daemon(served, line, stocked_state[1])
        finally:
            line.close()
    finally:
        served.close()
        structlog.reset_defaults()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    """A blocking client that retries quickly."""
    with Client(daemon.address, token=daemon.token, unary_retry=QUICK, stream_retry=QUICK) as opened:
        yield opened


@pytest.fixture
def make_step() -> Callable[..., StepDone]:
    """Make a finished step of ten."""

    def make(step: int, **figures: Any) -> StepDone:
        usual = {
            "num_steps": 10,
            "loss": 1 / step,
            "grad_norm": 0.5,
            "learning_rate": 1e-4,
            "epoch": 0.5,
            "overlap_ratio": 0.5,
            "num_input_tokens_seen": step,
            "num_tokens": 1,
            "tokens_per_second": 100,
            "duration_s": 0.5,
        }
        return StepDone(step=step, **(usual | figures))

    return make


@pytest.fixture
def finished_job(daemon: Daemon, make_step: Callable[..., StepDone]) -> JobRecord:
    """The job `first`, which has succeeded after ten steps; it has fifteen events, of which steps are 5 to 14."""
    return daemon.add_job("first", *map(make_step, range(1, 11)), state=JobState.SUCCEEDED)


@pytest.fixture
def running_job(daemon: Daemon, make_step: Callable[..., StepDone]) -> JobRecord:
    """The job `first`, which has done two steps; it has six events and will have no more."""
    job = daemon.add_job("first", state=JobState.RUNNING)
    return daemon.append(job, make_step(1), make_step(2))


@pytest.fixture
def planned(daemon: Daemon) -> job_pb2.MemoryPlan:
    """What every plan is answered with: a job on a GPU, which this machine need not have."""
    plan = job_pb2.MemoryPlan(
        host_bytes={"weights": 4096, "moments": 8192},
        device_bytes={"weights": 512},
        host_total_bytes=12288,
        device_total_bytes=512,
        host_limit_bytes=1 << 30,
        fits=True,
        num_parameters=1024,
        device="cuda",
        compute_dtype="bfloat16",
        hint="another setting is faster",
        kept=job_pb2.KeptMemory(
            resident_layers=12,
            resident_bytes=3 << 28,
            packed_layers=16,
            packed_bytes=1 << 28,
            resident_head=True,
            resident_table=True,
            end_bytes=1 << 30,
            product_layers=1,
            product_bytes=1 << 29,
            attention_layers=2,
            attention_bytes=1 << 28,
            saved_share=0.042,
        ),
        prediction=job_pb2.StepPrediction(
            step_s=0.25, tokens_per_second=2048, bound="compute", total_s=90, peak_flops_per_s=1e11
        ),
        references=job_pb2.ReferencePass(tokens_per_second=8192, num_tokens=245760, tokens_estimated=True, total_s=30),
        num_steps=360,
        steps_estimated=True,
    )
    daemon.line.replace["PlanJob"] = lambda request: job_pb2.PlanJobResponse(plan=plan, spec=request.spec)
    return plan


@pytest.fixture
def run(daemon: Daemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    """Run a command line that speaks to the daemon, in an empty folder."""
    monkeypatch.setenv("HORIZON_SERVER", daemon.address)
    monkeypatch.setenv("HORIZON_TOKEN", daemon.token)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")

    def invoke(*args: str, stdin: str | None = None) -> Result:
        return CliRunner().invoke(horizon, list(args), input=stdin)

    return invoke

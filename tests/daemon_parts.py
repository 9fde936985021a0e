"""One builder of the whole daemon inside the test's process: real services, database, journal, queue and children.

Only the worker is another: `tests.scripted_worker` follows a script instead of training. What the daemon listens on is
left out; tests of gRPC and REST start their servers over `DaemonParts.services`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.support.processes import collect_workers, processes_of

from horizon_server.api.services import Services
from horizon_server.db.database import Database
from horizon_server.demo.recipe import demo_chats
from horizon_server.events import JobEvent, Payload, StepDone
from horizon_server.jobs.scheduler import LOOK_EVERY_S
from horizon_server.main import run_queue
from horizon_server.records.account import Principal
from horizon_server.records.blob import BlobFile, DatasetRecord, ModelRecord
from horizon_server.records.job import JobRecord, JobState
from horizon_server.records.sharing import Allowance, Holder, NodeCondition, NodeMode, Quota
from horizon_server.settings import Settings
from horizon_server.spec import JobSpec, parse_job_spec
from horizon_server.store.manifest import Manifest, record_file, write_manifest
from horizon_server.wiring import Parts, wire

REPOSITORY = Path(__file__).parents[1]
WAIT_S = 300.0
_NOTHING: Mapping[str, bytes] = MappingProxyType({})

ROOT = Principal(name="root", role="admin", project="root")

_RUNNING = (JobState.PREPARING, JobState.STARTING, JobState.RUNNING)
_MOVES = {
    JobState.QUEUED: (),
    JobState.PREPARING: _RUNNING[:1],
    JobState.STARTING: _RUNNING[:2],
    JobState.RUNNING: _RUNNING,
    JobState.STOPPING: (*_RUNNING, JobState.STOPPING),
    JobState.CANCELLED: (*_RUNNING, JobState.STOPPING, JobState.CANCELLED),
    JobState.SUCCEEDED: (*_RUNNING, JobState.SUCCEEDED),
    JobState.FAILED: (*_RUNNING, JobState.FAILED),
}
"""The states that a job without a queue is moved through."""

Moment = int | str
"""When a worker does something: `start` and `references` (before it is ready), a step's number (before that step), or
`end`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Script:
    """What the worker of a job does. Dying, exiting and failing happen in the first attempt only, unless
    `every_attempt`."""

    num_steps: int = 3
    checkpoint_every: int = 0
    """0 writes them as the job's spec says. The last step always has one."""
    step_s: float = 0.0
    """How long a step takes."""
    eval_at: Sequence[int] = ()
    learns: bool = False
    """Say figures that look like those of training, as `tests.support.learning` makes them."""
    hold_at: Moment | None = None
    """Wait there for an order, or for `DaemonParts.release`."""
    deaf: bool = False
    """Hear no order while holding, and hold until released and ordered to stop."""
    die_at: Moment | None = None
    exit_at: Moment | None = None
    fail_at: Moment | None = None
    break_at: int | None = None
    """Before that step, fail as a worker whose GPU does; the memory is whole."""
    compute_share: float = 1.0
    """Part of a step's time in which it says that the device was busy."""
    keep_turn: bool = False
    """Never give the device back between steps, whatever the daemon wants."""
    die_on_device: bool = False
    """Once released, at the end of a step, while it has its turn."""
    die_waiting: bool = False
    """Once released, when it next asks for the device."""
    checkpoint_bytes: int = 24
    """The size that it reports of a checkpoint, which it reports to have written in a tenth of a second."""
    slow_at: int | None = None
    """Take `slow_s` for that step, at work all the time."""
    slow_s: float = 0.0
    hang_at: int | None = None
    """Do nothing any more in that step of the first attempt, while it has its turn; the link still works."""
    no_space: bool = False
    """A checkpoint that an order in the first attempt leads to has no space on the disk."""
    references: Sequence[int] | None = None
    """Tokens done and in all of the pass before the first step, which it reports; it may hold there at `references`."""
    early_stop_at: int | None = None
    """End with success after that step, as if its evaluations no longer got better."""
    every_attempt: bool = False


def chat_rows(num_rows: int = 8) -> bytes:
    """Return a small dataset file in the messages format."""
    return "".join(json.dumps({"messages": chat}) + "\n" for chat in demo_chats()[:num_rows]).encode()


def blob_file(path: str, content: bytes) -> BlobFile:
    """Return how a file of that content is announced."""
    return BlobFile(path=path, sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content))


class DaemonParts:
    """The wired daemon of one state folder, and short ways to do what its users do."""

    def __init__(
        self, parts: Parts, database: Database, settings: Settings, model_folder: Path, worker_module: str
    ) -> None:
        self.parts = parts
        self.database = database
        self.settings = settings
        self.state_dir = settings.state_dir
        self.model_folder = model_folder
        self.worker_module = worker_module
        """A folder that jobs may name as their model without a push."""
        self._queue: asyncio.Task[None] | None = None

    @property
    def services(self) -> Services:
        """What gRPC and REST are given."""
        return self.parts.services

    async def user(self, name: str, *, role: str = "user") -> Principal:
        """Make a user."""
        user = await self.services.accounts.add_user(name, role=role)
        return Principal(name=user.name, role=user.role, project=user.project)

    async def token(self, user: str) -> str:
        """Return a token of an existing user."""
        _, secret = await self.services.accounts.create_token(user, lifetime_s=None)
        return secret

    async def upload(self, owner: str, content: bytes) -> None:
        """Send a whole content, as one piece."""

        async def chunks() -> AsyncIterator[bytes]:
            for start in range(0, len(content), 2**20):
                yield content[start : start + 2**20]

        await self.services.blobs.write(owner, blob_file("content", content).ref, 0, chunks())

    async def dataset(
        self, owner: Principal, name: str = "chats", content: bytes | None = None, *, path: str | None = None
    ) -> DatasetRecord:
        """Push a dataset of one file until it is READY."""
        content = chat_rows() if content is None else content
        record = await self.services.datasets.create(
            owner,
            request_id=str(uuid.uuid4()),
            name=name,
            format="auto",
            field_map={},
            files=[blob_file(path or f"{name}.jsonl", content)],
        )
        await self.upload(owner.name, content)
        return await self.services.datasets.finalize(owner, record.dataset_id)

    async def model(
        self, owner: Principal, name: str = "tiny", folder: Path | None = None, *, extra: Mapping[str, bytes] = _NOTHING
    ) -> ModelRecord:
        """Push a model folder, and `extra` files, until it is READY."""
        contents = {path.name: path.read_bytes() for path in sorted((folder or self.model_folder).iterdir())} | {
            **extra
        }
        files = [blob_file(path, content) for path, content in contents.items()]
        record = await self.services.models.create(owner, request_id=str(uuid.uuid4()), name=name, files=files)
        for content in contents.values():
            await self.upload(owner.name, content)
        return await self.services.models.finalize(owner, record.model_id)

    def spec(self, name: str = "job", **changes: Any) -> JobSpec:
        """Return a spec of dataset `chats` and the model folder; what `train` names is laid over the usual numbers."""
        train = {"max_steps": 3, "sequence_length": 64, "tokens_per_step": 128} | changes.pop("train", {})
        usual = {"name": name, "model": str(self.model_folder), "dataset": "chats", "train": train}
        return parse_job_spec(usual | changes)

    def script(self, job_name: str, script: Script) -> None:
        """Decide what the workers of jobs of this name do."""
        folder = self.state_dir / "scripts"
        folder.mkdir(exist_ok=True)
        (folder / f"{job_name}.json").write_text(json.dumps(dataclasses.asdict(script)))

    def release(self, job_name: str) -> None:
        """Let workers of jobs of this name pass where their script holds them."""
        folder = self.state_dir / "scripts"
        folder.mkdir(exist_ok=True)
        (folder / f"{job_name}.released").touch()

    async def submit(
        self, owner: Principal, name: str = "job", script: Script | None = None, **changes: Any
    ) -> JobRecord:
        """Submit a job whose worker follows `script`."""
        if script is not None:
            self.script(name, script)
        spec = self.spec(name, **changes)
        return await self.services.jobs.submit(owner, request_id=str(uuid.uuid4()), spec=spec)

    async def job_in(
        self,
        state: JobState,
        owner: Principal,
        *payloads: Payload,
        name: str = "job",
        message: str = "",
        **changes: Any,
    ) -> JobRecord:
        """Submit a job and move it to `state` by hand; `payloads` happen before the last move. Only without a queue."""
        job = await self.submit(owner, name, **changes)
        *before, last = (JobState.QUEUED, *_MOVES[state])
        for step in before[1:]:
            job = await self.parts.journal.move(job, step, attempt=1)
        job = await self.append(job, *payloads)
        return job if last is JobState.QUEUED else await self.parts.journal.move(job, last, attempt=1, message=message)

    async def append(self, job: JobRecord, *payloads: Payload) -> JobRecord:
        """Let events happen to a job."""
        for payload in payloads:
            fields: dict[str, Any] = {}
            if isinstance(payload, StepDone):
                fields = {"last_step": payload, "step": payload.step, "num_steps": payload.num_steps}
            await self.parts.journal.append(job.job_id, payload, **fields)
        return await self.job(job.job_id)

    def write_log(self, job: JobRecord, content: bytes) -> None:
        """Write the log of the job's present attempt."""
        folder = self.state_dir / "jobs" / job.job_id / f"attempt-{job.attempt}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "worker.log").write_bytes(content)

    def write_checkpoint(
        self, job: JobRecord, step: int, files: dict[str, bytes], *, eval_loss: float | None = None
    ) -> Path:
        """Write a checkpoint of the job."""
        folder = self.state_dir / "jobs" / job.job_id / "checkpoints" / f"step-{step:08d}"
        last_eval = None if eval_loss is None else [step, eval_loss, eval_loss, False]
        state = json.dumps({"last_eval": last_eval}).encode()
        for path, content in {"trainer/trainer_state.json": state, **files}.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        write_manifest(folder, Manifest(files={path: record_file(folder / path) for path in files}, versions={}))
        return folder

    async def job(self, job_id: str) -> JobRecord:
        """Return a job of any owner as it stands."""
        return await self.services.jobs.get(ROOT, job_id)

    async def set_node(self, mode: NodeMode = "open", **values: Any) -> None:
        """Open, cordon or drain the node as an admin does. While it is cordoned, jobs stay in the queue."""
        await self.services.sharing.set_node(ROOT, NodeCondition(mode=mode, **values))

    async def allow(self, holder: Holder, name: str, *, weight: float = 1.0, **quota: Any) -> None:
        """Set what a user or project may take; the scheduler sees it at its next look."""
        allowance = Allowance(holder=holder, name=name, weight=weight, quota=Quota(**quota))
        await self.services.sharing.store.set_allowance(allowance)
        self.parts.scheduler.wake()

    async def until(self, job_id: str, *states: JobState, step: int = 0, attempt: int = 0) -> JobRecord:
        """Wait until the job is in one of the states (where any is named), has done that many steps, and is at least in
        that attempt."""
        async with asyncio.timeout(WAIT_S):
            async for _ in self.parts.journal.follow(job_id, 0):
                job = await self.job(job_id)
                if (not states or job.job_state in states) and job.step >= step and job.attempt >= attempt:
                    return job
        job = await self.job(job_id)
        raise AssertionError(f"the job ended {job.job_state} at step {job.step}: {job.reason} {job.message}")

    async def events(self, job_id: str) -> list[JobEvent]:
        """Return all events of a job that has ended."""
        async with asyncio.timeout(WAIT_S):
            return [event async for event in self.parts.journal.follow(job_id, 0)]

    async def settle(self) -> None:
        """Settle what an earlier daemon left, where none of its workers is alive."""
        await self.parts.scheduler.recover()
        await self.parts.scheduler.until_empty()

    def start_queue(self) -> None:
        """Settle what an earlier daemon left and serve the queue, until `drain`."""
        self._queue = asyncio.create_task(run_queue(self.parts), name="queue")

    async def drain(self, timeout_s: float = WAIT_S) -> None:
        """Stop as on SIGTERM: checkpoint the resident jobs, then end the queue and every watch."""
        await self.parts.drain(timeout_s)
        if self._queue is not None:
            await asyncio.wait_for(self._queue, WAIT_S)

    async def crash(self) -> None:
        """Leave the database as a daemon does that is killed together with its workers."""
        await self.vanish()
        killed = processes_of(self.worker_module, self.state_dir)
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        end_s = time.monotonic() + WAIT_S
        while processes_of(self.worker_module, self.state_dir):
            assert time.monotonic() < end_s, "a killed worker is still there"
            await asyncio.sleep(0.01)
        for pid in killed:
            with contextlib.suppress(ChildProcessError):
                await asyncio.to_thread(os.waitpid, pid, 0)

    async def vanish(self) -> None:
        """Leave database and workers as a daemon does that is killed: the workers train on."""
        assert self._queue is not None
        self._queue.cancel()
        await asyncio.wait([self._queue])
        self._queue = None

    async def close(self) -> None:
        """End everything."""
        await self.drain(0.0)
        await asyncio.gather(self.services.datasets.close(), self.services.models.close())


@asynccontextmanager
async def daemon_parts(
    state_dir: Path,
    *,
    model_folder: Path,
    prepared: Path | None = None,
    queue: bool = True,
    worker_module: str = "tests.scripted_worker",
    look_every_s: float = LOOK_EVERY_S,
    compiles: bool = False,
    **settings: Any,
) -> AsyncIterator[DaemonParts]:
    """Make and run a daemon without its servers.

    Args:
        state_dir: made where it is missing; another call with the same one is a restart.
        model_folder: what `write_demo_model` has written, outside the state folder.
        prepared: prepared data shared with other daemons, so that the same data is prepared once.
        queue: whether jobs are run; `DaemonParts.start_queue` does it later.
        worker_module: what trains; WORKER_MODULE of jobs/attempt.py is the real one.
        look_every_s: how often the scheduler looks at the queue where nothing happens.
        compiles: whether layers are compiled ahead of jobs, which takes a minute and every processor.
        settings: more of the daemon's settings.
    """
    state_dir.mkdir(parents=True, exist_ok=True)
    if prepared is not None and not (state_dir / "prepared").exists():
        (state_dir / "prepared").symlink_to(prepared)
    # A slice that no test has to wait for.
    # And no restart of a worker that a script has killed, where a test does not want it.
    usual = {
        "model_roots": (model_folder,),
        "drain_timeout_s": 30.0,
        "time_slice_s": 0.1,
        "max_restarts": 0,
        "spare_worker": False,
    }
    made = Settings(**{"state_dir": state_dir, **usual, **settings})
    database = await Database.open(made.database_path)
    try:
        parts = await wire(
            made,
            database,
            found=(),
            usable=(),
            worker_module=worker_module,
            more_environment={"PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])},
        )
        parts.scheduler.look_every_s = look_every_s
        if not compiles:
            await parts.scheduler.runtime.compiler.close()
        daemon = DaemonParts(parts, database, made, model_folder, worker_module)
        if queue:
            daemon.start_queue()
        try:
            yield daemon
        finally:
            await daemon.close()
    finally:
        await database.close()
        collect_workers(state_dir / "jobs")  # those that an earlier daemon of this process had left

"""One attempt at a job, from its turn on the device to its end: prepare the data, lend the memory, run the worker, judge how it ended."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from horizon_server.children.child import CANCEL, STOP, Child, log_tail
from horizon_server.errors import (
    DatabaseUnavailable,
    DiskFull,
    DoesNotFit,
    HorizonError,
    WorkerCrashed,
    WorkerDied,
    WorkerFailed,
)
from horizon_server.events import AttemptReady, Message, StepDone, WorkerLine
from horizon_server.jobs.folders import JobFolders
from horizon_server.jobs.journal import Journal
from horizon_server.jobs.preparation import FindInputs, Preparation
from horizon_server.planning.machine import Accelerator, Gpu, worker_environment
from horizon_server.planning.planner import Planner, WorkerMemory
from horizon_server.records.job import ORDERED, JobRecord, JobState, Wanted

log = structlog.get_logger(__name__)

# What the worker is sent, and what the job says of it.
_ORDERS = {
    Wanted.CANCEL: (CANCEL, "cancelled by a user"),
    Wanted.PAUSE: (STOP, "paused by a user"),
    Wanted.DRAIN: (STOP, "the daemon shuts down"),
}
WORKER_MODULE = "horizon_server.worker"

# Errors whose cause is in the log of the attempt.
_UNEXPLAINED = (WorkerFailed, WorkerDied, WorkerCrashed)

# A cancelled worker that is still alive after this is killed: nothing of it is wanted any more.
CANCEL_GRACE_S = 60.0


@dataclass(kw_only=True, eq=False)
class Attempt:
    """One execution of a job.

    Thread: belongs to one event loop. `run` is called once; `stop` may be called any number of times while it runs.
    """

    job: JobRecord
    journal: Journal
    find_inputs: FindInputs
    folders: JobFolders
    planner: Planner
    preparation: Preparation
    num_threads: int
    environment: Mapping[str, str]
    trace: bool
    gpu: Accelerator | None = None
    numa_interleave: bool = True
    worker_module: str = WORKER_MODULE
    _child: Child | None = field(init=False, default=None)
    _wanted: Wanted = field(init=False, default=Wanted.NOTHING)
    _over: bool = field(init=False, default=False)
    # Held while the state changes, so that a stop and the attempt's own progress never pass each other.
    _moving: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self._number = self.job.attempt + 1
        self._log = self.folders.log(self.job.job_id, self._number)

    async def run(self) -> None:
        """Carry the job from QUEUED to the end of this attempt. Raises WrongJobState when the job has left the queue meanwhile."""
        begin: dict[str, Any] = {"attempt": self._number, "started_s": self.job.started_s or time.time()}
        with structlog.contextvars.bound_contextvars(job_id=self.job.job_id, attempt=self._number):
            self.job = await self.journal.patiently(lambda: self.journal.move(self.job, JobState.PREPARING, **begin))
            try:
                self._log.parent.mkdir(parents=True, exist_ok=True)
                await self._prepare_and_train()
            # Whatever goes wrong in here ends the attempt with its true reason, and never the daemon.
            except HorizonError as error:
                if isinstance(error, _UNEXPLAINED):
                    await self._explain()
                await self._finish("failed", reason=error.reason, message=error.message)
            except OSError as error:
                await self._finish("failed", reason="IO_ERROR", message=f"the node failed: {error}")

    async def stop(self, wanted: Wanted) -> None:
        """Ask it to end. Raises DiskFull or DatabaseUnavailable when a user's order cannot be stored; the attempt continues then."""
        order, message = _ORDERS[wanted]
        async with self._moving:
            if self._wanted in (Wanted.CANCEL, wanted) or self._over:
                return
            # The next daemon knows by itself that this one has ended, so a drain need not be stored.
            fields = {} if wanted is Wanted.DRAIN else {"wanted": wanted}
            try:
                if self.job.job_state in (JobState.PREPARING, JobState.STARTING, JobState.RUNNING):
                    self.job = await self.journal.move(
                        self.job, JobState.STOPPING, reason=wanted.name, message=message, **fields
                    )
                elif fields:
                    self.job = await self.journal.store.set(self.job.job_id, **fields)
            except (DiskFull, DatabaseUnavailable) as error:
                if wanted is not Wanted.DRAIN:
                    raise
                log.error("the drain cannot be stored", why=error.message)  # the worker is asked to stop all the same
            self._wanted = wanted
        self.preparation.stop()
        if self._child is not None:
            self._child.send_order(order)
            if wanted is Wanted.CANCEL:
                asyncio.get_running_loop().call_later(CANCEL_GRACE_S, self._child.kill)

    def kill(self) -> None:
        """End the worker at once; the job continues from its last checkpoint."""
        self.preparation.stop()
        if self._child is not None:
            self._child.kill()

    async def _prepare_and_train(self) -> None:
        model, dataset, evaluation_data = await self.journal.patiently(lambda: self.find_inputs(self.job))
        prepare = functools.partial(
            self.preparation.run,
            self.job.spec,
            model,
            log=self._log,
            environment=self.environment,
            publish=functools.partial(self.journal.append, self.job.job_id),
        )
        prepared = await prepare(dataset)
        evaluation = prepared.evaluation if prepared else None
        if prepared and evaluation_data is not None:
            held_out = await prepare(evaluation_data)
            evaluation = held_out.folder if held_out else None
        if prepared is None or self._wanted:
            await self._finish("stopped")
            return
        # Planned again: since the submission, the limits or the model's folder on the node may have changed.
        memory = await asyncio.to_thread(self.planner.worker_memory, self.job.spec, model)
        if not memory.plan.fits:
            raise DoesNotFit(memory.plan.message)
        known = {"plan": memory.plan, "data_report": prepared.report}
        if not await self._advance(JobState.STARTING, message=memory.plan.summary, **known):
            await self._finish("stopped")
            return
        await self._train(memory, model=model, prepared=prepared.folder, evaluation=evaluation)

    async def _train(self, memory: WorkerMemory, *, model: Path, prepared: Path, evaluation: Path | None) -> None:
        with memory.lent() as planes:
            request = self._request(memory, planes, model=model, prepared=prepared, evaluation=evaluation)
            try:
                outcome = await self._run_worker(request, tuple(planes.values()))
            except HorizonError as error:
                if not isinstance(error, _UNEXPLAINED):  # `run` does it for those
                    await self._explain()
                raise
        await self._finish(outcome)

    def _request(
        self, memory: WorkerMemory, planes: dict[str, int], *, model: Path, prepared: Path, evaluation: Path | None
    ) -> dict[str, Any]:
        checkpoints = self.folders.checkpoints(self.job.job_id)
        newest = checkpoints.newest()
        return {
            "job_id": self.job.job_id,
            "attempt": self.job.attempt,
            "spec": self.job.spec.to_mapping(),
            "model": str(model),
            "prepared": str(prepared),
            "evaluation": None if evaluation is None else str(evaluation),
            "checkpoints": str(checkpoints.path),
            "resume_from": None if newest is None else str(newest),
            "planes": planes,
            "grad_dtype_bytes": memory.grad_dtype_bytes,
            "num_threads": self.num_threads,
            "device": memory.device_kind,
            "compute_dtype": memory.compute_dtype,
            "gpu": self.gpu.uuid if memory.device_kind == "cuda" and isinstance(self.gpu, Gpu) else "",
            "numa_interleave": self.numa_interleave,
            "device_limit_bytes": memory.plan.device_limit_bytes,
            "activation_placement": memory.activation_placement,
            "micro_batch_tokens": memory.micro_batch_tokens,
            "compiled": str(self.folders.compiled),
            "trace": str(self._log.with_name("trace.json")) if self.trace else None,
        }

    async def _run_worker(self, request: dict[str, Any], fds: tuple[int, ...]) -> str:
        """Return how the worker ended. Afterwards it is gone, however that came: the planes can be given back."""
        child = await Child.start(
            self.worker_module, request, who="the worker",
            environment=worker_environment(self.environment, request["device"], self.gpu),
            request_file=self._log.with_name("request.json"), log_file=self._log, pass_fds=fds,
        )  # fmt: skip
        try:
            log.info("worker started", pid=child.pid)
            # A worker may have ended by now, on a busy machine even with success: then no next daemon has to wait for it.
            if (started := start_time_of(child.pid)) is not None:
                self._log.with_name("pid").write_text(f"{child.pid} {started}", "utf-8")
            self._child = child
            if self._wanted:  # while the worker was being started
                child.send_order(_ORDERS[self._wanted][0])
            return str(await child.answer(self._on_line))
        finally:
            self._child = None
            child.kill()
            await child.wait()

    async def _on_line(self, line: WorkerLine) -> None:
        job_id = self.job.job_id
        match line:
            case AttemptReady():
                assert self.job.plan is not None, "STARTING sets it"
                plan = self.job.plan.with_steps(line.num_steps)
                known = {"plan": plan, "data_report": {**self.job.data_report, "packed_rows": line.packed_rows}}
                await self._advance(JobState.RUNNING, step=line.step, num_steps=line.num_steps, **known)
            case StepDone():
                await self.journal.append(job_id, line, step=line.step, num_steps=line.num_steps, last_step=line)
            case _:
                await self.journal.append(job_id, line)

    async def _advance(self, state: JobState, **fields: Any) -> bool:
        """Move on, unless the attempt has been asked to stop."""

        async def move() -> bool:
            async with self._moving:  # not held while waiting for the database, so that a stop is heard then
                if self._wanted:
                    return False
                self.job = await self.journal.move(self.job, state, **fields)
                return True

        return await self.journal.patiently(move)

    async def _explain(self) -> None:
        # A worker that is killed because its job is cancelled has nothing to explain.
        if self._wanted is not Wanted.CANCEL and (tail := await asyncio.to_thread(log_tail, self._log)):
            await self.journal.append(self.job.job_id, Message(level="error", text=f"last lines of the log:\n{tail}"))

    async def _finish(self, outcome: str, *, reason: str = "", message: str = "") -> None:
        """Move the job to where this end leads, given what was asked of it.

        `outcome`: succeeded, stopped (checkpointed, may be resumed), or failed.
        """
        async with self._moving:
            self._over = True
        if outcome == "succeeded":
            target = JobState.SUCCEEDED
        elif self._wanted is Wanted.CANCEL:
            target, reason, message = ORDERED[Wanted.CANCEL]
        elif outcome == "failed" and self._wanted is not Wanted.DRAIN:
            # Where the state folder is need not be known to the job's owner.
            target, message = JobState.FAILED, message.replace(f"{self.folders.state_dir}/", "")
        elif self._wanted is Wanted.PAUSE:
            target, reason, message = ORDERED[Wanted.PAUSE]
        else:
            # Also where the worker failed: at the end of the drain's time it is killed.
            target, reason = JobState.QUEUED, "DRAINED"
            message = "the daemon shut down; it continues when the daemon is back"
        self.job = await self.journal.patiently(
            lambda: self.journal.move(self.job, target, reason=reason, message=message)
        )
        log.info("attempt ended", job_state=target.value, reason=reason, message=message)


def start_time_of(pid: int) -> str | None:
    """Return the kernel's start time of a living process: with the pid it names one process forever, the pid alone does not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("ascii").rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    # Z: dead, but not yet collected by its parent; in a container without an init that may never happen.
    return None if fields[0] == "Z" else fields[19]


def orphan_pid(folder: Path) -> int | None:
    """Return the pid of an attempt's worker when that very process is still alive."""
    try:
        pid, started = (folder / "pid").read_text("utf-8").split()
        return int(pid) if start_time_of(int(pid)) == started else None
    except (OSError, ValueError):
        return None

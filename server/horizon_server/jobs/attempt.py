"""One attempt at a job, from its turn on the device to its end: prepare the data, lend the memory, run the worker, judge how it ended.

Whatever goes wrong in here ends the attempt with its true reason, and never the daemon.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from horizon_server.children.child import CANCEL, STOP, Child, exit_reason, log_tail
from horizon_server.errors import DiskFull, DoesNotFit, HorizonError, WorkerFailed
from horizon_server.events import (
    AttemptEnded,
    AttemptReady,
    CheckpointWritten,
    EvalDone,
    Message,
    PrepareProgress,
    StepDone,
    WorkerLine,
)
from horizon_server.jobs.folders import JobFolders
from horizon_server.jobs.journal import Journal
from horizon_server.jobs.ports import DatasetFiles, PreparedData, Resources
from horizon_server.jobs.preparation import Preparation
from horizon_server.planning.machine import oom_kills
from horizon_server.planning.planner import Planner, WorkerMemory
from horizon_server.records.job import JobRecord, JobState

log = structlog.get_logger(__name__)

_STOP_MESSAGE = {"cancel": "cancelled by a user", "pause": "paused by a user", "drain": "the daemon shuts down"}

WORKER_MODULE = "horizon_server.worker"

CANCEL_GRACE_S = 60.0
"""A cancelled worker that is still alive after this is killed: nothing of it is wanted any more."""


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """What every worker of this daemon gets, whatever the job."""

    num_threads: int
    environment: dict[str, str]
    trace: bool = False
    module: str = WORKER_MODULE


class Attempt:
    """One execution of a job.

    Thread: belongs to one event loop. `run` is called once; `stop` may be called any number of times while it runs.
    """

    def __init__(
        self,
        job: JobRecord,
        *,
        journal: Journal,
        resources: Resources,
        folders: JobFolders,
        planner: Planner,
        preparation: Preparation,
        options: WorkerOptions,
    ) -> None:
        self.job = job
        self._journal = journal
        self._resources = resources
        self._folders = folders
        self._planner = planner
        self._preparation = preparation
        self._options = options
        self._child: Child | None = None
        self._wanted = ""
        self._ended: AttemptEnded | None = None
        self._over = False
        self._moving = asyncio.Lock()
        """Held while the state changes, so that a stop and the attempt's own progress never pass each other."""

    async def run(self) -> None:
        """Carry the job from QUEUED to wherever this attempt ends."""
        number = self.job.attempt + 1
        self.job = await self._journal.move(
            self.job,
            JobState.PREPARING,
            attempt=number,
            started_s=self.job.started_s or time.time(),
            wanted="",
        )
        structlog.contextvars.bind_contextvars(job_id=self.job.job_id, attempt=number)
        try:
            await self._prepare_and_train()
        except HorizonError as error:
            if isinstance(error, WorkerFailed):
                await self._explain(self._folders.log(self.job.job_id, number))
            await self._finish(AttemptEnded(outcome="failed", reason=error.reason, message=error.message))
        except OSError as error:
            await self._finish(AttemptEnded(outcome="failed", reason="IO_ERROR", message=f"the node failed: {error}"))

    async def stop(self, wanted: str) -> None:
        """Ask it to end: `cancel`, `pause`, or `drain` (checkpoint, and queue again when the daemon is back)."""
        async with self._moving:
            if self._wanted in ("cancel", wanted) or self._over:
                return
            self._wanted = wanted
            if wanted != "drain":
                self.job = await self._journal.store.set(self.job.job_id, wanted=wanted)
            if self.job.job_state in (JobState.PREPARING, JobState.STARTING, JobState.RUNNING):
                await self._note_stop(wanted)
        self._preparation.stop()
        if self._child is not None:
            self._child.tell(CANCEL if wanted == "cancel" else STOP)
            if wanted == "cancel":
                asyncio.get_running_loop().call_later(CANCEL_GRACE_S, self._child.kill)

    async def _note_stop(self, wanted: str) -> None:
        try:
            self.job = await self._journal.move(
                self.job, JobState.STOPPING, reason=wanted.upper(), message=_STOP_MESSAGE[wanted]
            )
        except DiskFull:
            if wanted != "drain":
                raise
            log.exception("the drain cannot be noted")  # the worker is told all the same

    def kill(self) -> None:
        """End the worker at once; the job goes on from its last checkpoint."""
        self._preparation.stop()
        if self._child is not None:
            self._child.kill()

    async def _prepare_and_train(self) -> None:
        folder = await self._resources.model_folder(self.job.model_id)
        prepared = await self._prepare(await self._resources.dataset_by_id(self.job.dataset_id), folder)
        evaluation = prepared.evaluation if prepared else None
        if prepared and self.job.eval_dataset_id:
            held_out = await self._prepare(await self._resources.dataset_by_id(self.job.eval_dataset_id), folder)
            evaluation = held_out.folder if held_out else None
        if prepared is None or self._wanted:
            await self._finish(AttemptEnded(outcome="stopped"))
            return
        memory = await asyncio.to_thread(self._planner.worker_memory, self.job.spec, folder)
        if not memory.plan.fits:
            raise DoesNotFit(memory.plan.message)
        known = {"plan": memory.plan, "data_report": prepared.report}
        if not await self._advance(JobState.STARTING, message=memory.plan.summary, **known):
            await self._finish(AttemptEnded(outcome="stopped"))
            return
        await self._train(memory, model=folder, prepared=prepared.folder, evaluation=evaluation)

    async def _prepare(self, dataset: DatasetFiles, model: Path) -> PreparedData | None:
        """Return what was prepared, or None when that was stopped."""

        async def tell(payload: PrepareProgress | Message) -> None:
            await self._journal.append(self.job.job_id, payload)

        attempt_log = self._folders.log(self.job.job_id, self.job.attempt)
        self._folders.attempt(self.job.job_id, self.job.attempt)
        return await self._preparation.run(
            self.job.spec, dataset, model, log=attempt_log, environment=self._options.environment, tell=tell
        )

    async def _train(self, memory: WorkerMemory, *, model: Path, prepared: Path, evaluation: Path | None) -> None:
        attempt_log = self._folders.log(self.job.job_id, self.job.attempt)
        kills_before = oom_kills()
        with memory.lent() as planes:
            request = self._request(memory, planes, model=model, prepared=prepared, evaluation=evaluation)
            async with self._running(request, tuple(planes.values()), attempt_log) as child:
                async for line in child.lines():
                    await self._on_line(line)
                code = await child.wait()
        if self._ended is None:
            why = exit_reason(code, oom_killed=oom_kills() > kills_before)
            await self._explain(attempt_log)
            self._ended = AttemptEnded(outcome="failed", reason="WORKER_DIED", message=why)
        elif self._ended.outcome == "failed":
            await self._explain(attempt_log)
        await self._finish(self._ended)

    def _request(
        self, memory: WorkerMemory, planes: dict[str, int], *, model: Path, prepared: Path, evaluation: Path | None
    ) -> dict[str, Any]:
        checkpoints = self._folders.checkpoints(self.job.job_id)
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
            "num_threads": self._options.num_threads,
            "device": memory.device_kind,
            "device_limit_bytes": memory.plan.device_limit_bytes,
            "activation_placement": memory.activation_placement,
            "trace": self._options.trace,
        }

    @asynccontextmanager
    async def _running(self, request: dict[str, Any], fds: tuple[int, ...], attempt_log: Path) -> AsyncIterator[Child]:
        """Start the worker, and make sure that it is gone at the end of the block, however that ends."""
        path = attempt_log.with_name("request.json")
        path.write_text(json.dumps(request, indent=1), "utf-8")
        child = await Child.start(
            self._options.module, [str(path)], log=attempt_log, environment=self._options.environment, pass_fds=fds
        )
        attempt_log.with_name("pid").write_text(f"{child.pid} {_start_time(child.pid)}", "utf-8")
        log.info("worker started", pid=child.pid)
        self._child = child
        if self._wanted:
            child.tell(CANCEL if self._wanted == "cancel" else STOP)
        try:
            yield child
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
                await self._journal.append(job_id, line, step=line.step, num_steps=line.num_steps, last_step=line)
            case EvalDone() | CheckpointWritten() | Message() | PrepareProgress():
                await self._journal.append(job_id, line)
            case AttemptEnded():
                self._ended = line

    async def _advance(self, state: JobState, **fields: Any) -> bool:
        """Move on, unless somebody has asked for a stop."""
        async with self._moving:
            if self._wanted:
                return False
            self.job = await self._journal.move(self.job, state, **fields)
            return True

    async def _explain(self, attempt_log: Path) -> None:
        tail = await asyncio.to_thread(log_tail, attempt_log)
        if tail:
            await self._journal.append(self.job.job_id, Message(level="error", text=f"last lines of the log:\n{tail}"))

    async def _finish(self, ended: AttemptEnded) -> None:
        """Move the job to where this end leads, given what was asked of it."""
        async with self._moving:
            self._over = True
        if ended.outcome == "succeeded":
            target, reason, message = JobState.SUCCEEDED, "", ended.message
        elif self._wanted == "cancel":
            target, reason, message = JobState.CANCELLED, "CANCELLED", "cancelled by a user"
        elif ended.outcome == "failed" and self._wanted != "drain":
            target, reason, message = JobState.FAILED, ended.reason, self._folders.without_place(ended.message)
        elif self._wanted == "pause":
            target, reason, message = JobState.PAUSED, "PAUSED", "paused by a user; resume it with: horizon job resume"
        else:
            target, reason, message = (
                JobState.QUEUED,
                "DRAINED",
                "the daemon shut down; it continues when the daemon is back",
            )
        end = {"ended_s": time.time()} if target is not JobState.QUEUED and target is not JobState.PAUSED else {}
        self.job = await self._journal.move(self.job, target, reason=reason, message=message, wanted="", **end)
        log.info("attempt ended", job_state=target.value, reason=reason, message=message)


def _start_time(pid: int) -> str:
    """Return the kernel's start time of a process: with the pid it names one process for ever, the pid alone does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("ascii").rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError) as error:
        raise WorkerFailed("the worker ended before it began") from error


def orphan_pid(folder: Path) -> int | None:
    """Return the pid of an attempt's worker when that very process is still alive."""
    try:
        pid, started = (folder / "pid").read_text("utf-8").split()
        alive = _start_time(int(pid)) == started
    except (OSError, ValueError, WorkerFailed):
        return None
    return int(pid) if alive else None

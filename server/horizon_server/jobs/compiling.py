"""Layers are compiled before a job needs them: while it waits in the queue, while its data is prepared, and, where
nothing waits, for the models that were pushed last. One child at a time, which gets little of the processors."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog

from horizon_server.codec import to_plain
from horizon_server.errors import HorizonError, WorkerDied
from horizon_server.events import Message, WorkerLine
from horizon_server.jobs.compile_request import (
    MAX_KILLS,
    CompileRequest,
    MadeBook,
)
from horizon_server.jobs.folders import JobFolders
from horizon_server.planning.compiling import flops_of_job, is_worth_compiling
from horizon_server.planning.gpu_compiler import CPP_COMPILER
from horizon_server.planning.trainable import open_for_training
from horizon_server.records.job import JobRecord
from horizon_server.records.plan import Plan
from horizon_server.spec import JobSpec

COMPILING = "COMPILING"
"""Reason of a job whose data is prepared and that is queued until its layers are compiled."""

NEEDED_BYTES = 2**30
"""Host memory that no job has, without which the daemon does not start a compilation."""

# Jobs of the queue that layers are compiled for ahead of their start.
_MOST_AHEAD = 20

log = structlog.get_logger(__name__)

Tell = Callable[[str, Message], Awaitable[object]]


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """What a job's layers are compiled for."""

    request: CompileRequest
    identity: str


@dataclass(kw_only=True, eq=False)
class _Making:
    """A compilation that runs, and the jobs that wait for it."""

    wanted: _Wanted
    expected_s: float | None
    task: asyncio.Task[None] | None = None
    began_s: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float | None:
        """How long it still takes, by what others took; None while there were none."""
        return None if self.expected_s is None else max(1.0, self.expected_s - (time.monotonic() - self.began_s))


class LayerCompiler:
    """Has layers compiled by children of the daemon. Thread: belongs to one event loop.

    Args:
        folders: of all jobs, and the library.
        environment: of children.
        find_model: returns the model folder of a job.
        free_bytes: host memory that jobs and other children leave.
        tell: stores a message of a job.
        wake: called when a compilation has ended, so that jobs that wait for it are looked at.
        on_made: called with the seconds of a compilation that has ended by itself.
    """

    def __init__(
        self,
        folders: JobFolders,
        *,
        environment: Mapping[str, str],
        find_model: Callable[[JobRecord], Awaitable[Path]],
        free_bytes: Callable[[], int],
        tell: Tell,
        wake: Callable[[], None],
        on_made: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._folders, self._environment, self._find_model = folders, environment, find_model
        self._free_bytes, self._tell, self._wake, self._on_made = free_bytes, tell, wake, on_made
        self._book = MadeBook(folders.compiled)
        self._known: dict[str, _Wanted | None] = {}
        """What each job of the queue wants; None where its worker needs nothing."""
        self._waiting: dict[str, _Wanted] = {}
        """What each job waits for that is queued for nothing else."""
        self._done: set[str] = set()
        """Those that need no child any more: they are in the library, or could not be made, which the worker then
        says."""
        self._making: _Making | None = None
        self._idle: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def held(self) -> dict[str, float]:
        """Until when jobs stay in the queue that wait for their layers and for nothing else, by id."""
        waiting = (job_id for job_id, wanted in self._waiting.items() if wanted.identity not in self._done)
        return dict.fromkeys(waiting, float("inf"))

    async def tend(self, jobs: Sequence[JobRecord]) -> None:
        """Compile for the first of these jobs, in the order of the queue, whose layers are not there."""
        ids = {job.job_id for job in jobs} | self.held.keys()
        for known in (self._known, self._waiting):
            for job_id in known.keys() - ids:
                del known[job_id]
        for wanted in list(self._waiting.values()):
            if self._making is None and not await self._is_done(wanted):
                self._begin(wanted)
                if self._making is None:  # there is no memory for it any more: its worker compiles
                    self._done.add(wanted.identity)
        for job in jobs[:_MOST_AHEAD]:
            if self._making is not None or self._is_closed:
                return
            wanted_by_job = await self._wanted(job)
            if wanted_by_job is not None and not await self._is_done(wanted_by_job):
                self._begin(wanted_by_job)

    async def why_waits(self, job: JobRecord, *, others_train: bool) -> str:
        """Return why a job that is prepared does not start yet, for people: its layers are being compiled, and it is to
        wait in the queue for that. "" where it may start."""
        wanted = await self._wanted(job)
        if wanted is None or await self._is_done(wanted):
            return ""
        if others_train:
            # It now waits for nothing else, and beside jobs that train a compiler that yields takes half an hour.
            wanted = self._known[job.job_id] = replace(wanted, request=replace(wanted.request, urgency="usual"))
            if self._making is not None and self._making.wanted.request.urgency != "usual":
                await self._end()
        if self._making is None:
            self._begin(wanted)
        if self._making is None:
            return ""  # its worker compiles them
        self._waiting[job.job_id] = wanted
        left_s = self._making.left_s if self._making.wanted.identity == wanted.identity else None
        about = "" if left_s is None else f", about {left_s:.0f} s more"
        return f"its layers are being compiled{about}; it holds no memory and no device meanwhile"

    async def note(self, spec: JobSpec, plan: Plan, folder: Path) -> str:
        """Return what a plan says of a job whose layers are not compiled yet, "" where they are, or need not be. A
        failure is for the job itself to report."""
        try:
            wanted = await asyncio.to_thread(self._request, spec, plan, folder)
            if wanted is None or await self._is_done(wanted):
                return ""
            expected_s = await asyncio.to_thread(self._book.expected_s, wanted.request.device)
        except (HorizonError, OSError):
            return ""
        about = "" if expected_s is None else f", which takes about {expected_s:.0f} s"
        return f"its layers are compiled first{about}, while the job is prepared and waits"

    async def make_idle(self, spec: JobSpec, plan: Plan, folder: Path) -> bool:
        """Compile for a job that is not there yet, on idle processors, until it is done; cancelling it ends the child.
        Return whether anything was to do."""
        wanted = await asyncio.to_thread(self._request, spec, plan, folder)
        if wanted is None or self._making is not None or await self._is_done(wanted):
            return False
        if self._free_bytes() < NEEDED_BYTES:
            return False
        request = replace(wanted.request, urgency="idle")
        self._idle = asyncio.create_task(self._make(replace(wanted, request=request)), name="idle compilation")
        try:
            # `wait`: where a job needs the compiler, `_begin` ends the task, and this call only returns.
            await asyncio.wait({self._idle})
        finally:
            self._idle.cancel()
            await asyncio.gather(self._idle, return_exceptions=True)
            self._idle = None
        return True

    async def close(self) -> None:
        """End what runs; from now on nothing is compiled here."""
        self._is_closed = True
        await self._end()

    async def _end(self) -> None:
        if self._making is not None and self._making.task is not None:
            self._making.task.cancel()
            await asyncio.gather(self._making.task, return_exceptions=True)

    def _begin(self, wanted: _Wanted) -> None:
        if self._is_closed or self._free_bytes() < NEEDED_BYTES:
            return
        if self._idle is not None:
            self._idle.cancel()
        self._making = _Making(wanted=wanted, expected_s=self._book.expected_s(wanted.request.device))
        self._making.task = asyncio.create_task(self._carry_out(wanted), name="compilation")

    async def _carry_out(self, wanted: _Wanted) -> None:
        try:
            await self._make(wanted)
        except Exception:  # a defect here must not keep jobs in the queue
            log.exception("layers could not be compiled ahead")
            self._done.add(wanted.identity)
        finally:
            self._making = None
            self._wake()

    async def _make(self, wanted: _Wanted) -> None:
        """Run the child to its end; again where it was killed. Its failures are left to the worker, which says them."""
        began_s = time.monotonic()
        self._folders.compiled.mkdir(mode=0o700, exist_ok=True)

        async def on_event(line: WorkerLine) -> None:
            if isinstance(line, Message):
                log.info("compiles layers", model=wanted.request.model, what=line.text)
                for job_id in [
                    one for one, found in self._known.items() if found is not None and found.identity == wanted.identity
                ]:
                    with contextlib.suppress(HorizonError):  # it has ended, or the disk is full
                        await self._tell(job_id, line)

        for _ in range(MAX_KILLS):
            try:
                await wanted.request.task(self._environment).run(to_plain(wanted.request), on_event)
                break
            except HorizonError as error:
                log.warning("layers could not be compiled ahead", why=error.message)
                if not isinstance(error, WorkerDied) or error.retry_after_s is None:
                    break
            except OSError as error:
                log.warning("layers could not be compiled ahead", why=str(error))
                break
        self._done.add(wanted.identity)
        self._on_made(time.monotonic() - began_s)

    async def _is_done(self, wanted: _Wanted) -> bool:
        if wanted.identity not in self._done and await asyncio.to_thread(self._book.has, wanted.identity):
            self._done.add(wanted.identity)
        return wanted.identity in self._done

    async def _wanted(self, job: JobRecord) -> _Wanted | None:
        if job.job_id not in self._known:
            self._known[job.job_id] = None
            with contextlib.suppress(HorizonError, OSError):  # the attempt reports it
                if job.plan is not None and not await self._has_begun(job):
                    folder = await self._find_model(job)
                    self._known[job.job_id] = await asyncio.to_thread(self._request, job.spec, job.plan, folder)
        return self._known[job.job_id]

    async def _has_begun(self, job: JobRecord) -> bool:
        """Whether a checkpoint says what a job is computed with."""
        return await asyncio.to_thread(self._folders.checkpoints(job.job_id).newest) is not None

    def _request(self, spec: JobSpec, plan: Plan, folder: Path) -> _Wanted | None:
        """Return what is to be compiled for a job; None where nothing is, or only its worker can tell. Blocking."""
        train, execution, choice = spec.train, plan.execution, spec.train.compile
        # On a GPU the trial needs memory of the device, which the job has once its worker runs.
        is_ours = spec.nodes.most == 1 and not spec.is_session and execution.device_kind == "host"
        if choice == "off" or not is_ours or shutil.which(CPP_COMPILER) is None:
            return None
        flops = flops_of_job(open_for_training(folder, train), train, plan.num_steps or 0)
        if not is_worth_compiling(choice, execution.device_kind, flops):
            return None
        request = CompileRequest.of(train, execution, model=folder, library=self._folders.compiled)
        return _Wanted(request=request, identity=request.identity())

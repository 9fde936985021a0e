"""One attempt at a job, from when it is loaded to its end: prepare the data, lend the memory, run the worker, pass on
its turns on the device, judge how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import structlog

from horizon_server.children.child import log_tail
from horizon_server.codec import from_plain, to_plain
from horizon_server.errors import (
    DatabaseUnavailable,
    DiskFull,
    HorizonError,
    TurnOverrun,
    WorkerCrashed,
    WorkerDied,
    WorkerFailed,
    WorkerSilent,
)
from horizon_server.events import AttemptReady, CheckpointWritten, Message, ReferencesDone, StepDone
from horizon_server.jobs.compiling import COMPILING
from horizon_server.jobs.fleet import continue_on_nodes, environment_on, plan_on_nodes
from horizon_server.jobs.lines import Report
from horizon_server.jobs.preparation import Preparation
from horizon_server.jobs.recovery import HAD_NO_WORKER, HAD_OTHER_VERSION, Failure, Verdict, judge
from horizon_server.jobs.reports import Reports
from horizon_server.jobs.requests import (
    MOVED,
    AttemptDevices,
    Explained,
    Move,
    Stopped,
    first_request,
    group_of,
    planes_or_stop,
    request_on,
    text_of_broken,
)
from horizon_server.jobs.runtime import Runtime
from horizon_server.jobs.turns import Participant
from horizon_server.records.job import JobRecord, JobState, StopRequest
from horizon_server.records.plan import HeldMemory
from horizon_server.worker_link.daemon_end import Worker, replay_journal
from horizon_server.worker_link.orders import CALL, GIVE_UP, stop_order
from horizon_server.worker_link.protocol import ALIVE_FILE, REQUEST_FILE, OtherVersion
from horizon_server.worker_link.request import WorkerRequest

log = structlog.get_logger(__name__)

WORKER_MODULE = "horizon_server.worker"

# Errors whose cause is in the log of the attempt.
_UNEXPLAINED = (WorkerFailed, WorkerDied, WorkerCrashed)

# A job that waits longer for its next attempt gives back its memory meanwhile.
_LONGEST_PAUSE_WITH_MEMORY_S = 60.0

# A cancelled worker that is still alive after this is killed: nothing of it is wanted any more.
CANCEL_GRACE_S = 60.0


@dataclass(kw_only=True, eq=False)
class Attempt:
    """One execution of a job.

    Thread: belongs to one event loop. `run` is called once; `stop` may be called any number of times while it runs.
    """

    job: JobRecord
    runtime: Runtime
    preparation: Preparation
    devices: AttemptDevices
    find_devices: Callable[[Sequence[str]], AttemptDevices]
    """Returns those of some names."""
    others: Callable[[], HeldMemory]
    """Planned host memory of all other resident jobs."""
    make_room: Callable[[int], Awaitable[None]]
    """Called with the planned host memory before it is taken, to free what is held for other work and can be done
    without."""
    on_asked: Callable[[], None]
    """Called when a worker has asked for its first turn, so that the next job may be loaded."""
    on_since_s: float = field(init=False, default_factory=time.time)
    """Since when it is on its devices (Unix seconds)."""
    _reports: Reports = field(init=False)
    _worker: Worker | None = field(init=False, default=None)
    _asked_for: WorkerRequest | None = field(init=False, default=None)
    """That of its worker; None before one is started, and where it was written by another version."""
    _move: Move | None = field(init=False, default=None)
    """While it is to continue on other devices, until a worker does."""
    _stays: bool = field(init=False, default=False)
    """Whether it could not be planned for other devices."""
    _began_s: float | None = field(init=False, default=None)
    """Until the first worker is ready: since when the job is being loaded (monotonic); None where an earlier daemon
    began."""
    _wanted: StopRequest = field(init=False, default=StopRequest.NOTHING)
    _asked: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _over: bool = field(init=False, default=False)
    # Held while the state changes, so that a stop and the attempt's own progress never pass each other.
    _moving: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self._number = self.job.attempt + 1
        self._log = self.runtime.folders.log(self.job.job_id, self._number)
        self._reports = self._new_reports()

    def _new_reports(self, *, reached: int = -1) -> Reports:
        return Reports(
            self.job,
            self._store,
            turns=self.devices.turns,
            meter=self.runtime.meter,
            journal=self.runtime.journal,
            reached=reached,
            on_asked=self.on_asked,
            on_call_done=functools.partial(self.runtime.calls.tell, self.job.job_id),
        )

    async def run(self) -> None:
        """Carry the job from QUEUED to the end of this attempt. Raises WrongJobState when the job has left the queue
        meanwhile."""
        self._began_s = time.monotonic()
        begin = {"attempt": self._number, "started_s": self.job.started_s or time.time(), "journal_line": 0}
        with structlog.contextvars.bound_contextvars(job_id=self.job.job_id, attempt=self._number):
            await self._advance(JobState.PREPARING, always=True, **begin)
            await self._to_the_end(self._prepare_and_train)

    async def adopt(self) -> None:
        """Continue an attempt that an earlier daemon began: with its worker where that is alive, else with what it has
        reported."""
        self._number = self.job.attempt
        self._reports = self._new_reports(reached=self.job.step if self.job.journal_line else -1)
        self._log = self.runtime.folders.log(self.job.job_id, self._number)
        # What a user has ordered is stored; of the daemon's own orders, the reason of the state says which it was.
        if self.job.job_state is JobState.STOPPING:
            self._wanted = self.job.wanted or StopRequest.__members__.get(self.job.reason, StopRequest.DRAIN)
        with structlog.contextvars.bound_contextvars(job_id=self.job.job_id, attempt=self._number):
            await self._to_the_end(self._continue)

    async def _to_the_end(self, work: Callable[[], Awaitable[None]]) -> None:
        # Whatever goes wrong in here ends the attempt with its true reason, and never the daemon.
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            await work()
        except Stopped as error:
            await self._finish("stopped", reason=error.reason, message=error.message)
        except Explained as error:
            await self._fail(self._judge(error.cause))
        except (HorizonError, OSError) as error:
            if isinstance(error, _UNEXPLAINED):
                await self._explain()
            await self._fail(self._judge(error))

    async def _fail(self, verdict: Verdict) -> None:
        """End the attempt by a failure: the job is queued again, or fails."""
        outcome = "stopped" if verdict.restart else "failed"
        await self._finish(outcome, reason=verdict.reason, message=verdict.message, fields=verdict.fields)

    async def stop(self, wanted: StopRequest) -> None:
        """Ask it to end. Raises DiskFull or DatabaseUnavailable when a user's order cannot be stored; the attempt
        continues then."""
        async with self._moving:
            # A user's order replaces the daemon's, and nothing replaces a cancellation. A second pause ends a wait for
            # disk space.
            is_weaker = self._wanted and not wanted.is_of_user
            if self._wanted is StopRequest.CANCEL or is_weaker or self._over:
                return
            fields = {"wanted": wanted} if wanted.is_of_user else {}
            try:
                if self.job.job_state in (JobState.PREPARING, JobState.STARTING, JobState.RUNNING):
                    self.job = await self.runtime.journal.move(
                        self.job, JobState.STOPPING, reason=wanted.name, message=wanted.why, **fields
                    )
                elif fields:
                    self.job = await self.runtime.journal.store.set(self.job.job_id, **fields)
            except (DiskFull, DatabaseUnavailable) as error:
                if wanted.is_of_user:
                    raise
                log.error("the order cannot be stored", why=error.message)  # the worker is asked to stop all the same
            self._wanted = wanted
        self._asked.set()
        self.preparation.stop()
        if self._worker is not None:
            order = stop_order(wanted)
            self._worker.send_order(order + GIVE_UP if wanted is StopRequest.PAUSE else order)
            if wanted is StopRequest.CANCEL:
                asyncio.get_running_loop().call_later(CANCEL_GRACE_S, self._worker.kill)

    def set_priority(self, priority: int) -> None:
        """Order the job among those of its user from now on."""
        if self.participant is not None:
            self.devices.turns.set_priority(self.participant, priority)

    @property
    def device_names(self) -> tuple[str, ...]:
        """The devices that it is on, or is to continue on."""
        return (self.devices if self._move is None else self._move.devices).names

    @property
    def can_move(self) -> bool:
        """Whether it can continue on other devices now: its worker trains, and has no other order."""
        trains = self.job.job_state is JobState.RUNNING and self._worker is not None and self._asked_for is not None
        return trains and self._move is None and not self._stays and not self._wanted

    async def move(self, names: Sequence[str], why: str) -> None:
        """Have it continue on these devices, in the same memory, once its worker has ended the step that it is at."""
        if not self.can_move or self._asked_for is None:
            return
        devices = self.find_devices(names)
        try:
            request = await self._request_on(devices, self._asked_for)
        except (HorizonError, OSError) as error:
            self._stays = True
            text = f"it cannot continue on {' and '.join(names)}, and stays where it is: {error}"
            await self.runtime.journal.append(self.job.job_id, Message(level="warning", text=text))
            return
        if request is not None and self.can_move and self._worker is not None:  # still
            self._move = Move(devices=devices, request=request, why=why)
            self._worker.send_order(stop_order(StopRequest.MOVE))

    async def _request_on(self, devices: AttemptDevices, request: WorkerRequest) -> WorkerRequest | None:
        return await request_on(
            devices, request, job=self.job, runtime=self.runtime, preparation=self.preparation, log_file=self._log
        )

    def call(self) -> None:
        """Tell the worker of a session that a call has come."""
        if self._worker is not None:
            self._worker.send_order(CALL)

    def kill(self) -> None:
        """End the worker at once; the job continues from its last checkpoint."""
        self._asked.set()
        self.preparation.stop()
        if self._worker is not None:
            self._worker.kill()

    @property
    def participant(self) -> Participant | None:
        """The worker's place among those that take turns on the device, once it has connected."""
        return self._reports.participant

    @property
    def is_loading(self) -> bool:
        """Whether the job is being prepared, or its worker has not asked for its first turn yet."""
        is_before = self.job.job_state in (JobState.QUEUED, JobState.PREPARING, JobState.STARTING)
        return is_before and not self._reports.has_asked

    @property
    def waits_for_first_turn(self) -> bool:
        """Whether its worker has loaded the model and waits for the device, which it has not had yet."""
        return self.participant is not None and self.participant.waits and not self.participant.had_turn

    @property
    def has_worker(self) -> bool:
        """Whether a worker runs. It continues when this daemon ends without it: the caller cancels `run` or `adopt` for
        that."""
        return self._worker is not None

    async def _prepare_and_train(self) -> None:
        model, dataset, eval_sets = await self.runtime.journal.retry_until_stored(
            lambda: self.runtime.find_inputs(self.job)
        )
        prepared = await self.preparation.run_all(
            self.job.spec,
            model,
            dataset,
            eval_sets,
            log=self._log,
            environment=self.runtime.environment,
            publish=functools.partial(self.runtime.journal.append, self.job.job_id),
        )
        if prepared is None or self._wanted:
            raise Stopped
        if why := await self.runtime.compiler.why_waits(self.job, others_train=bool(self.devices.turns.participants)):
            raise Stopped(COMPILING, why)
        assert self.job.plan is not None, "no job is queued without a plan"
        others = self.others()
        await self.make_room(others.needed_bytes(*self.job.plan.held))
        # Planned again: the data is known now, and the limits or the model's folder on the node may have changed since
        # the submission. The kind of device may not: on another one, a job that has begun would compute in other
        # numbers.
        plan, fleet = await plan_on_nodes(
            self.runtime,
            self.job,
            functools.partial(
                self.runtime.planner.plan_to_start,
                self.job.spec.model_copy(update={"device": self.job.plan.execution.device_kind}),
                model,
                longest_document=prepared.longest_document,
                data=prepared.size,
                num_devices=len(self.devices.names),
                gpus=self.devices.gpus,
                bases=others.bases,
                has_begun=self.job.last_step is not None,
            ),
            self.devices,
            other_bytes=others.num_bytes,
        )
        # Of the node's devices, those that it is on.
        plan = dataclasses.replace(plan, device=self.devices.turns.device)
        if not await self._advance(JobState.STARTING, message=plan.summary, plan=plan, data_report=prepared.report):
            raise Stopped
        async with planes_or_stop(self.runtime, plan, self.job.job_id) as planes:
            request = first_request(
                self.devices, plan, model, prepared, fleet, job=self.job, runtime=self.runtime, log_file=self._log
            )
            await self._train(request, planes)

    async def _train(
        self, request: WorkerRequest | None, planes: dict[str, int], worker: Worker | None = None, *, after: int = 0
    ) -> None:
        """Run a worker to its end, and another one in the same memory where it dies; finish the job.

        An earlier daemon's worker brings its memory: `planes` are empty then, and `after` is what that daemon has
        stored of its reports. `request` is None where it was written by another version.
        """
        answer: dict[str, Any]
        self._asked_for = request
        while True:
            try:
                if worker is None:
                    assert self._asked_for is not None, "only a worker that runs has none that can be read"
                    worker = await self._started(self._asked_for, planes)
                async with self._held(worker):
                    answer = await self._serve(worker, planes, after=after)
            except OtherVersion as error:
                raise Stopped(**HAD_OTHER_VERSION) from error
            except HorizonError as error:
                # An earlier daemon's worker that dies before it was asked for its memory takes that along.
                has_memory = self._asked_for is not None and self._asked_for.plan.plane_bytes.keys() <= planes.keys()
                self._asked_for = await self._again(self._asked_for if has_memory else None, error)
            else:
                if answer["outcome"] != "moved" or self._wanted is StopRequest.CANCEL or self._asked_for is None:
                    break
                self._asked_for = await self._moved(self._asked_for)
            worker, after = None, 0
        await self._finish(**answer)

    async def _started(self, request: WorkerRequest, planes: dict[str, int]) -> Worker:
        environment = environment_on(self.devices, request, self.runtime)
        worker = await Worker.start(
            self.runtime.worker_module,
            to_plain(dataclasses.replace(request, planes=planes)),
            folder=self._log.parent,
            environment=environment,
            group=group_of(self.job, self._number),
            # Other ranks inherit the planes' descriptors by the numbers in the request, which a spare does not have.
            spare=await self.runtime.spare.take(environment) if request.plan.execution.num_ranks == 1 else None,
        )
        log.info("worker started", pid=worker.pid)
        return worker

    async def _moved(self, request: WorkerRequest) -> WorkerRequest:
        """Return the request of the worker that continues in the memory of one that has ended for that: on the devices
        that it is to move to, or, where it was asked to stop meanwhile, only to write the checkpoint for it."""
        plan, why = self.job.plan, "continues on the same devices"
        if self._move is not None and not self._wanted:
            request, why, plan = self._move.request, self._move.why, self._move.request.plan
            self.devices, self.on_since_s = self._move.devices, time.time()
        self._next_worker()
        known: dict[str, Any] = {"attempt": self._number, "journal_line": 0, "plan": plan}
        if not await self._advance(JobState.STARTING, reason=MOVED, message=why, **known):
            store = self.runtime.journal.store
            self.job = await self.runtime.journal.retry_until_stored(lambda: store.set(self.job.job_id, **known))
        return await self._continued(request, from_memory=True)

    def _next_worker(self) -> None:
        """Another worker comes: what it reports and logs is its own."""
        self._number += 1
        self._log = self.runtime.folders.log(self.job.job_id, self._number)
        self._reports = self._new_reports()

    async def _continued(self, request: WorkerRequest, *, from_memory: bool) -> WorkerRequest:
        """The request of another worker, which continues where the one before it has ended."""
        newest = await asyncio.to_thread(self.runtime.folders.checkpoints(self.job.job_id).newest)
        fleet = await continue_on_nodes(self.runtime, self.job.job_id, request, self.devices)
        again = dataclasses.replace(request, attempt=self._number, resume_from=newest, fleet=fleet)
        return dataclasses.replace(again, resume_from_memory=from_memory)

    async def _again(self, request: WorkerRequest | None, error: HorizonError) -> WorkerRequest:
        """Return the request of the next worker, after a pause.

        Raises the error where this attempt cannot be continued, and Stopped where it is not to be.
        """
        if self._reports.overrun:
            error = TurnOverrun(f"{self._reports.overrun}, and was killed")
        await self._explain()
        verdict = self._judge(error)
        is_last = self._wanted or not verdict.restart or verdict.pause_s > _LONGEST_PAUSE_WITH_MEMORY_S
        if request is None or is_last:
            raise Explained(error)
        log.warning("the worker is replaced", why=verdict.message)
        self._move, message = None, verdict.message  # its worker may have died before it heard of the move
        known: dict[str, Any] = verdict.fields | {"journal_line": 0, "not_before_s": 0.0}
        if broken := await self.runtime.view.health.try_devices(self.devices.names):
            left = [name for name in self.devices.names if name not in broken]
            text = text_of_broken(request, broken, left)
            if len(left) < request.plan.least_devices:
                raise Stopped("DEVICE_OUT_OF_SERVICE", text)
            message, devices = f"{message}; {text}", self.find_devices(left)
            if (placed := await self._request_on(devices, request)) is not None:
                request, self.devices, self.on_since_s, known["plan"] = placed, devices, time.time(), placed.plan
        self._next_worker()
        if await self._advance(
            JobState.STARTING, reason=verdict.reason, message=message, attempt=self._number, **known
        ):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), verdict.pause_s)
        if self._wanted:
            raise Stopped
        return await self._continued(request, from_memory=verdict.trusts_memory)

    def _judge(self, error: Exception) -> Verdict:
        if isinstance(error, HorizonError):
            error = self.runtime.folders.named(self.job, error)
        failure = Failure.of(error, step=self._reports.reached)
        return judge(self.job, failure, max_restarts=self.runtime.settings.max_restarts, now_s=time.time())

    async def _continue(self) -> None:
        folder, after = self._log.parent, self.job.journal_line
        group = group_of(self.job, self._number)
        if (worker := await Worker.find(folder, group)) is not None:
            log.info("found a worker of an earlier daemon", pid=worker.pid, after=after)
            written, request = json.loads(await asyncio.to_thread((folder / REQUEST_FILE).read_bytes)), None
            with contextlib.suppress(ValueError):
                request = from_plain(WorkerRequest, written)
            planes: dict[str, int] = {}
            try:
                await self._train(request, planes, worker, after=after)
            finally:
                for descriptor in planes.values():
                    os.close(descriptor)
            return
        if group is not None:
            group.remove()
        # Not the job's failure: nothing of it ran. A RUNNING job without that file comes from a backup.
        if self.job.job_state is not JobState.RUNNING and not (folder / ALIVE_FILE).exists():
            raise Stopped(**HAD_NO_WORKER)
        try:
            answer = await replay_journal(folder, after, self._reports.handle)
        except (WorkerDied, WorkerCrashed):
            await self._reports.flush()
            if self._wanted:
                await self._finish("stopped")
                return
            failure = Failure.of_daemon(step=self._reports.reached)
            await self._fail(
                judge(self.job, failure, max_restarts=self.runtime.settings.max_restarts, now_s=time.time())
            )
        else:
            await self._reports.flush()
            await self._finish(**answer)

    @asynccontextmanager
    async def _held(self, worker: Worker) -> AsyncIterator[None]:
        """Have a worker within the block. Afterwards it is gone, and all that it has reported is stored; but where this
        daemon leaves, the worker continues, and the next daemon reads the rest."""
        self._worker, leaves = worker, False
        try:
            yield
        except asyncio.CancelledError:
            leaves = True
            raise
        finally:
            self._worker = None
            if not leaves:
                worker.kill()
                await worker.wait()
                await worker.wait_for_all()
                self._reports.leave_turns()
            worker.leave()
            with contextlib.suppress(DiskFull, DatabaseUnavailable) if leaves else contextlib.nullcontext():
                await self._reports.flush()

    async def _serve(self, worker: Worker, planes: dict[str, int], *, after: int) -> dict[str, Any]:
        """Connect, read all reports after that number, and return how the worker ended. Raises as `Worker.answer`, and
        OtherVersion."""
        is_earlier = not planes
        # One that has ended already has left its reports in the journal.
        with contextlib.suppress(ConnectionError):
            try:
                greeting, found = await worker.connect(after=after, wants_planes=is_earlier)
            except OtherVersion as error:
                if not is_earlier:
                    raise WorkerFailed(error.message) from error
                log.warning("a worker is asked to checkpoint and end", why=error.message)
                worker.ask_to_stop()
                await worker.wait(self.runtime.settings.drain_timeout_s)
                # As far as this version can read them: without these reports, the steps that it has made alone would be
                # missing.
                with contextlib.suppress(HorizonError):
                    await replay_journal(self._log.parent, after, self._reports.handle)
                raise
            planes |= found
            if is_earlier:
                self.runtime.bases.take_over(self.job, planes)
            self._reports.join_turns(worker, greeting, self.job)
        if self._wanted:  # while the worker was being started, or by an earlier daemon
            worker.send_order(stop_order(self._wanted))
        try:
            answer: dict[str, Any] = await worker.answer(self._reports.handle, self._allowed_silence_s)
        except WorkerSilent as error:
            log.error("the worker makes no progress and is killed", pid=worker.pid, why=error.message)
            await self.runtime.journal.append(self.job.job_id, Message(level="warning", text=error.message))
            raise
        return answer

    def _allowed_silence_s(self) -> float | None:
        limit_s = self.runtime.settings.silence_limit_s
        return None if self.participant is None else self.participant.silence_limit_s(limit_s)

    async def _store(self, report: Report) -> None:
        job_id, (line, number) = self.job.job_id, report
        # In the same transaction: a later daemon continues after exactly what is stored.
        known: dict[str, Any] = {"journal_line": number}
        match line:
            case AttemptReady():
                assert self.job.plan is not None, "STARTING sets it"
                plan = self.job.plan.with_steps(line.num_steps) if line.num_steps else self.job.plan
                known |= {"plan": plan, "data_report": {**self.job.data_report, "packed_rows": line.packed_rows}}
                await self._advance(JobState.RUNNING, step=line.step, num_steps=line.num_steps, **known)
                # The pass over the data before the first step is not a part of loading, and may take hours.
                if self._began_s is not None and not self.job.spec.needs_references:
                    self.runtime.view.on_loaded(self.job, time.monotonic() - self._began_s)
                self._began_s = None
                if self._move is not None:
                    self.runtime.view.on_changed(self.job, time.monotonic() - self._move.asked_s)
                    self._move = None
            case ReferencesDone():
                assert self.job.plan is not None, "STARTING sets it"
                known["plan"] = self.job.plan.with_references_done(line.done_tokens / line.total_tokens)
                await self.runtime.journal.retry_until_stored(lambda: self.runtime.journal.store.set(job_id, **known))
            case StepDone():
                known |= {"step": line.step, "num_steps": line.num_steps, "last_step": line}
                await self.runtime.journal.append(job_id, line, **known)
            case _:
                if isinstance(line, CheckpointWritten):
                    self.runtime.view.on_checkpoint(line)
                await self.runtime.journal.append(job_id, line, **known)

    async def _advance(self, state: JobState, *, always: bool = False, **fields: Any) -> bool:
        """Move on, unless the attempt has been asked to stop, or `always`."""

        async def move() -> bool:
            async with self._moving:  # not held while waiting for the database, so that a stop is heard then
                if self._wanted and not always:
                    return False
                self.job = await self.runtime.journal.move(self.job, state, **fields)
                return True

        return await self.runtime.journal.retry_until_stored(move)

    async def _explain(self) -> None:
        # A worker that is killed because its job is cancelled has nothing to explain.
        if self._wanted is not StopRequest.CANCEL and (tail := await asyncio.to_thread(log_tail, self._log)):
            await self.runtime.journal.append(
                self.job.job_id, Message(level="error", text=f"last lines of the log:\n{tail}")
            )

    async def _finish(
        self, outcome: str, *, reason: str = "", message: str = "", fields: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Move the job to where this end leads, given what was asked of it.

        `outcome`: succeeded, stopped (checkpointed, may be resumed), moved (nobody has its memory), or failed.
        """
        async with self._moving:
            self._over = True
        if outcome == "succeeded":
            target = JobState.SUCCEEDED
        elif outcome == "failed" and self._wanted in (StopRequest.NOTHING, StopRequest.PAUSE):
            target = JobState.FAILED
        elif self._wanted or outcome == "moved":
            # Also where the worker failed: at the end of the drain's time it is killed.
            target, reason, message = (self._wanted or StopRequest.MOVE).end(self.job.spec.name)
        else:
            target = JobState.QUEUED
        # A displaced job makes room for those that have waited; at its old place it could be the next.
        requeue = target is JobState.QUEUED and self._wanted is StopRequest.DISPLACE
        self.job = await self.runtime.journal.retry_until_stored(
            lambda: self.runtime.journal.move(
                self.job, target, reason=reason, message=message, requeue=requeue, **fields
            )
        )
        log.info("attempt ended", job_state=target.value, reason=reason, message=message)
        if self.job.spec.nodes.most > 1:
            await self.runtime.nodes.release(self.job.job_id)

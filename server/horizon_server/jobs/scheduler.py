"""The scheduler: loads as many jobs as fit into memory, from the daemon's start to its drain, and lets them take turns
on the devices. Also settles what the last daemon left."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import structlog

from horizon_server.errors import DatabaseUnavailable, DiskFull, HorizonError, WrongJobState
from horizon_server.events import Message
from horizon_server.jobs.attempt import Attempt
from horizon_server.jobs.fleet import WAITS_FOR_NODES
from horizon_server.jobs.queue_view import Residence, Situation
from horizon_server.jobs.requests import WAITS_FOR_MEMORY
from horizon_server.jobs.runtime import Runtime
from horizon_server.jobs.turns import DeviceTurns
from horizon_server.records.job import RESIDENT, JobRecord, JobState, StopRequest
from horizon_server.records.plan import HeldMemory
from horizon_server.records.sharing import Outlook
from horizon_server.scheduling.admission import decide
from horizon_server.scheduling.state import Decision

log = structlog.get_logger(__name__)

RESUMED = "RESUMED"

# Between two looks at the queue where nothing happens: allowances, the node's condition and waits change with time too.
LOOK_EVERY_S = 5.0

SHOW_EVERY_S = 30.0
"""How old a job's outlook becomes where nothing happens."""

_HELD_BACK_S = 60.0
_BEFORE_THE_START = (JobState.QUEUED, JobState.PREPARING)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Running:
    """A resident job: its attempt, the task that carries it out, and where and since when."""

    attempt: Attempt
    task: asyncio.Task[None]
    residence: Residence


@dataclass(kw_only=True, eq=False)
class Scheduler:
    """Runs queued jobs, several at the same time. Thread: belongs to one event loop.

    Args:
        turns: of each device of the node, by its name.
        make_attempt: takes a job, the names of its devices, and what tells the planned host memory of all other
            resident jobs.
        when_idle: done while no job waits and none is resident.
        held_bytes: host memory of the model that answers prompts, shown beside that of jobs.
    """

    runtime: Runtime
    turns: Mapping[str, DeviceTurns]
    make_attempt: Callable[[JobRecord, tuple[str, ...], Callable[[], HeldMemory]], Attempt]
    when_idle: Callable[[], Coroutine[Any, Any, None]]
    held_bytes: Callable[[], int] = lambda: 0
    look_every_s: float = LOOK_EVERY_S
    free_devices: tuple[str, ...] = field(init=False)
    """Those in service that no resident job is on, as of the last look at the queue. Replaced whole: any thread may
    read it."""
    _running: dict[str, _Running] = field(init=False, default_factory=dict)
    _held_back: dict[str, float] = field(init=False, default_factory=dict)
    """Jobs whose memory or nodes were not free when they should have been: until when they are not tried again, while
    nothing else ends."""
    _shown_s: float = field(init=False, default=0.0)
    """When outlooks were last worked out; 0 where they are to be."""
    _showing: asyncio.Task[None] | None = field(init=False, default=None)
    _news: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _chore: asyncio.Task[None] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.free_devices = tuple(self.turns)

    def wake(self) -> None:
        """Look at the queue again."""
        self._news.set()

    def try_held_back(self) -> None:
        """Look at the queue again, and at those jobs that are not to be tried for a while: what they wait for may be
        there."""
        self._held_back.clear()
        self.wake()

    def attempt(self, job_id: str) -> Attempt | None:
        """Return the attempt of a resident job."""
        running = self._running.get(job_id)
        return running.attempt if running else None

    def outlook(self, job_id: str) -> Outlook | None:
        """Return where a job stands that has not ended, as of the last look at the queue."""
        found, running = self.runtime.view.outlooks.get(job_id), self._running.get(job_id)
        if found is not None and running is not None and running.attempt.waits_for_first_turn:
            return replace(found, why=f"waits for its first turn on the device; {found.why}")
        return found

    def named(self, job_id: str) -> JobRecord | None:
        """Return a job that a reason may call by its name, as of the last look at the queue."""
        return self.runtime.view.named.get(job_id)

    async def simulate(self, job: JobRecord, *, coming: Sequence[JobRecord] = ()) -> Outlook:
        """Return when a job would start and end if it were submitted now, after those that are `coming`."""
        return await self.runtime.view.outlook_of(job, self._residences(), coming=coming)

    async def run(self) -> None:
        """Serve the queue until `drain`. An attempt that breaks fails its job, never the queue."""
        try:
            while not self.runtime.lifecycle.draining:
                # Where jobs stand takes the longest to work out, and changes little while nothing happens.
                if self._news.is_set() or time.monotonic() - self._shown_s > SHOW_EVERY_S:
                    self._shown_s = 0.0
                self._news.clear()
                await self.runtime.journal.retry_until_stored(self._reschedule)
                # `wait_for` would lose a cancellation that comes together with news.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.look_every_s):
                        await self._news.wait()
        except (DiskFull, DatabaseUnavailable):
            pass  # draining has begun while the database could not be used
        except BaseException:
            # Cancelled, or a defect: the attempts end with the queue, and the next daemon takes their workers over.
            for running in self._running.values():
                running.task.cancel()
            raise
        finally:
            await self._end_chore()
            tasks = [running.task for running in self._running.values()]
            await asyncio.gather(*tasks, *([self._showing] if self._showing else []), return_exceptions=True)
        with contextlib.suppress(DiskFull, DatabaseUnavailable):
            await self.runtime.meter.store()

    async def drain(self, timeout_s: float) -> None:
        """Take no more jobs, ask the resident ones to checkpoint, and kill those that take too long."""
        self.runtime.lifecycle.drain()
        self.wake()
        running = list(self._running.values())
        if not running:
            return
        await asyncio.gather(*(one.attempt.stop(StopRequest.DRAIN) for one in running))
        _, late = await asyncio.wait([one.task for one in running], timeout=timeout_s)
        if late:
            log.warning("workers did not stop in time and are killed", number=len(late), timeout_s=timeout_s)
            for job_id, one in list(self._running.items()):
                if one.task in late:
                    await self._report_killed(job_id, timeout_s)
                    one.attempt.kill()
            await asyncio.wait(late)

    async def _report_killed(self, job_id: str, timeout_s: float) -> None:
        """Store why a job will repeat steps; the daemon that continues it cannot know."""
        with contextlib.suppress(DiskFull, DatabaseUnavailable):
            job = await self.runtime.journal.store.get(job_id)
            newest = await asyncio.to_thread(self.runtime.folders.checkpoints(job_id).newest)
            start = f"the checkpoint {newest.name}" if newest else "its beginning"
            text = (
                f"the daemon stopped and killed the worker at step {job.step if job else 0}: its checkpoint was not "
                f"complete after {timeout_s:g} s; the job continues from {start}. An admin can set a longer "
                "drain_timeout_s"
            )
            await self.runtime.journal.append(job_id, Message(level="warning", text=text))

    async def leave(self, timeout_s: float) -> None:
        """Take no more jobs, and end with the workers running: the next daemon takes them over. Jobs without a worker
        are queued again."""
        self.runtime.lifecycle.drain()
        self.wake()
        running = list(self._running.values())
        starting = [one for one in running if not one.attempt.has_worker]
        for one in running:
            if one.attempt.has_worker:
                one.task.cancel()
        await asyncio.gather(*(one.attempt.stop(StopRequest.DRAIN) for one in starting))
        if starting:
            await asyncio.wait([one.task for one in starting], timeout=timeout_s)
            for one in starting:
                one.task.cancel()
        if running:
            await asyncio.wait([one.task for one in running])

    async def until_empty(self) -> None:
        """Wait until no job is resident."""
        if self._running:
            await asyncio.wait([one.task for one in self._running.values()])

    async def _reschedule(self) -> None:
        """Load what fits, take out what has to make room, and work out where every job stands."""
        for turns in self.turns.values():
            turns.charge()
        await self.runtime.meter.store()
        self._let_load()
        held_back = self._held_back | self.runtime.compiler.held
        situation, queued = await self.runtime.view.situation(self._residences(), held_back)
        if self.runtime.lifecycle.draining:
            return
        # Those that are being prepared start first.
        coming = [one.attempt.job for one in self._running.values() if one.attempt.job.job_state in _BEFORE_THE_START]
        await self.runtime.compiler.tend([*coming, *queued.values()])
        used = {name for one in situation.residents for name in one.devices} | situation.node.out.keys()
        self.free_devices = tuple(name for name in self.turns if name not in used)
        if not queued and not self._running:
            self._begin_chore()
        decision = decide(
            situation.waiting,
            situation.residents,
            situation.node,
            self.runtime.view.shares,
            self.runtime.view.rules,
            situation.now_s,
            situation.held,
        )
        await self._act(situation, decision, queued)
        window = situation.node.window
        self.runtime.metrics.set_node_open(situation.node.is_open)
        self.runtime.metrics.set_maintenance(*((window.start_s, window.end_s) if window else (0.0, 0.0)))
        self.runtime.metrics.set_residents(
            {name: len(turns.participants) for name, turns in self.turns.items()},
            self.promised().num_bytes + self.held_bytes(),
        )
        if not any(one.is_loading for one in self._residences().values()):
            await self.runtime.spare.tend(yields=bool(self._running))
        self.runtime.metrics.set_bases(self.runtime.bases.num_bytes, self.runtime.bases.num_jobs)
        self.runtime.metrics.set_share_uses(
            self.runtime.view.shares.uses(situation.now_s), self.runtime.view.shares.weight_of
        )
        if decision.start:
            self.wake()  # where they stand is worked out from what is so then
        elif not self._shown_s and (self._showing is None or self._showing.done()):
            # Not waited for: it takes up to a second, and a job that ends meanwhile makes room for another.
            self._showing = asyncio.create_task(self._show(situation), name="outlooks")

    async def _show(self, situation: Situation) -> None:
        try:
            await self.runtime.view.find_outlooks(situation)
        except Exception:  # a defect in an estimate must not end the queue
            log.exception("where jobs stand could not be worked out")
        self._shown_s = time.monotonic()
        self.runtime.metrics.set_job_shares(
            {job_id: one.share for job_id, one in self.runtime.view.outlooks.items() if one.share}
        )

    def _let_load(self) -> None:
        """Let the job go on whose turn to prepare has come, where one more may be loaded. It was taken into memory
        before those that are in the queue, so it goes before them."""
        most = self.runtime.view.rules.max_loading_jobs
        residences = self._residences().values()
        num_loading = sum(one.is_loading and not one.waits_to_prepare for one in residences)
        if most is None or num_loading < most:
            for running in self._running.values():
                if running.attempt.preparation.asks:
                    running.attempt.preparation.let_load()
                    return  # no other one has the turn

    async def _act(self, situation: Situation, decision: Decision, queued: Mapping[str, JobRecord]) -> None:
        # Those that have not ended while all this was read.
        attempts = {job_id: running.attempt for job_id, running in self._running.items()}
        for resident in situation.residents:
            attempt = attempts.get(resident.job_id)
            if attempt is not None:
                attempt.set_priority(resident.priority)
        is_drained = situation.condition.at(situation.now_s) == "drained"
        for job_id in attempts if is_drained else decision.displace:
            if job_id in attempts:
                await attempts[job_id].stop(StopRequest.UNLOAD if is_drained else StopRequest.DISPLACE)
        for job_id in decision.leave:
            if job_id in attempts:
                await attempts[job_id].stop(StopRequest.LEAVE)
        for job_id, devices in decision.change:
            if job_id in attempts:
                why = _why_moved(attempts[job_id].device_names, devices, situation.node.out)
                await attempts[job_id].move(devices, why)
        for job_id, devices in decision.start:
            await self._end_chore()
            if self.runtime.lifecycle.draining:  # meanwhile: the drain would not know of this job
                return
            self._start(queued[job_id], devices)

    def _start(self, job: JobRecord, devices: tuple[str, ...], *, adopt: bool = False) -> None:
        if adopt:
            self.runtime.bases.expect(job)
        attempt = self.make_attempt(job, devices, lambda: self.promised(but=job.job_id))
        residence = Residence(
            devices=devices, since_s=self.runtime.folders.resident_since_s(job) if adopt else time.time()
        )
        task = asyncio.create_task(self._carry_out(attempt, adopt=adopt), name=f"attempt {job.job_id}")
        self._running[job.job_id] = _Running(attempt=attempt, task=task, residence=residence)

    async def _carry_out(self, attempt: Attempt, *, adopt: bool) -> None:
        job_id = attempt.job.job_id
        try:
            if adopt:
                await attempt.adopt()
            else:
                await attempt.run()
        except WrongJobState:
            log.info("the job left the queue before its turn", job_id=job_id)
        except HorizonError as error:
            log.error("attempt failed", job_id=job_id, why=error.message)
            await self._fail(job_id, error)
        except Exception as error:  # a defect in one attempt must not end those of all users
            log.exception("attempt failed", job_id=job_id)
            await self._fail(job_id, error)
        finally:
            del self._running[job_id]
            self.runtime.bases.leave(job_id)
            if attempt.job.reason in (WAITS_FOR_MEMORY, WAITS_FOR_NODES):
                self._held_back[job_id] = time.time() + _HELD_BACK_S
            else:  # its memory is free; two jobs that wait would otherwise wake each other all the time
                self._held_back.clear()
            self.wake()

    def _residences(self) -> dict[str, Residence]:
        return {
            job_id: replace(
                one.residence,
                devices=one.attempt.device_names,
                on_since_s=one.attempt.on_since_s,
                can_change=one.attempt.can_move,
                is_loading=one.attempt.is_loading,
                waits_to_prepare=one.attempt.preparation.waits,
            )
            for job_id, one in self._running.items()
        }

    def promised(self, *, but: str = "") -> HeldMemory:
        """Return the planned host memory of all resident jobs, of all but one where that is named."""
        plans = (one.attempt.job.plan for job_id, one in self._running.items() if job_id != but)
        return HeldMemory(plan.held for plan in plans if plan is not None)

    def _begin_chore(self) -> None:
        """Do what is only done when no job needs the node."""
        if self._chore is None:
            self._chore = asyncio.create_task(self.when_idle(), name="idle")

    async def _end_chore(self) -> None:
        if self._chore is not None:
            self._chore.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._chore
            self._chore = None

    async def recover(self) -> None:
        """Take over the jobs that were resident when the last daemon ended: their workers, or what these have left."""
        try:
            store, retry = self.runtime.journal.store, self.runtime.journal.retry_until_stored
            for job in await retry(lambda: store.in_states(sorted(RESIDENT))):
                times_s = await retry(partial(store.last_times, job.job_id))
                # Whether or not its worker is alive: where it is not, the change of state takes the series away again.
                self.runtime.metrics.take_over(job, times_s)
                # Where its devices have other names now, it is counted on the first of the node.
                names = job.plan.devices if job.plan is not None else ()
                known = tuple(name for name in names if name in self.turns)
                self._start(job, known or (next(iter(self.turns)),), adopt=True)
        except (DiskFull, DatabaseUnavailable):
            log.error("jobs of the last daemon are not taken over; the next daemon does it")

    async def _fail(self, job_id: str, error: Exception) -> None:
        """Fail a job whose attempt broke. While draining, a database that cannot be written leaves that to the next
        daemon."""
        if isinstance(error, HorizonError):
            reason, message = error.reason, error.message
        else:
            reason, message = "INTERNAL", f"the daemon could not carry out the attempt: {type(error).__name__}: {error}"

        async def move() -> None:
            job = await self.runtime.journal.store.get(job_id)
            if job is not None and job.job_state in RESIDENT:
                await self.runtime.journal.move(job, JobState.FAILED, reason=reason, message=message)

        try:
            await self.runtime.journal.retry_until_stored(move)
        except (DiskFull, DatabaseUnavailable):
            log.error("the failure cannot be stored; the next daemon settles the job", job_id=job_id)


def _why_moved(before: Sequence[str], now: Sequence[str], out: Mapping[str, str]) -> str:
    """What a job says that continues on other devices."""
    left, taken = [name for name in before if name not in now], [name for name in now if name not in before]
    reasons = [f"{name} is {out[name]}" for name in left if name in out]
    if needed := [name for name in left if name not in out]:
        reasons.append(f"other jobs need {' and '.join(needed)}")
    if taken:
        reasons.append(f"{' and '.join(taken)} {'is' if len(taken) == 1 else 'are'} free")
    number = f"{len(now)} device{'' if len(now) == 1 else 's'}"
    return f"continues on {number}, {' and '.join(now)}: {'; '.join(reasons)}"

"""What a worker says: what is about turns is passed on at once, because the next job waits for it; all else is stored,
in its order."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable

from horizon_server.events import (
    AttemptReady,
    CallDone,
    ChildLine,
    MemoryReleased,
    Message,
    StepDone,
    TurnEnded,
    TurnWanted,
    WorkerLine,
    WorkerProgress,
)
from horizon_server.jobs.joint_turn import JointTurn
from horizon_server.jobs.journal import Journal
from horizon_server.jobs.lines import LineStore, Report
from horizon_server.jobs.turns import DeviceTurns, Participant, resident_job
from horizon_server.jobs.usage import UsageMeter
from horizon_server.records.job import JobRecord
from horizon_server.worker_link.daemon_end import Worker
from horizon_server.worker_link.protocol import WorkerGreeting


class Reports:
    """The reports of one worker of an attempt, and its participant among those that take turns on its devices.

    `participant` is None until the worker connects. `reached` is the last step that it is known to have done, or to
    have continued after; -1 where none. `overrun` is set where it is killed because it did not give the device back,
    and says so.

    Thread: belongs to one event loop.

    Args:
        store: stores one report that is not about turns.
        on_asked: called when the worker has asked for its first turn: it is loaded.
        on_call_done: called when a session has done a call.
    """

    def __init__(
        self,
        job: JobRecord,
        store: Callable[[Report], Awaitable[None]],
        *,
        turns: DeviceTurns | JointTurn,
        meter: UsageMeter,
        journal: Journal,
        on_asked: Callable[[], None],
        on_call_done: Callable[[], None],
        reached: int = -1,
    ) -> None:
        self.participant: Participant | None = None
        self.reached = reached
        self.has_asked = False
        self.overrun = ""
        self._job, self._turns, self._meter, self._journal = job, turns, meter, journal
        self._on_asked, self._on_call_done = on_asked, on_call_done
        self._lines = LineStore(store)
        self._warning: asyncio.Task[None] | None = None

    def join_turns(self, worker: Worker, greeting: WorkerGreeting, job: JobRecord) -> None:
        """Let the worker, which has just connected, take turns."""
        plan = job.plan
        assert plan is not None, "STARTING sets it"

        def on_overrun(message: str, is_last: bool) -> None:
            warning = self._journal.append(job.job_id, Message(level="warning", text=message))
            self._warning = asyncio.get_running_loop().create_task(warning)
            if is_last:
                self.overrun = message
                worker.kill()

        self.participant = Participant(
            job=resident_job(job),
            send=worker.send_order,
            charge=functools.partial(self._meter.add, job),
            is_storing=lambda: self._lines.is_full,
            on_overrun=on_overrun,
            step_s=plan.prediction.step_s if plan.prediction else 0.0,
        )
        self._turns.join(self.participant, turn=greeting.turn, holds_memory=greeting.holds_memory)
        if greeting.turn != "none":
            self._has_asked()

    def _has_asked(self) -> None:
        if not self.has_asked:
            self.has_asked = True
            self._on_asked()

    def leave_turns(self) -> None:
        """Free the worker's turn. Only once its process is gone: until then it may still compute."""
        if self.participant is not None:
            self._turns.leave(self.participant)

    async def handle(self, line: WorkerLine, number: int) -> None:
        """Take one line, which has that number in the worker's journal. Raises what an earlier report could not be
        stored for."""
        if isinstance(line, TurnWanted | TurnEnded | MemoryReleased):
            assert self.participant is not None, "a worker says so on its connection only"
            self._turns.handle(self.participant, line)
            self._has_asked()
            return
        if isinstance(line, CallDone):
            self._on_call_done()
            return
        if isinstance(line, WorkerProgress | ChildLine):  # that it came is all it says; no worker sends the other
            return
        if isinstance(line, AttemptReady | StepDone):
            self.reached = line.step
        if isinstance(line, StepDone):
            if self.participant is not None:  # of a worker that is gone, nothing takes turns
                self._turns.stepped(self.participant, line)
            self._meter.add(self._job, 0.0, num_tokens=line.num_tokens)
        await self._lines.add((line, number))

    async def flush(self) -> None:
        """Return once all reports are stored. Raises what one of them could not be stored for."""
        await self._lines.flush()

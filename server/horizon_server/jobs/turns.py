"""Turns on one device: which of the resident jobs may use it, and for how long.

A worker asks for the device, is granted it, and gives it back at a step boundary. After a time slice it is asked to, if
another job is next by `scheduling.turns`. What a job holds the device for is charged to its user and project.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import structlog

from horizon_server.events import MemoryReleased, StepDone, TurnEnded, TurnLine, TurnWanted
from horizon_server.planning.gpus import PROCESS_BYTES
from horizon_server.records.job import JobRecord
from horizon_server.scheduling.shares import Shares
from horizon_server.scheduling.state import Job, Rules
from horizon_server.scheduling.turns import next_turn
from horizon_server.telemetry.metrics import Metrics
from horizon_server.worker_link.orders import ALONE, RELEASE, SHARED, TURN, YIELD
from horizon_server.worker_link.protocol import TurnState

log = structlog.get_logger(__name__)

# Where a step leaves the device idle for more than this part of its time, and for longer than this, another job can use
# the device meanwhile: turns are one step long then. Below, the hand-over would cost more than it gains.
_LEAST_IDLE_SHARE, _LEAST_IDLE_S = 0.2, 0.1

# A job's first turn has the trials of compiled layers and of packing, memory that is touched for the first time, and
# the first step, of which nothing may be known.
FIRST_STEP_S, _FIRST_STEP_FACTOR = 600.0, 10.0

# On a GPU, the worker submits a step in a moment and then waits for all of it, so it may say nothing for a step; other
# jobs on the node may make that longer.
SILENT_STEPS = 20.0


@dataclass(kw_only=True, eq=False)
class Participant:
    """A resident job's place in the turns of its device.

    Args:
        job: the job as decisions see it.
        send: passes an order to the worker.
        charge: takes the device seconds that the job has used.
        step_s: predicted seconds of a step, 0 where unknown.
        is_storing: whether the daemon, not the worker, is what the next line waits for.
        on_overrun: called with a message when the worker has not given the device back; the second time it must be
            killed.
        is_due: of a job of several devices, whether it is next on those that it would wait for with this one.
    """

    job: Job
    send: Callable[[bytes], None]
    charge: Callable[[float], None]
    is_storing: Callable[[], bool]
    on_overrun: Callable[[str, bool], None]
    step_s: float = 0.0
    is_due: Callable[[], bool] = lambda: True
    waits: bool = field(init=False, default=False)
    since_s: float = field(init=False, default=0.0)
    """Since when it waits, while `waits` or `gathers`."""
    gathers: bool = field(init=False, default=False)
    """Whether its job, which needs several devices, waits for one of them: it does not compute on those it has."""
    had_turn: bool = field(init=False, default=False)
    left_early: bool = field(init=False, default=False)
    """Whether it gave its last turn back by itself: to write a checkpoint, or where it is done."""
    holds_memory: bool = field(init=False, default=False)
    asked_to_release: bool = field(init=False, default=False)
    release_timer: asyncio.TimerHandle | None = field(init=False, default=None)
    """Until when it may take to free its memory."""
    idle_since_s: float = field(init=False, default=0.0)
    """When the device became idle before this job's turn, by the worker that had it (monotonic clock); 0 where nothing
    was handed over."""
    longest_step_s: float = field(init=False, default=0.0)
    leaves_device_idle: bool = field(init=False, default=False)

    @property
    def waiting(self) -> Job:
        """The job, with the time since which it waits for the device."""
        return replace(self.job, since_s=self.since_s)

    @property
    def is_at_rest(self) -> bool:
        """Whether its worker waits, for this device or for another one of its job."""
        return self.waits or self.gathers

    def took(self, step: StepDone) -> None:
        """Take in what a step took."""
        self.longest_step_s = max(self.longest_step_s, step.duration_s)
        self.step_s = step.duration_s
        idle_s = step.duration_s - step.compute_s
        self.leaves_device_idle = idle_s > max(_LEAST_IDLE_S, _LEAST_IDLE_SHARE * step.duration_s)

    @property
    def most_step_s(self) -> float:
        """How long a step may take at most, by what is known of this job's steps."""
        return self.longest_step_s or max(FIRST_STEP_S, _FIRST_STEP_FACTOR * self.step_s)

    def silence_limit_s(self, floor_s: float) -> float | None:
        """How long the worker may make no progress; None while it waits for the device, and where `floor_s` is 0."""
        if self.waits or not floor_s:
            return None
        return max(floor_s, SILENT_STEPS * self.longest_step_s if self.longest_step_s else self.most_step_s)


def resident_job(job: JobRecord) -> Job:
    """Return a job that has just been loaded, as decisions about its devices see it."""
    assert job.plan is not None, "no job is loaded without a plan"
    return Job(
        job_id=job.job_id,
        user=job.owner,
        project=job.project,
        priority=job.priority,
        order=0,
        since_s=time.time(),
        device=job.plan.execution.device_kind,
        host_bytes=job.plan.kept_host_bytes,
        device_bytes=job.plan.kept_device_bytes,
        num_devices=job.plan.num_devices,
        further_nodes=job.plan.least_nodes - 1,
    )


class DeviceTurns:
    """The turns on one device. Thread: belongs to one event loop.

    Args:
        device: its name: host or host:N, or cuda:N.
        usable_bytes: memory that all participants may hold at the same time; None where their host memory holds it
            already.
    """

    def __init__(
        self,
        device: str,
        *,
        usable_bytes: int | None,
        shares: Shares,
        rules: Rules,
        grace_s: float,
        metrics: Metrics,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.device = device
        self._usable_bytes = usable_bytes
        self._shares, self._rules, self._grace_s, self._metrics, self._clock = shares, rules, grace_s, metrics, clock
        self._participants: dict[str, Participant] = {}
        self.holder: Participant | None = None
        self._charged_to_s = 0.0
        self._slice_began_s = self._ended_s = self._idle_since_s = 0.0
        self._is_asked_back = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def participants(self) -> Sequence[Participant]:
        """All jobs that share the device."""
        return tuple(self._participants.values())

    def join(self, participant: Participant, *, turn: TurnState = "none", holds_memory: bool = False) -> None:
        """Take a resident job in, with where its worker stands: one of an earlier daemon may wait for a turn, or have
        it."""
        self._participants[participant.job.job_id] = participant
        participant.holds_memory = holds_memory
        self._announce_peers()
        if turn == "wanted":
            self.want(participant)
        elif turn == "held" and self.holder is None:
            self._hold(participant)
            self._look()
        elif turn == "held":
            # It took its turn while no daemon was there. The holder waits for the device's lock until this one has
            # ended.
            participant.send(YIELD)

    def leave(self, participant: Participant) -> None:
        """Forget a job whose worker is gone, and with it its turn and what it held on the device."""
        self._participants.pop(participant.job.job_id, None)
        participant.waits = participant.holds_memory = False
        self._announce_peers()
        if self.holder is participant:
            self._end_turn()
        self._look()

    def handle(self, participant: Participant, line: TurnLine) -> None:
        """Take in what a worker says about its turn."""
        match line:
            case TurnWanted():
                self.want(participant)
            case TurnEnded():
                self.ended(participant, line)
            case MemoryReleased():
                self.released(participant)

    def set_priority(self, participant: Participant, priority: int) -> None:
        """Order the job among those of its user from now on."""
        participant.job = replace(participant.job, priority=priority)

    def would_choose(self, participant: Participant) -> bool:
        """Whether the job would be next if it waited for the device and the slice of the one that has it were over."""
        rivals = [one for one in self._participants.values() if one.waits and one is not participant]
        jobs = [one.waiting for one in rivals]
        if self.holder is not None and self.holder is not participant:
            jobs.append(self.holder.waiting if self.holder.gathers else replace(self.holder.job, since_s=self._clock()))
        mine = participant.waiting
        return next_turn([*jobs, mine], self._shares, self._clock(), rules=self._rules) is mine

    def begin(self, participant: Participant) -> None:
        """The job has all the devices that it waited for: its turn begins, and with it the time slice."""
        assert self.holder is participant, "a job begins with all its devices"
        self.charge()
        participant.gathers = False
        self._slice_began_s = self._clock()
        if not self._is_asked_back:
            self._cancel_timer()
        self._look()

    def wants_back(self, participant: Participant) -> bool:
        """Whether the job has the device and is to give it back."""
        return self.holder is participant and self._is_asked_back

    def want(self, participant: Participant, *, since_s: float | None = None) -> None:
        """The worker has asked for the device: now, or at `since_s` where the job waits for several devices."""
        if (
            self._participants.get(participant.job.job_id) is participant
            and not participant.waits
            and self.holder is not participant
        ):
            participant.waits, participant.since_s = True, self._clock() if since_s is None else since_s
            if participant.asked_to_release:  # in a turn that it gave back before it read that
                self._expect_release(participant)
            # It was next, and would be had it not written a checkpoint: it need not wait for the end of a slice that
            # began meanwhile.
            if participant.left_early and self.holder is not None and not self._is_asked_back:
                self._cancel_timer()
                self._slice_began_s = min(self._slice_began_s, self._clock() - self._rules.time_slice_s)
            self._look()

    def ended(self, participant: Participant, line: TurnEnded) -> None:
        """The worker has given the device back, or no longer wants it."""
        self._released(participant, released=line.released)
        participant.waits = False
        if self.holder is participant:
            participant.left_early = not self._is_asked_back
            if participant.idle_since_s and line.began_s:
                self._metrics.on_handover(self.device, max(0.0, line.began_s - participant.idle_since_s))
            self._end_turn(line.ended_s)
        self._look()

    def released(self, participant: Participant) -> None:
        """The worker, which waited, has freed its memory on the device."""
        self._released(participant, released=True)
        # It may have been granted its turn meanwhile, and takes memory again in it.
        participant.holds_memory = self.holder is participant
        self._look()

    def stepped(self, participant: Participant, step: StepDone) -> None:
        """Take in what a step took."""
        participant.took(step)
        if self.holder is participant and self._turns_are_steps:
            self._look()

    def charge(self) -> None:
        """Charge the job that has the device for its use up to now; not while it waits for another one."""
        now_s = self._clock()
        if self.holder is not None and not self.holder.gathers:
            used_s, job = max(0.0, now_s - self._charged_to_s), self.holder.job
            self.holder.charge(used_s)
            self._metrics.on_device_use(self.device, project=job.project, user=job.user, device_s=used_s)
        self._charged_to_s = now_s

    @property
    def _room_bytes(self) -> float:
        """Memory for all that participants hold at the same time: the device's, less what the processes of waiting jobs
        take themselves."""
        if self._usable_bytes is None:
            return math.inf
        return self._usable_bytes - PROCESS_BYTES * max(0, len(self._participants) - 1)

    @property
    def _turns_are_steps(self) -> bool:
        return any(participant.leaves_device_idle for participant in self._participants.values())

    def _look(self) -> None:
        """Grant the device where it is free, or ask for it back where another job is next."""
        if self.holder is None:
            self._grant()
        elif not self._is_asked_back and any(participant.waits for participant in self._participants.values()):
            self._plan_end(self.holder)

    def _grant(self) -> None:
        chosen = self._next([participant for participant in self._participants.values() if participant.waits])
        if chosen is None or not self._has_room(chosen):
            return
        now_s = self._clock()
        self._metrics.on_turn_wait(self.device, max(0.0, now_s - chosen.since_s))
        # Only where it waited already when the device became free.
        chosen.idle_since_s = self._idle_since_s if chosen.since_s <= self._ended_s else 0.0
        chosen.holds_memory = True
        self._hold(chosen)
        chosen.send(TURN)
        if any(participant.waits for participant in self._participants.values()):
            self._plan_end(chosen)

    def _hold(self, participant: Participant) -> None:
        participant.waits, self.holder, self._is_asked_back = False, participant, False
        participant.had_turn, participant.left_early = True, False
        self._charged_to_s = self._slice_began_s = self._clock()

    def _announce_peers(self) -> None:
        """Tell each worker whether it is the only one: it may use the device's memory then even while no daemon is
        there."""
        if self._usable_bytes is not None:
            for participant in self._participants.values():
                participant.send(ALONE if len(self._participants) == 1 else SHARED)

    def _has_room(self, chosen: Participant) -> bool:
        """Whether the device has memory for the job. Where it has not, those that wait are asked to free theirs
        first."""
        if chosen.holds_memory:
            return True
        others = [
            participant
            for participant in self._participants.values()
            if participant.holds_memory and participant is not chosen
        ]
        excess = (
            sum(participant.job.device_bytes for participant in others) + chosen.job.device_bytes - self._room_bytes
        )
        # The largest first: the fewest have to copy their weights again. One that writes a checkpoint is asked once it
        # waits.
        for participant in sorted(
            (participant for participant in others if participant.is_at_rest),
            key=lambda participant: -participant.job.device_bytes,
        ):
            if excess > 0 and not participant.asked_to_release:
                participant.asked_to_release = True
                participant.send(RELEASE)
                self._expect_release(participant)
            excess -= participant.job.device_bytes
        # Where nobody else holds any, waiting would change nothing: the job's own step says what it lacks.
        return not others or (excess <= 0 and not any(participant.asked_to_release for participant in others))

    def _expect_release(self, participant: Participant) -> None:
        """Have a waiting worker killed that does not free its memory: the device would stay without work."""

        def check() -> None:
            participant.release_timer = None
            if participant.is_at_rest and participant.asked_to_release and not participant.is_storing():
                self._metrics.on_turn_overrun()
                participant.on_overrun(
                    f"the worker has not freed its memory on {self.device} after {self._grace_s:.0f} s", True
                )

        # One timer: the worker may ask for the device again before it has answered the first order.
        if participant.release_timer is None:
            participant.release_timer = asyncio.get_running_loop().call_later(self._grace_s, check)

    def _released(self, participant: Participant, *, released: bool) -> None:
        if released:
            participant.holds_memory = participant.asked_to_release = False
            if participant.release_timer is not None:  # another request may come before it
                participant.release_timer.cancel()
                participant.release_timer = None

    def _plan_end(self, holder: Participant) -> None:
        """Ask for the device back now or at the end of the slice."""
        # Now, as an order that comes after the step has ended is heard one step later. Where the holder is next, its
        # next step asks again; but a pass over the data before the first step, or an evaluation, reports no steps, so
        # that the end of the slice counts too.
        # A job that waits for another of its devices does no step: it gives this one back as soon as it is asked.
        step_s = 0.0 if holder.gathers else holder.step_s
        if self._turns_are_steps and self._next_but(holder, after_s=step_s) is not holder:
            self._ask_back(holder)
            return
        if self._timer is None:
            # Over already where the holder was alone for long: a job that comes then need not wait for another slice.
            left_s = max(0.0, self._slice_began_s + self._rules.time_slice_s - self._clock())
            self._timer = asyncio.get_running_loop().call_later(left_s, self._slice_over, holder)

    def _slice_over(self, holder: Participant) -> None:
        self._timer = None
        self.charge()
        if self._next_but(holder, after_s=0.0) is not holder:
            self._ask_back(holder)
        elif any(participant.waits for participant in self._participants.values()):
            self._slice_began_s = self._clock()
            self._plan_end(holder)

    def _ask_back(self, holder: Participant) -> None:
        self._is_asked_back = True
        self._cancel_timer()
        chosen = self._next([participant for participant in self._participants.values() if participant.waits])
        assert chosen is not None, "somebody waits, or the holder keeps the device"
        held = sum(
            participant.job.device_bytes
            for participant in self._participants.values()
            if participant.holds_memory and participant is not chosen
        )
        is_short = held + chosen.job.device_bytes > self._room_bytes
        holder.asked_to_release = is_short and not chosen.holds_memory
        holder.send(RELEASE if holder.asked_to_release else YIELD)
        self._watch(holder, is_last=False)

    def _watch(self, holder: Participant, *, is_last: bool) -> None:
        """Report a worker that does not give the device back within a step and a grace period; after another, have it
        killed."""
        allowed_s = self._grace_s + (0.0 if is_last else holder.most_step_s)

        def overrun() -> None:
            self._timer = None
            if (
                holder.is_storing()
            ):  # the worker may have answered; the daemon has not read it, as its database cannot be written
                self._watch(holder, is_last=is_last)
                return
            what = f"the worker has not given back the device {self.device} {allowed_s:.0f} s after it was asked to"
            log.warning("turn overrun", job_id=holder.job.job_id, device=self.device, killed=is_last)
            self._metrics.on_turn_overrun()
            if not is_last:
                self._watch(holder, is_last=True)
            holder.on_overrun(what, is_last)

        self._timer = asyncio.get_running_loop().call_later(allowed_s, overrun)

    def _end_turn(self, idle_since_s: float = 0.0) -> None:
        self.charge()
        if self.holder is not None and not self.holder.gathers:
            self._metrics.on_turn(self.device)
        self.holder, self._is_asked_back = None, False
        self._ended_s, self._idle_since_s = self._clock(), idle_since_s
        self._cancel_timer()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _next(self, participants: Sequence[Participant], shares: Shares | None = None) -> Participant | None:
        # The device is not kept idle for a job that is not next on the others that it needs, where somebody else wants
        # it.
        due = [participant for participant in participants if participant.is_due()] or participants
        jobs = [participant.waiting for participant in due]
        now_s = self._clock()
        chosen = next_turn(jobs, shares or self._shares, now_s, rules=self._rules)
        return None if chosen is None else self._participants[chosen.job_id]

    def _next_but(self, holder: Participant, *, after_s: float) -> Participant | None:
        """Who is next, the holder included, once it has used the device for `after_s` more."""
        now_s = self._clock()
        if not holder.gathers:
            holder.since_s = now_s
        shares = self._shares
        if after_s:
            shares = shares.copy()
            shares.charge(holder.job.project, holder.job.user, after_s, now_s)
        return self._next(
            [holder, *(participant for participant in self._participants.values() if participant.waits)], shares
        )

"""Turns of a job that computes on several devices: it has all of them, or waits.

Its worker knows one turn. On each device the job is a participant like others, and is charged there. It asks for the
devices one after the other, in the node's order, so that no two such jobs wait for each other. Where another job wants
a device while it still waits for the next one, it gives that one back at once, and asks again in order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from horizon_server.events import MemoryReleased, StepDone, TurnEnded, TurnLine, TurnWanted
from horizon_server.jobs.turns import DeviceTurns, Participant
from horizon_server.worker_link.orders import ALONE, RELEASE, SHARED, TURN, YIELD
from horizon_server.worker_link.protocol import TurnState


class JointTurn:
    """The turns of one job on all its devices, with the methods of `DeviceTurns`. Thread: belongs to one event loop.

    What a device decides takes effect a moment later: no device is changed from within a decision of its own.

    Args:
        devices: the turns of each, in the node's order.
    """

    def __init__(self, devices: Sequence[DeviceTurns], *, clock: Callable[[], float] = time.time) -> None:
        assert len(devices) > 1, "one device needs nothing between it and the worker"
        self._devices, self._clock = tuple(devices), clock
        self._worker: Participant | None = None
        self._seats: tuple[Participant, ...] = ()
        self._num_had = 0
        """Devices that it has, the first ones, while it waits for the next."""
        self._has_turn = False
        self._told: set[bytes] = set()
        """YIELD while the worker has been asked for this turn, RELEASE until it has freed its memory."""
        self._is_alone: dict[str, bool] = {}
        self._told_alone: bool | None = None
        self._is_look_due = False

    @property
    def device(self) -> str:
        """The names of the devices, with commas between."""
        return ",".join(turns.device for turns in self._devices)

    @property
    def participants(self) -> Sequence[Participant]:
        """All that share one of the devices."""
        return tuple(one for turns in self._devices for one in turns.participants)

    def join(self, participant: Participant, *, turn: TurnState = "none", holds_memory: bool = False) -> None:
        """Take the job's worker in, as `DeviceTurns.join`."""
        self._worker, self._has_turn, self._num_had = participant, turn == "held", 0
        self._told, self._is_alone, self._told_alone = set(), {}, None
        self._seats = tuple(self._seat(participant, place) for place in range(len(self._devices)))
        participant.had_turn = self._has_turn
        for turns, seat in self._places:
            turns.join(seat, turn="held" if self._has_turn else "none", holds_memory=holds_memory)
        if turn == "wanted":
            self._gather(participant)

    def leave(self, participant: Participant) -> None:
        """Forget a worker that is gone, on all devices."""
        if participant is self._worker:
            self._worker, participant.waits = None, False
            for turns, seat in self._places:
                turns.leave(seat)
                seat.gathers = False

    def handle(self, participant: Participant, line: TurnLine) -> None:
        """Take in what the worker says about its turn."""
        if participant is not self._worker:
            return
        match line:
            case TurnWanted():
                self._gather(participant)
            case TurnEnded():
                self._end(participant, line)
            case MemoryReleased():
                self._told.discard(RELEASE)
                for turns, seat in self._places:
                    turns.released(seat)

    def stepped(self, participant: Participant, step: StepDone) -> None:
        """Take in what a step took."""
        participant.took(step)
        for turns, seat in self._places:
            turns.stepped(seat, step)

    def set_priority(self, participant: Participant, priority: int) -> None:
        """Order the job among those of its user from now on."""
        for one in (participant, *self._seats):
            one.job = replace(one.job, priority=priority)

    @property
    def _places(self) -> tuple[tuple[DeviceTurns, Participant], ...]:
        return tuple(zip(self._devices, self._seats, strict=True))

    def _seat(self, worker: Participant, place: int) -> Participant:
        """The job's place in the turns of one device."""
        device = self._devices[place].device

        def send(order: bytes) -> None:
            if order in (ALONE, SHARED):
                self._tell_company(worker, device, is_alone=order == ALONE)
            else:  # what it is can be seen on the device
                self._look_soon()

        return Participant(
            job=worker.job,
            send=send,
            charge=worker.charge,
            is_storing=worker.is_storing,
            on_overrun=worker.on_overrun,
            step_s=worker.step_s,
            is_due=lambda: self._is_next_after(place),
        )

    def _is_next_after(self, place: int) -> bool:
        """Whether the job would be next on all devices after that one."""
        return self._has_turn or all(turns.would_choose(seat) for turns, seat in self._places[place + 1 :])

    def _tell_company(self, worker: Participant, device: str, *, is_alone: bool) -> None:
        """Tell the worker whether it is alone on all its devices, once that is known of each, and where it changes."""
        self._is_alone[device] = is_alone
        now = all(self._is_alone.values())
        if len(self._is_alone) == len(self._devices) and now is not self._told_alone:
            self._told_alone = now
            worker.send(ALONE if now else SHARED)

    def _gather(self, worker: Participant) -> None:
        """The worker has asked for its turn: ask for the first device."""
        if worker.waits or self._has_turn:
            return
        worker.waits, worker.since_s, self._num_had = True, self._clock(), 0
        for seat in self._seats:
            seat.gathers, seat.since_s = True, worker.since_s
        self._want_next(worker)

    def _want_next(self, worker: Participant) -> None:
        self._devices[self._num_had].want(self._seats[self._num_had], since_s=worker.since_s)

    def _end(self, worker: Participant, line: TurnEnded) -> None:
        """The worker has given its devices back, or no longer wants them."""
        left_early = self._has_turn and not any(turns.wants_back(seat) for turns, seat in self._places)
        worker.waits, self._has_turn, self._num_had = False, False, 0
        self._told -= {YIELD, RELEASE} if line.released else {YIELD}
        for turns, seat in self._places:
            turns.ended(seat, line)
            seat.left_early = left_early
        for seat in self._seats:
            seat.gathers = False

    def _look_soon(self) -> None:
        if not self._is_look_due:
            self._is_look_due = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        """Go on from what the devices have decided."""
        self._is_look_due = False
        worker = self._worker
        if worker is None:
            return
        if worker.waits:
            self._go_on(worker)
        # A device that another job has comes from a time without a daemon: the workers' locks keep that one from it.
        lacks = any(turns.holder is not seat or turns.wants_back(seat) for turns, seat in self._places)
        if any(seat.asked_to_release for seat in self._seats) and RELEASE not in self._told:
            # In a turn, this asks for the devices too.
            self._told |= {RELEASE, YIELD} if self._has_turn else {RELEASE}
            worker.send(RELEASE)
        elif self._has_turn and lacks and YIELD not in self._told:
            self._told.add(YIELD)
            worker.send(YIELD)

    def _go_on(self, worker: Participant) -> None:
        """Ask for the next device where the last one was granted, or for one again that is wanted back. What a device
        answers at once is seen in another look."""
        asked = next((place for place, (turns, seat) in enumerate(self._places) if turns.wants_back(seat)), None)
        if asked is not None:
            # With those after it: nobody has a device while waiting for one before it.
            for turns, seat in self._places[asked : self._num_had + 1]:
                turns.ended(seat, TurnEnded())
                seat.left_early = False
            self._num_had = asked
            self._want_next(worker)
        elif self._devices[self._num_had].holder is self._seats[self._num_had]:
            if self._num_had + 1 == len(self._devices):
                self._begin(worker)
            else:
                self._num_had += 1
                self._want_next(worker)

    def _begin(self, worker: Participant) -> None:
        """All devices are the job's: the worker has its turn."""
        worker.waits, worker.had_turn, self._has_turn, self._num_had = False, True, True, 0
        for turns, seat in self._places:
            turns.begin(seat)
        worker.send(TURN)

"""Turns of jobs on several devices: all of them or none, whatever the others do."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from tests.support.virtual_time import run_in_virtual_time

from horizon_server.events import MemoryReleased, StepDone, TurnEnded, TurnLine, TurnWanted
from horizon_server.jobs.joint_turn import JointTurn
from horizon_server.jobs.turns import DeviceTurns, Participant
from horizon_server.planning.gpus import PROCESS_BYTES
from horizon_server.scheduling.shares import Shares
from horizon_server.scheduling.state import Job, Rules
from horizon_server.telemetry.metrics import Metrics
from horizon_server.worker_link.orders import ALONE, RELEASE, SHARED, TURN, YIELD
from horizon_server.worker_link.protocol import TurnState

SLICE_S, GRACE_S = 1.0, 30.0


@dataclass(kw_only=True, eq=False)
class Worker:
    """What the daemon sends one worker, and what it is charged."""

    turns: DeviceTurns | JointTurn
    participant: Participant
    orders: list[bytes] = field(default_factory=list)
    company: list[bytes] = field(default_factory=list)
    used_s: float = 0.0

    def says(self, line: TurnLine) -> None:
        self.turns.handle(self.participant, line)

    def steps(self, duration_s: float = 0.1, compute_s: float | None = None) -> None:
        self.turns.stepped(self.participant, step_done(duration_s, duration_s if compute_s is None else compute_s))


class Desk:
    """The turns of some devices."""

    def __init__(self, num_devices: int = 2, *, usable_bytes: int | None = None) -> None:
        self.shares, self.metrics = Shares(86400.0), Metrics()
        self.overruns: list[str] = []
        self.clock = asyncio.get_running_loop().time
        self.devices = [
            DeviceTurns(
                f"cuda:{index}",
                usable_bytes=usable_bytes,
                shares=self.shares,
                rules=Rules(time_slice_s=SLICE_S),
                grace_s=GRACE_S,
                metrics=self.metrics,
                clock=self.clock,
            )
            for index in range(num_devices)
        ]

    def worker(
        self,
        name: str,
        *devices: int,
        send: Callable[[bytes], None] | None = None,
        turn: TurnState = "none",
        joins: bool = True,
        device_bytes: int = 0,
    ) -> Worker:
        job = Job(
            job_id=name,
            user=name,
            project=name,
            priority=0,
            order=0,
            since_s=0.0,
            device="cuda",
            host_bytes=0,
            device_bytes=device_bytes,
            num_devices=len(devices),
        )

        def charge(device_s: float) -> None:
            worker.used_s += device_s
            self.shares.charge(name, name, device_s, self.clock())

        def order(what: bytes) -> None:
            (worker.company if what in (ALONE, SHARED) else worker.orders).append(what)
            if send is not None and what not in (ALONE, SHARED):
                send(what)

        def on_overrun(text: str, is_last: bool) -> None:
            self.overruns.append(f"{name}: {text} ({is_last})")

        participant = Participant(
            job=job, send=order, charge=charge, is_storing=lambda: False, on_overrun=on_overrun, step_s=0.1
        )
        chosen = [self.devices[index] for index in devices]
        turns = chosen[0] if len(chosen) == 1 else JointTurn(chosen, clock=self.clock)
        worker = Worker(turns=turns, participant=participant)
        if joins:
            turns.join(participant, turn=turn)
        return worker

    @property
    def holders(self) -> list[str]:
        return [turns.holder.job.job_id if turns.holder else "" for turns in self.devices]

    def series(self, name: str) -> float:
        return sum(
            sample.value
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.name == name
        )


async def settled() -> None:
    """Let what the devices have decided take effect, one device after the other."""
    for _ in range(10):
        await asyncio.sleep(0)


def step_done(duration_s: float, compute_s: float) -> StepDone:
    return StepDone(
        step=1,
        num_steps=9,
        epoch=0.1,
        duration_s=duration_s,
        compute_s=compute_s,
        eta_s=1.0,
        loss=1.0,
        grad_norm=1.0,
        learning_rate=0.1,
        num_input_tokens_seen=8,
        num_tokens=8,
        tokens_per_second=80.0,
    )


def test_a_job_of_two_devices_has_both_or_waits_and_each_charges_its_own_seconds() -> None:
    async def life() -> None:
        desk = Desk()
        joint, single = desk.worker("joint", 0, 1), desk.worker("single", 1)
        single.says(TurnWanted())
        joint.says(TurnWanted())
        assert desk.holders == ["joint", "single"]
        assert (joint.orders, joint.participant.waits, joint.participant.silence_limit_s(600.0)) == ([], True, None)
        await asyncio.sleep(1.5 * SLICE_S)
        assert single.orders == [TURN, YIELD], "its slice is over, and the other one has used less"
        single.says(TurnEnded())
        await settled()
        assert (desk.holders, joint.orders) == (["joint", "joint"], [TURN])
        assert (joint.participant.waits, joint.participant.had_turn) == (False, True)
        desk.devices[0].charge()
        assert joint.used_s == 0.0, "nothing while it only waited"
        single.says(TurnWanted())
        await asyncio.sleep(2.5 * SLICE_S)
        assert joint.orders == [TURN, YIELD]
        joint.says(TurnEnded())
        assert (desk.holders, single.orders) == (["", "single"], [TURN, YIELD, TURN])
        assert joint.used_s == pytest.approx(2 * 2.5 * SLICE_S)
        assert desk.series("horizon_device_turns_total") == 3

    run_in_virtual_time(life())


def test_a_device_that_is_wanted_is_given_back_while_the_job_waits_for_another_one() -> None:
    async def life() -> None:
        desk = Desk()
        busy, joint, third = desk.worker("busy", 1), desk.worker("joint", 0, 1), desk.worker("third", 0)
        # It has used much, and is not asked to give its device back.
        desk.shares.charge("joint", "joint", 100.0, 0.0)
        busy.says(TurnWanted())
        joint.says(TurnWanted())
        assert desk.holders == ["joint", "busy"]
        third.says(TurnWanted())
        await asyncio.sleep(1.5 * SLICE_S)
        assert desk.holders == ["third", "busy"]
        assert (joint.orders, joint.used_s, joint.participant.waits) == ([], 0.0, True)
        assert [one.waits for one in desk.devices[0].participants] == [True, False], "it asks for the first one again"
        assert not any(one.waits for one in desk.devices[1].participants), "and for no other before it has that one"
        third.says(TurnEnded())
        busy.says(TurnEnded())
        await settled()
        assert (desk.holders, joint.orders) == (["joint", "joint"], [TURN])
        assert desk.series("horizon_device_turns_total") == 2, "what it gave back was no turn"

    run_in_virtual_time(life())


def test_no_device_stays_idle_for_a_job_that_is_not_next_on_the_other_one() -> None:
    async def life() -> None:
        desk = Desk()
        new, joint, old = desk.worker("new", 1), desk.worker("joint", 0, 1), desk.worker("old", 0)
        desk.shares.charge("joint", "joint", 50.0, 0.0)
        desk.shares.charge("old", "old", 100.0, 0.0)
        new.says(TurnWanted())
        old.says(TurnWanted())
        joint.says(TurnWanted())
        await asyncio.sleep(5 * SLICE_S)
        assert desk.holders == ["old", "new"], "joint comes before old, but not before new"
        assert old.orders == [TURN]
        await asyncio.sleep(50 * SLICE_S)
        assert (old.orders, new.orders) == ([TURN, YIELD], [TURN])
        old.says(TurnEnded())
        await asyncio.sleep(2 * SLICE_S)
        assert new.orders == [TURN, YIELD], "now it has used as much"

    run_in_virtual_time(life())


def test_a_worker_is_asked_once_and_for_its_memory_where_one_device_lacks_it() -> None:
    async def life() -> None:
        desk = Desk(usable_bytes=10 * 2**30 + PROCESS_BYTES)
        joint = desk.worker("joint", 0, 1, device_bytes=8 * 2**30)
        assert joint.company == [ALONE]
        small, large = desk.worker("small", 0, device_bytes=2**30), desk.worker("large", 1, device_bytes=4 * 2**30)
        assert joint.company == [ALONE, SHARED]
        joint.says(TurnWanted())
        await settled()
        small.says(TurnWanted())
        large.says(TurnWanted())
        await asyncio.sleep(1.5 * SLICE_S)
        assert joint.orders == [TURN, RELEASE]
        joint.says(TurnEnded(released=True))
        assert desk.holders == ["small", "large"]
        joint.says(TurnWanted())
        await settled()
        assert joint.orders == [TURN, RELEASE], "it waits, and holds nothing"

    run_in_virtual_time(life())


def test_memory_of_a_job_that_waits_for_an_earlier_device_is_freed_for_the_job_on_a_later_one() -> None:
    async def life() -> None:
        desk = Desk(usable_bytes=10 * 2**30 + PROCESS_BYTES)
        joint, first, later = (
            desk.worker("joint", 0, 1, device_bytes=8 * 2**30),
            desk.worker("first", 0, device_bytes=2**30),
            desk.worker("later", 1, device_bytes=4 * 2**30),
        )
        joint.says(TurnWanted())
        await settled()
        first.says(TurnWanted())
        await asyncio.sleep(1.5 * SLICE_S)
        joint.says(TurnEnded())
        joint.says(TurnWanted())
        assert desk.holders == ["first", ""]
        later.says(TurnWanted())
        await settled()
        assert (joint.orders, later.orders) == ([TURN, YIELD, RELEASE], [])
        joint.says(MemoryReleased())
        assert later.orders == [TURN]

    run_in_virtual_time(life())


def test_a_job_that_is_granted_its_turn_before_it_frees_its_memory_counts_as_having_it() -> None:
    async def life() -> None:
        desk = Desk(1, usable_bytes=8 + 2 * PROCESS_BYTES)
        first, second = desk.worker("first", 0, device_bytes=4), desk.worker("second", 0, device_bytes=4)
        large = desk.worker("large", 0, device_bytes=8)
        first.says(TurnWanted())
        second.says(TurnWanted())
        await asyncio.sleep(1.5 * SLICE_S)
        first.says(TurnEnded())
        first.says(TurnWanted())
        large.says(TurnWanted())
        await asyncio.sleep(1.5 * SLICE_S)
        second.says(TurnEnded(released=True))
        assert first.orders == [TURN, YIELD, RELEASE]
        large.turns.leave(large.participant)
        assert first.orders == [TURN, YIELD, RELEASE, TURN]
        first.says(MemoryReleased())
        assert first.participant.holds_memory, "its turn takes it again"

    run_in_virtual_time(life())


def test_the_time_to_free_memory_begins_with_each_request() -> None:
    async def life() -> None:
        desk = Desk(1, usable_bytes=8 + PROCESS_BYTES)
        first, large = desk.worker("first", 0, device_bytes=4), desk.worker("large", 0, device_bytes=8)
        first.says(TurnWanted())
        large.says(TurnWanted())
        await asyncio.sleep(1.5 * SLICE_S)
        first.says(TurnEnded())  # before it read that it is to free its memory
        first.says(TurnWanted())
        await asyncio.sleep(SLICE_S)
        first.says(MemoryReleased())
        large.says(TurnEnded(released=True))
        assert (first.orders, large.orders) == ([TURN, RELEASE, TURN], [TURN])
        large.says(TurnWanted())
        await asyncio.sleep(GRACE_S - 2 * SLICE_S)
        first.says(TurnEnded())
        first.says(TurnWanted())
        await asyncio.sleep(2 * SLICE_S)
        assert not desk.overruns, "the second request is 2 s old"
        await asyncio.sleep(GRACE_S)
        assert [text[:39] for text in desk.overruns] == ["first: the worker has not freed its mem"]

    run_in_virtual_time(life())


@pytest.mark.parametrize("turn", ["held", "wanted"])
def test_a_worker_of_an_earlier_daemon_keeps_its_turn_or_goes_on_waiting(turn: TurnState) -> None:
    async def life() -> None:
        desk = Desk()
        joint = desk.worker("joint", 0, 1, turn=turn)
        await settled()
        assert (desk.holders, joint.orders) == (["joint", "joint"], [] if turn == "held" else [TURN])
        assert (joint.participant.had_turn, joint.participant.waits) == (True, False)

    run_in_virtual_time(life())


def test_a_worker_that_took_its_turn_alone_is_asked_for_it_where_another_has_one_of_its_devices() -> None:
    async def life() -> None:
        desk = Desk()
        other = desk.worker("other", 1, turn="wanted")
        joint = desk.worker("joint", 0, 1, turn="held")
        await settled()
        assert (desk.holders, joint.orders) == (["joint", "other"], [YIELD])
        joint.says(TurnEnded())
        joint.says(TurnWanted())
        other.says(TurnEnded())
        await settled()
        assert (desk.holders, joint.orders) == (["joint", "joint"], [YIELD, TURN])

    run_in_virtual_time(life())


@pytest.mark.parametrize("when", ["with its turn", "while it waits"])
def test_a_worker_that_dies_frees_all_its_devices(when: str) -> None:
    async def life() -> None:
        desk = Desk()
        joint, zero, one = desk.worker("joint", 0, 1), desk.worker("zero", 0), desk.worker("one", 1)
        if when == "while it waits":
            one.says(TurnWanted())
        joint.says(TurnWanted())
        await settled()
        zero.says(TurnWanted())
        one.says(TurnWanted())
        joint.turns.leave(joint.participant)
        await settled()
        assert desk.holders == ["zero", "one"]
        joint.says(TurnEnded())  # read late
        assert desk.holders == ["zero", "one"]
        again = desk.worker("joint", 0, 1)
        assert again.participant.had_turn is False

    run_in_virtual_time(life())


class Walk:
    """Devices with memory, and workers on them that do what they like."""

    def __init__(self, seed: int, *, leaves_idle: bool) -> None:
        self.random, self.leaves_idle = random.Random(seed), leaves_idle
        self.jobs = {"a": (0, 1), "b": (1, 2), "c": (0, 2), "d": (0, 1, 2), "e": (1,), "f": (2,)}
        self.sizes = {name: self.random.randint(10, 60) << 30 for name in self.jobs}
        # Jobs that die and come again leave more or less of it to the others meanwhile.
        self.usable_bytes = (80 << 30) + PROCESS_BYTES * (len(self.jobs) - 1)
        self.desk = Desk(3, usable_bytes=self.usable_bytes)
        self.on_device: dict[int, str] = {}
        self.in_memory: list[set[str]] = [set(), set(), set()]
        self.num_turns = dict.fromkeys(self.jobs, 0)
        self.longest_wait_s = 0.0

    async def run(self, duration_s: float) -> None:
        end_s = self.desk.clock() + duration_s
        async with asyncio.TaskGroup() as group:
            for name in self.jobs:
                group.create_task(self._live(name, end_s))

    @contextmanager
    def _computing(self, name: str) -> Iterator[None]:
        for device in self.jobs[name]:
            assert device not in self.on_device, f"{name} and {self.on_device[device]} have device {device}"
            self.on_device[device] = name
            self.in_memory[device].add(name)
            held = sum(self.sizes[one] for one in self.in_memory[device])
            assert held <= self.usable_bytes, f"device {device} holds {self.in_memory[device]}"
        try:
            yield
        finally:
            for device in self.jobs[name]:
                del self.on_device[device]

    def _free(self, name: str) -> None:
        for held in self.in_memory:
            held.discard(name)

    async def _live(self, name: str, end_s: float) -> None:
        while self.desk.clock() < end_s:
            await self._one_worker(name, end_s)

    async def _one_worker(self, name: str, end_s: float) -> None:
        """A worker until it dies or the time is over."""
        pick, clock = self.random, self.desk.clock
        orders, news = list[bytes](), asyncio.Event()
        has_turn = wanted_back = release = False

        def hear() -> None:
            nonlocal has_turn, wanted_back, release
            for order in orders:
                assert order in (TURN, YIELD, RELEASE)
                if order == TURN:
                    has_turn, wanted_back = True, False
                elif order == RELEASE:
                    release, wanted_back = True, has_turn
                elif has_turn:
                    wanted_back = True
            orders.clear()
            news.clear()

        def send(order: bytes) -> None:
            orders.append(order)
            news.set()

        worker = self.desk.worker(name, *self.jobs[name], send=send, device_bytes=self.sizes[name])
        await asyncio.sleep(pick.random())
        while clock() < end_s:
            began_s = clock()
            worker.says(TurnWanted())
            while True:
                hear()
                if release and not wanted_back:
                    await asyncio.sleep(0.01 * pick.random())
                    self._free(name)
                    release = False
                    worker.says(MemoryReleased())
                    hear()
                if has_turn:
                    break
                await asyncio.wait_for(news.wait(), 1000 * SLICE_S)
            self.longest_wait_s = max(self.longest_wait_s, clock() - began_s)
            self.num_turns[name] += 1
            dies = pick.random() < 0.02
            with self._computing(name):
                checkpoints = False
                while not (dies or wanted_back or checkpoints or clock() >= end_s):
                    step_s = 0.05 + 0.2 * pick.random()
                    await asyncio.sleep(step_s)
                    worker.steps(step_s, step_s / 2 if self.leaves_idle else step_s)
                    checkpoints = pick.random() < 0.03
                    hear()
            if dies:
                self._free(name)
                worker.turns.leave(worker.participant)
                return
            has_turn = wanted_back = False
            if checkpoints or release:
                self._free(name)
            worker.says(TurnEnded(released=checkpoints or release))
            release = False
            if checkpoints:
                await asyncio.sleep(2 * pick.random())
            elif pick.random() < 0.5:
                await asyncio.sleep(0)
        self._free(name)
        worker.turns.leave(worker.participant)


@pytest.mark.parametrize("leaves_idle", [False, True], ids=["slices", "steps"])
@pytest.mark.parametrize("seed", range(3))
def test_jobs_of_several_devices_all_get_turns_and_never_two_have_one_device(seed: int, leaves_idle: bool) -> None:
    async def life() -> None:
        walk = Walk(seed, leaves_idle=leaves_idle)
        await walk.run(300 * SLICE_S)
        assert min(walk.num_turns.values()) >= 20
        assert walk.longest_wait_s < 30 * SLICE_S
        assert not walk.desk.overruns
        assert all(turns.holder is None and not turns.participants for turns in walk.desk.devices)

    run_in_virtual_time(life())

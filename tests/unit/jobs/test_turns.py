"""Turns on one device: who gets it, when it is asked back, and what happens with workers that do not answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from horizon_server.events import StepDone, TurnEnded
from horizon_server.jobs.turns import FIRST_STEP_S, DeviceTurns, Participant
from horizon_server.planning.gpus import PROCESS_BYTES
from horizon_server.records.sharing import Allowance
from horizon_server.scheduling.shares import Shares
from horizon_server.scheduling.state import Job, Rules
from horizon_server.telemetry.metrics import Metrics
from horizon_server.worker_link.orders import ALONE, RELEASE, SHARED, TURN, YIELD

SLICE_S, GRACE_S = 0.05, 0.1


@dataclass(kw_only=True)
class Worker:
    """What the daemon sends one worker, and what it is charged."""

    participant: Participant
    orders: list[bytes] = field(default_factory=list)
    used_s: float = 0.0
    overruns: list[tuple[str, bool]] = field(default_factory=list)
    storing: bool = False
    is_alone: bool | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(240):
            while not is_so():
                self.news.clear()
                await self.news.wait()

    async def until_ordered(self, order: bytes) -> None:
        await self.until(lambda: order in self.orders)


class Desk:
    """The turns of one device, and workers that ask for them."""

    def __init__(
        self,
        *,
        usable_bytes: int | None = None,
        allowances: tuple[Allowance, ...] = (),
        slice_s: float = SLICE_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.shares = Shares(86400.0, allowances=allowances)
        self.metrics = Metrics()
        self.turns = DeviceTurns(
            "cuda:0",
            usable_bytes=usable_bytes,
            shares=self.shares,
            rules=Rules(time_slice_s=slice_s),
            grace_s=GRACE_S,
            metrics=self.metrics,
            clock=clock,
        )

    def worker(self, name: str, *, user: str = "", priority: int = 0, device_bytes: int = 0) -> Worker:
        job = Job(
            job_id=name,
            user=user or name,
            project=user or name,
            priority=priority,
            order=0,
            since_s=0.0,
            device="cuda:0",
            host_bytes=0,
            device_bytes=device_bytes,
        )
        worker: Any = Worker(participant=None)  # type: ignore[arg-type]

        def charge(device_s: float) -> None:
            worker.used_s += device_s
            self.shares.charge(job.project, job.user, device_s, time.time())

        def send(order: bytes) -> None:
            if order in (ALONE, SHARED):
                worker.is_alone = order == ALONE
                return
            worker.orders.append(order)
            worker.news.set()

        def on_overrun(text: str, is_last: bool) -> None:
            worker.overruns.append((text, is_last))
            worker.news.set()

        worker.participant = Participant(
            job=job, send=send, charge=charge, is_storing=lambda: worker.storing, on_overrun=on_overrun
        )
        self.turns.join(worker.participant)
        return worker  # type: ignore[no-any-return]

    def series(self, name: str) -> float:
        return sum(
            sample.value
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.name == name
        )


def in_loop(test: Callable[[], Any]) -> None:
    asyncio.run(test())


def test_the_only_job_keeps_the_device_and_is_never_asked_for_it() -> None:
    async def life() -> None:
        desk = Desk()
        only = desk.worker("a")
        desk.turns.want(only.participant)
        await asyncio.sleep(3 * SLICE_S)
        desk.turns.charge()
        assert only.orders == [TURN]
        assert only.used_s >= 3 * SLICE_S

    in_loop(life)


def test_after_a_slice_the_device_goes_to_the_one_that_has_used_less() -> None:
    async def life() -> None:
        desk = Desk()
        first, second = desk.worker("a"), desk.worker("b")
        desk.turns.want(first.participant)
        desk.turns.want(second.participant)
        assert second.orders == []
        await first.until_ordered(YIELD)
        desk.turns.ended(first.participant, TurnEnded(began_s=1.0, ended_s=2.0))
        assert second.orders == [TURN]
        assert first.used_s >= SLICE_S
        assert desk.series("horizon_device_turns_total") == 1
        desk.turns.ended(second.participant, TurnEnded(began_s=2.125, ended_s=3.0))
        assert desk.series("horizon_device_handover_seconds_sum") == 0.125

    in_loop(life)


def test_a_job_that_wrote_a_checkpoint_need_not_wait_for_the_end_of_anothers_slice() -> None:
    async def life() -> None:
        desk = Desk(slice_s=3600.0, allowances=(Allowance(holder="project", name="a", weight=1000.0),))
        writer, other = desk.worker("a"), desk.worker("b")
        desk.shares.charge("b", "b", 100.0, time.time())
        desk.turns.want(writer.participant)
        desk.turns.want(other.participant)
        desk.turns.ended(writer.participant, TurnEnded(released=False))
        assert other.orders == [TURN], "the device is not idle meanwhile"
        desk.turns.want(writer.participant)
        await other.until_ordered(YIELD)
        desk.turns.ended(other.participant, TurnEnded(released=False))
        assert writer.orders == [TURN, TURN]
        # One that has used more than its share waits for the end of the slice.
        desk.turns.want(other.participant)
        desk.turns.ended(writer.participant, TurnEnded(released=False))
        desk.shares.charge("a", "a", 1e9, time.time())
        desk.turns.want(writer.participant)
        await asyncio.sleep(0.05)
        assert other.orders == [TURN, YIELD, TURN]

    in_loop(life)


def test_a_job_that_is_still_next_after_its_slice_gets_another() -> None:
    async def life() -> None:
        desk = Desk(allowances=(Allowance(holder="project", name="a", weight=1000.0),))
        heavy, light = desk.worker("a"), desk.worker("b")
        desk.turns.want(light.participant)
        await asyncio.sleep(SLICE_S)
        desk.turns.want(heavy.participant)
        await light.until_ordered(YIELD)
        desk.turns.ended(light.participant, TurnEnded(released=False))
        desk.turns.want(light.participant)
        await asyncio.sleep(3 * SLICE_S)
        assert heavy.orders == [TURN]

    in_loop(life)


def test_a_job_that_comes_in_the_middle_of_a_slice_waits_for_its_end_and_no_longer() -> None:
    async def life() -> None:
        now_s = time.time()
        desk = Desk(slice_s=1000.0, clock=lambda: now_s)
        first, second, third = desk.worker("a"), desk.worker("b"), desk.worker("c")
        desk.turns.want(first.participant)
        now_s += 999.9
        desk.turns.want(second.participant)
        assert first.orders == [TURN]
        await first.until_ordered(YIELD)
        desk.turns.ended(first.participant, TurnEnded())
        now_s += 5000.0  # alone for longer than a slice
        desk.turns.want(third.participant)
        await second.until_ordered(YIELD)

    in_loop(life)


def test_a_worker_that_is_gone_frees_the_device_at_once() -> None:
    async def life() -> None:
        desk = Desk()
        first, second, third = desk.worker("a"), desk.worker("b"), desk.worker("c")
        for worker in (first, second, third):
            desk.turns.want(worker.participant)
        desk.turns.leave(second.participant)  # it died while it waited
        desk.turns.leave(first.participant)  # and this one with the device
        assert third.orders == [TURN]
        assert second.orders == []

    in_loop(life)


def test_a_worker_that_no_longer_wants_its_turn_is_not_granted_it() -> None:
    async def run() -> None:
        desk = Desk()
        one, stopped, third = desk.worker("one"), desk.worker("stopped"), desk.worker("third")
        for worker in (one, stopped, third):
            desk.turns.want(worker.participant)
        # It was ordered to stop while it waited, and writes its checkpoint now.
        desk.turns.ended(stopped.participant, TurnEnded(released=True))
        desk.turns.ended(one.participant, TurnEnded(released=False))
        assert (stopped.orders, third.orders) == ([], [TURN])
        assert desk.turns.holder is third.participant

    in_loop(run)


def test_a_worker_that_keeps_the_device_is_reported_and_then_killed() -> None:
    async def life() -> None:
        desk = Desk()
        deaf, other = desk.worker("a"), desk.worker("b")
        desk.turns.stepped(deaf.participant, step_done(duration_s=0.01, compute_s=0.01))
        desk.turns.want(deaf.participant)
        desk.turns.want(other.participant)
        await deaf.until_ordered(YIELD)
        await deaf.until(lambda: len(deaf.overruns) == 2)
        assert [is_last for _, is_last in deaf.overruns] == [False, True]
        assert desk.series("horizon_turn_overruns_total") == 2

    in_loop(life)


def test_a_worker_whose_answer_the_daemon_has_not_read_is_not_killed() -> None:
    async def life() -> None:
        desk = Desk()
        slow, other = desk.worker("a"), desk.worker("b")
        slow.storing = True
        desk.turns.stepped(slow.participant, step_done(duration_s=0.01, compute_s=0.01))
        desk.turns.want(slow.participant)
        desk.turns.want(other.participant)
        await asyncio.sleep(SLICE_S + 4 * GRACE_S)
        assert slow.overruns == []

    in_loop(life)


@pytest.mark.parametrize("gives_back", ["with its memory", "without"])
def test_memory_is_freed_before_another_job_gets_a_device_without_room(gives_back: str) -> None:
    async def life() -> None:
        desk = Desk(usable_bytes=10 + PROCESS_BYTES)
        first, second = desk.worker("a", device_bytes=6), desk.worker("b", device_bytes=6)
        desk.turns.want(first.participant)
        desk.turns.want(second.participant)
        await first.until_ordered(RELEASE)
        if gives_back == "with its memory":
            desk.turns.ended(first.participant, TurnEnded(released=True))
        else:  # it gave the device back by itself just before the order came
            desk.turns.ended(first.participant, TurnEnded(released=False))
            assert second.orders == []
            desk.turns.want(first.participant)
            desk.turns.released(first.participant)
        assert second.orders == [TURN]

    in_loop(life)


def test_memory_stays_where_there_is_room_for_both() -> None:
    async def life() -> None:
        desk = Desk(usable_bytes=12 + PROCESS_BYTES)
        first, second = desk.worker("a", device_bytes=6), desk.worker("b", device_bytes=6)
        desk.turns.want(first.participant)
        desk.turns.want(second.participant)
        await first.until_ordered(YIELD)
        assert RELEASE not in first.orders

    in_loop(life)


def test_jobs_that_leave_the_device_idle_change_at_every_step() -> None:
    async def life() -> None:
        desk = Desk()
        first, second = desk.worker("a"), desk.worker("b")
        desk.turns.want(first.participant)
        desk.turns.want(second.participant)
        desk.turns.stepped(first.participant, step_done(duration_s=1.0, compute_s=0.5))
        assert first.orders == [TURN, YIELD]
        desk.turns.ended(first.participant, TurnEnded(released=False))
        desk.turns.want(first.participant)
        assert second.orders == [TURN]
        desk.turns.stepped(second.participant, step_done(duration_s=1.0, compute_s=0.5))
        assert second.orders == [TURN, YIELD]

    in_loop(life)


def test_a_job_that_reports_no_steps_is_asked_for_the_device_when_others_change_at_every_step() -> None:
    async def life() -> None:
        desk = Desk()
        # As in the pass over the data before the first step, or in an evaluation.
        passing, stepping = desk.worker("a"), desk.worker("b")
        desk.turns.want(stepping.participant)
        desk.turns.stepped(stepping.participant, step_done(duration_s=1.0, compute_s=0.5))
        desk.turns.want(passing.participant)
        await stepping.until_ordered(YIELD)
        desk.shares.charge("b", "b", SLICE_S, time.time())
        desk.turns.ended(stepping.participant, TurnEnded(released=False))
        # It has used less so far, so that it keeps the device at first.
        desk.turns.want(stepping.participant)
        assert passing.orders == [TURN]
        await passing.until_ordered(YIELD)

    in_loop(life)


def test_inside_one_users_share_the_higher_priority_goes_first() -> None:
    async def life() -> None:
        desk = Desk()
        busy = desk.worker("busy", user="ada")
        low, high = desk.worker("low", user="ada"), desk.worker("high", user="ada", priority=5)
        for worker in (busy, low, high):
            desk.turns.want(worker.participant)
        desk.turns.leave(busy.participant)
        assert high.orders == [TURN]

    in_loop(life)


def step_done(*, duration_s: float, compute_s: float) -> StepDone:
    return StepDone(
        step=1,
        num_steps=9,
        loss=1.0,
        grad_norm=1.0,
        learning_rate=0.1,
        epoch=0.1,
        num_input_tokens_seen=8,
        num_tokens=8,
        tokens_per_second=8.0,
        duration_s=duration_s,
        compute_s=compute_s,
    )


def test_a_job_of_which_no_step_is_known_has_long_for_its_first() -> None:
    async def life() -> None:
        desk = Desk()
        starting, other = desk.worker("a"), desk.worker("b")
        desk.turns.want(starting.participant)
        desk.turns.want(other.participant)
        await asyncio.sleep(SLICE_S + 4 * GRACE_S)
        assert starting.orders == [TURN, YIELD]
        assert starting.overruns == []
        assert starting.participant.most_step_s == FIRST_STEP_S

    in_loop(life)

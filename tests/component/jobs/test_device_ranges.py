"""Jobs that may use several numbers of devices: they take what is free, give back what others need, and continue in the
same memory. The whole daemon, with workers that follow a script."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.component.jobs.conftest import ADA
from tests.conftest import MakeDaemon
from tests.daemon_parts import ROOT, WAIT_S, DaemonParts, Script

from horizon_server.errors import InvalidSpec
from horizon_server.events import Message, StateChanged, StepDone
from horizon_server.jobs.attempt import Attempt
from horizon_server.planning.planner import Planner
from horizon_server.records.account import Principal
from horizon_server.records.job import JobRecord, JobState, StopRequest
from horizon_server.records.plan import Plan
from horizon_server.records.sharing import NodeCondition

S = JobState
BOB = Principal(name="bob", role="user", project="bob")
# So long that a change pays, whatever loading took.
LONG = Script(num_steps=1_000_000, step_s=0.02)
NODE: dict[str, Any] = {"host_devices": 2, "num_threads": 2, "keep_devices_s": 0.0, "look_every_s": 0.1}


def planned(job: JobRecord) -> Plan:
    assert job.plan is not None
    return job.plan


async def until(daemon: DaemonParts, job: JobRecord, is_so: Callable[[JobRecord], bool]) -> JobRecord:
    """Wait until a job is RUNNING, and so."""
    async with asyncio.timeout(WAIT_S):
        async for _ in daemon.parts.journal.follow(job.job_id, 0):
            now = await daemon.job(job.job_id)
            if now.job_state is S.RUNNING and is_so(now):
                return now
    raise AssertionError("the job has ended")


async def on(daemon: DaemonParts, job: JobRecord, *devices: str) -> JobRecord:
    """Wait until a job has done a step on these devices."""
    found = await until(daemon, job, lambda now: planned(now).devices == devices)
    return await until(daemon, job, lambda now: planned(now).devices == devices and now.step > found.step)


async def steps_of(daemon: DaemonParts, job: JobRecord) -> list[int]:
    events = await daemon.parts.journal.store.events_after(job.job_id, 0, 100_000)
    return [event.payload.step for event in events if isinstance(event.payload, StepDone)]


async def moves_of(daemon: DaemonParts, job: JobRecord) -> list[str]:
    events = await daemon.parts.journal.store.events_after(job.job_id, 0, 100_000)
    found = [event.payload for event in events if isinstance(event.payload, StateChanged)]
    return [state.message for state in found if state.reason == "MOVED"]


async def test_a_job_takes_what_is_free_and_changes_with_what_others_need(
    make_daemon: MakeDaemon, state_dir: Path
) -> None:
    async with make_daemon(state_dir, **NODE) as daemon:
        await daemon.dataset(await daemon.user("bob"))
        single = await daemon.submit(BOB, "single", LONG)
        single = await daemon.until(single.job_id, S.RUNNING, step=1)
        job = await daemon.submit(ADA, "job", LONG, gpus="1-2")
        span = planned(job).device_range
        assert span is not None and (span.least, span.most, planned(job).num_devices) == (1, 2, 1)
        assert span.host_bytes == planned(job).kept_host_bytes >= planned(job).host_total_bytes
        assert planned(single).devices == ("host:0",)
        await on(daemon, job, "host:1")
        assert planned(await daemon.job(job.job_id)).execution.num_ranks == 1
        await daemon.services.jobs.cancel(BOB, single.job_id)
        await on(daemon, job, "host:0", "host:1")
        again = await daemon.submit(BOB, "again", LONG)
        one = planned(await daemon.until(again.job_id, S.RUNNING, step=1)).device
        other = {"host:0": "host:1", "host:1": "host:0"}[one]
        found = await on(daemon, job, other)
        assert (found.attempt, found.num_restarts, planned(found).num_devices) == (3, 0, 1)
        assert await moves_of(daemon, job) == [
            "continues on 2 devices, host:0 and host:1: host:0 is free",
            f"continues on 1 device, {other}: other jobs need {one}",
        ]
        await daemon.vanish()
    async with make_daemon(state_dir, **NODE) as daemon:
        before = await daemon.job(again.job_id)
        await until(daemon, again, lambda now: now.step > before.step)
        await daemon.services.jobs.cancel(BOB, again.job_id)
        await on(daemon, job, "host:0", "host:1")
        await daemon.services.jobs.cancel(ADA, job.job_id)
        await daemon.until(job.job_id, S.CANCELLED)
        steps = await steps_of(daemon, job)
        assert steps == list(range(1, len(steps) + 1)), "no step is repeated, and none is left out"


async def test_it_keeps_its_devices_for_as_long_as_the_setting_says(make_daemon: MakeDaemon, state_dir: Path) -> None:
    async with make_daemon(state_dir, **{**NODE, "keep_devices_s": 3600.0}) as daemon:
        await daemon.dataset(await daemon.user("bob"))
        job = await daemon.submit(ADA, "job", LONG, gpus="1-2")
        await on(daemon, job, "host:0", "host:1")
        single = await daemon.submit(BOB, "single", LONG)
        await daemon.until(single.job_id, S.RUNNING, step=3)
        found = await on(daemon, job, "host:0", "host:1")
        assert (found.attempt, await moves_of(daemon, job)) == (1, [])
        steps = [await steps_of(daemon, one) for one in (job, single)]
        assert min(map(len, steps)) > 1, "they take turns"


async def test_two_jobs_that_come_together_share_what_there_is_without_a_change(
    make_daemon: MakeDaemon, state_dir: Path
) -> None:
    async with make_daemon(state_dir, **NODE) as daemon:
        await daemon.set_node("cordoned")
        jobs = [await daemon.submit(ADA, name, LONG, gpus="1-2") for name in ("one", "two")]
        await daemon.set_node()
        devices = [planned(await until(daemon, job, lambda now: now.step > 0)).devices for job in jobs]
        assert sorted(itertools.chain(*devices)) == ["host:0", "host:1"]
        assert [await moves_of(daemon, job) for job in jobs] == [[], []]


async def test_a_pause_that_comes_while_it_moves_is_checkpointed_from_its_memory(
    make_daemon: MakeDaemon, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = Attempt._moved

    async def pausing(self: Attempt, *values: Any) -> Any:
        await self.stop(StopRequest.PAUSE)
        return await moved(self, *values)

    async with make_daemon(state_dir, **NODE) as daemon:
        job = await daemon.submit(ADA, "job", LONG, gpus="1-2")
        await on(daemon, job, "host:0", "host:1")
        monkeypatch.setattr(Attempt, "_moved", pausing)
        await daemon.services.sharing.set_node(ROOT, NodeCondition(withdrawn=("host:0",)))
        paused = await daemon.until(job.job_id, S.PAUSED)
        newest = daemon.parts.scheduler.runtime.folders.checkpoints(job.job_id).newest()
        assert newest is not None and newest.name == f"step-{paused.step:08d}"


async def test_a_withdrawn_device_is_left_and_taken_again_once_it_is_restored(
    make_daemon: MakeDaemon, state_dir: Path
) -> None:
    async with make_daemon(state_dir, **NODE) as daemon:
        job = await daemon.submit(ADA, "job", LONG, gpus="1-2")
        fixed = await daemon.submit(ADA, "fixed", LONG, gpus=2)
        for one in (job, fixed):
            await until(daemon, one, lambda now: now.step > 0)
        await daemon.services.sharing.set_node(ROOT, NodeCondition(withdrawn=("host:1",)))
        await on(daemon, job, "host:0")
        waiting = await daemon.until(fixed.job_id, S.QUEUED)
        assert (waiting.reason, waiting.step > 0) == ("DEVICE_OUT_OF_SERVICE", True)
        wanted = (
            "cannot start: it needs 2 host devices and the node has: host:0; host:1 is withdrawn by an admin; with "
            "gpus: 1-2 it would run on the others"
        )
        # Worked out at each look at the queue, of which there is one for many steps of the other job.
        while (outlook := daemon.parts.scheduler.outlook(fixed.job_id)) is None or outlook.why != wanted:
            await daemon.until(job.job_id, step=(await daemon.job(job.job_id)).step + 1)
        status = await daemon.services.node.describe(ADA)
        assert [device.out_of_service for device in status.devices] == ["", "withdrawn by an admin"]
        assert (await daemon.services.sharing.condition()).withdrawn == ("host:1",)
        with pytest.raises(InvalidSpec, match=r"withdrawn has 'cuda:7'; the devices of this node are: host:0, host:1"):
            await daemon.services.sharing.set_node(ROOT, NodeCondition(withdrawn=("cuda:7",)))
        await daemon.set_node()
        again = await until(daemon, fixed, lambda now: now.step > waiting.step)
        assert planned(again).devices == ("host:0", "host:1")


async def test_a_job_that_cannot_be_planned_for_other_devices_stays_and_says_so(
    make_daemon: MakeDaemon, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Planner, *values: Any, **more: Any) -> Plan:
        raise InvalidSpec("the model is gone")

    monkeypatch.setattr(Planner, "plan_to_continue", refuse)
    async with make_daemon(state_dir, **NODE) as daemon:
        job = await daemon.submit(ADA, "job", LONG, gpus="1-2")
        await on(daemon, job, "host:0", "host:1")
        await daemon.services.sharing.set_node(ROOT, NodeCondition(withdrawn=("host:0",)))
        wanted = "it cannot continue on host:1, and stays where it is: the model is gone"
        texts: list[str] = []
        while wanted not in texts:
            await daemon.until(job.job_id, step=(await daemon.job(job.job_id)).step + 10)
            events = await daemon.parts.journal.store.events_after(job.job_id, 0, 100_000)
            texts = [event.payload.text for event in events if isinstance(event.payload, Message)]
        found = await daemon.until(job.job_id, step=(await daemon.job(job.job_id)).step + 30)
        assert (found.attempt, texts.count(wanted)) == (1, 1)


@pytest.mark.parametrize("gpus", ["1-2", 2])
async def test_a_job_whose_device_fails_continues_on_the_others_or_says_what_would_let_it(
    gpus: int | str, make_daemon: MakeDaemon, state_dir: Path
) -> None:
    async def why_broken(name: str) -> str:
        return "CUDA error: the device has fallen off the bus" if name == "host:1" else ""

    async with make_daemon(state_dir, max_restarts=2, **NODE) as daemon:
        daemon.parts.scheduler.runtime.view.health.why_broken = why_broken
        job = await daemon.submit(ADA, "job", Script(num_steps=12, step_s=0.02, break_at=4), gpus=gpus)
        what = "host:1 is out of service, as a trial of it failed: CUDA error: the device has fallen off the bus"
        if gpus == 2:
            waiting = await daemon.until(job.job_id, S.QUEUED, attempt=1)
            assert waiting.reason == "DEVICE_OUT_OF_SERVICE"
            assert waiting.message == (
                f"{what}; it needs 2 devices and continues when there are as many; with gpus: 1-2 it would run on "
                "the others"
            )
            return
        done = await daemon.until(job.job_id, S.SUCCEEDED)
        assert (planned(done).devices, planned(done).num_devices, done.attempt) == (("host:0",), 1, 2)
        assert await steps_of(daemon, job) == list(range(1, 13)), "it continues in the same memory"
        states = [event.payload for event in await daemon.events(job.job_id)]
        (restart,) = [one.message for one in states if isinstance(one, StateChanged) and one.reason == "RESTARTED"]
        assert restart.endswith(f"without progress); {what}, so that it continues on host:0")
        status = await daemon.services.node.describe(ADA)
        assert status.devices[1].out_of_service == what.removeprefix("host:1 is ")


async def test_what_a_range_asks_for_is_held_against_the_node(make_daemon: MakeDaemon, state_dir: Path) -> None:
    async with make_daemon(state_dir, host_devices=2, queue=False) as daemon:
        with pytest.raises(InvalidSpec, match=r"gpus is 3-4 and this node's processors are divided into 2.*gpus: 2,"):
            await daemon.submit(ADA, "wide", gpus="3-4")
        with pytest.raises(InvalidSpec, match=r"lanes is 2 and gpus is 1-4.*train\.lanes: 4 or gpus: 1-2"):
            await daemon.submit(ADA, "narrow", gpus="1-4", train={"lanes": 2})
        job = await daemon.submit(ADA, "large", gpus="2-64")
        assert (planned(job).num_devices, planned(job).lanes) == (2, 64)
        outlook, plan, _ = await daemon.services.sharing.simulate(ADA, daemon.spec(gpus="1-2"))
        assert (outlook.why, plan.num_devices, plan.lanes) == ("starts now", 2, 8)

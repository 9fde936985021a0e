"""Several jobs on one node: the whole daemon, with workers that follow a script."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.component.jobs.conftest import ADA
from tests.conftest import MakeDaemon
from tests.daemon_parts import ROOT, WAIT_S, DaemonParts, Script
from tests.support.rates import write_rates

from horizon_server.events import Message, StateChanged, StepDone
from horizon_server.jobs.folders import JobFolders
from horizon_server.records.account import Principal
from horizon_server.records.job import RESIDENT, JobRecord, JobState
from horizon_server.spec import parse_job_spec
from horizon_server.worker_link.protocol import REQUEST_FILE

S = JobState
BOB = Principal(name="bob", role="user", project="bob")
CLEO = Principal(name="cleo", role="user", project="cleo")

STEP_S = 0.02
# Between checkpoints, for which a worker gives the device back by itself, many slices pass.
LONG = Script(num_steps=100_000, step_s=STEP_S, checkpoint_every=1000)
# Makes the daemon believe that a job is taken out of memory in no time.
FAST_DISK = 10**12


@pytest.fixture(scope="session")
def lab(make_daemon: MakeDaemon, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A state folder in which three users have a dataset, and the planned host memory of a job."""
    state = tmp_path_factory.mktemp("lab") / "state"

    async def push() -> int:
        async with make_daemon(state, queue=False) as daemon:
            for name in ("ada", "bob", "cleo"):
                await daemon.dataset(await daemon.user(name))
            _, plan, _ = await daemon.services.jobs.plan(ADA, daemon.spec())
            return plan.host_total_bytes

    return state, asyncio.run(push())


Make = Callable[..., AbstractAsyncContextManager[DaemonParts]]


@pytest.fixture
def make(make_daemon: MakeDaemon, lab: tuple[Path, int], tmp_path: Path) -> Make:
    """Make a daemon of the lab, with memory for `room` jobs. Another call is a restart."""
    shutil.copytree(lab[0], tmp_path / "state", symlinks=True)

    @asynccontextmanager
    async def made(*, room: int = 10, **settings: Any) -> AsyncIterator[DaemonParts]:
        memory = {"host_memory_limit_bytes": int((room + 0.5) * lab[1]), "host_memory_reserve_bytes": 0}
        async with make_daemon(tmp_path / "state", look_every_s=0.2, **memory, **settings) as daemon:
            yield daemon

    return made


async def eventually(daemon: DaemonParts, job: JobRecord, why: str) -> JobRecord:
    """Return the job once what it waits for, or shares, is described so; no event says when that changes."""
    async with asyncio.timeout(WAIT_S):
        while True:
            now = await daemon.job(job.job_id)
            if now.outlook is not None and re.search(why, now.outlook.why):
                return now
            await asyncio.sleep(0.02)


def used_s(daemon: DaemonParts, *users: str) -> list[float]:
    """Device seconds of users up to now."""
    daemon.parts.scheduler.turns["host"].charge()
    return [daemon.parts.scheduler.runtime.view.shares.use_of(user, user, time.time()) for user in users]


async def stored(daemon: DaemonParts, job: JobRecord) -> list[tuple[float, Any]]:
    """Time and content of the events of a job so far."""
    events = await daemon.parts.journal.store.events_after(job.job_id, 0, 100_000)
    return [(event.time_s, event.payload) for event in events]


async def steps(daemon: DaemonParts, job: JobRecord) -> list[int]:
    return [payload.step for _, payload in await stored(daemon, job) if isinstance(payload, StepDone)]


async def reached_s(daemon: DaemonParts, job: JobRecord, state: JobState, *, attempt: int = 0) -> float:
    """When the job first came into that state, in that attempt or a later one."""
    return next(
        time_s
        for time_s, payload in await stored(daemon, job)
        if isinstance(payload, StateChanged) and payload.job_state == state and payload.attempt >= attempt
    )


async def first_step_s(daemon: DaemonParts, job: JobRecord, *, after_s: float = 0.0) -> float:
    return next(
        time_s for time_s, payload in await stored(daemon, job) if isinstance(payload, StepDone) and time_s > after_s
    )


async def continues(daemon: DaemonParts, job: JobRecord) -> None:
    """Wait for a few more steps."""
    await daemon.until(job.job_id, step=(await daemon.job(job.job_id)).step + 3)


async def holds_the_device(daemon: DaemonParts, owner: Principal, name: str = "holder") -> JobRecord:
    """Return a job that has the device until it is released."""
    script = Script(num_steps=4, hold_at=2, keep_turn=True)
    job = await daemon.submit(owner, name, script)
    return await daemon.until(job.job_id, S.RUNNING, step=1)


@pytest.mark.parametrize(("weight", "share", "words"), [(1.0, 0.5, "1/2"), (3.0, 0.75, "3/4")])
async def test_users_have_device_time_in_proportion_to_their_weights(
    make: Make, weight: float, share: float, words: str
) -> None:
    async with make() as daemon:
        await daemon.allow("project", "ada", weight=weight)
        first, second = await daemon.submit(ADA, "first", LONG), await daemon.submit(BOB, "second", LONG)
        for job in (first, second):
            await daemon.until(job.job_id, S.RUNNING, step=1)
        found = await eventually(daemon, first, "2 jobs share the host device")
        assert found.outlook is not None
        # As an admin reads it, and as its owner does.
        assert (found.outlook.why.endswith(f"its share {words}"), found.outlook.share) == (True, share)
        mine = (await daemon.services.jobs.get(ADA, first.job_id)).outlook
        assert mine is not None
        assert mine.why.endswith(f"your share {words}")
        await daemon.until(first.job_id, step=80)
        # What one of them is ahead is at most a slice and a step, and soon little of the whole, whatever the machine
        # did to one of these.
        ada_s, bob_s = used_s(daemon, "ada", "bob")
        async with asyncio.timeout(WAIT_S):
            while ada_s / (ada_s + bob_s) != pytest.approx(share, abs=0.08):
                await asyncio.sleep(0.1)
                ada_s, bob_s = used_s(daemon, "ada", "bob")
        await daemon.drain()
        seconds = [(await daemon.job(job.job_id)).device_s for job in (first, second)]
        assert seconds == pytest.approx(used_s(daemon, "ada", "bob"), rel=0.02)


async def test_a_short_job_behind_a_long_one_has_its_first_step_within_two_slices(make: Make) -> None:
    slice_s = 4.0
    async with make(time_slice_s=slice_s) as daemon:
        long = await daemon.submit(ADA, "long", LONG)
        await daemon.until(long.job_id, S.RUNNING, step=50)
        short = await daemon.submit(BOB, "short", Script(num_steps=3))
        await daemon.until(short.job_id, S.SUCCEEDED)
        assert await first_step_s(daemon, short) < await reached_s(daemon, short, S.STARTING) + 2 * slice_s
        assert (await daemon.job(long.job_id)).job_state is S.RUNNING


@pytest.mark.parametrize(
    "script", [replace(LONG, die_on_device=True), replace(LONG, die_waiting=True)], ids=["on the device", "waiting"]
)
async def test_a_worker_that_dies_frees_its_turn_and_then_its_memory(make: Make, script: Script) -> None:
    async with make(room=2) as daemon:
        other = await daemon.submit(ADA, "other", LONG)
        await daemon.until(other.job_id, S.RUNNING, step=1)
        dying = await daemon.submit(BOB, "dying", script)
        await daemon.until(dying.job_id, S.RUNNING, step=1)
        third = await daemon.submit(CLEO, "third")
        # Which of the two is expected to end first is decided by milliseconds.
        await eventually(daemon, third, r"waiting for \d.* of host memory, \d.* are free; jobs? (other|dying) of ")
        daemon.release("dying")
        failed = await daemon.until(dying.job_id, S.FAILED)
        assert failed.reason == "WORKER_DIED"
        await daemon.until(third.job_id, S.SUCCEEDED)
        await continues(daemon, other)
        end_s = await reached_s(daemon, dying, S.FAILED)
        assert await first_step_s(daemon, other, after_s=end_s) < end_s + 20.0, (
            "not after the grace that a living worker has"
        )
        assert await reached_s(daemon, third, S.PREPARING) >= end_s


async def test_a_worker_that_keeps_the_device_is_reported_and_then_killed(make: Make) -> None:
    async with make(turn_grace_s=0.5) as daemon:
        deaf = await holds_the_device(daemon, ADA)
        other = await daemon.submit(BOB, "other", Script(num_steps=5))
        failed = await daemon.until(deaf.job_id, S.FAILED)
        assert failed.reason == "TURN_OVERRUN"
        assert re.search(r"has not given back the device host .* and was killed", failed.message)
        messages = [payload for _, payload in await stored(daemon, deaf) if isinstance(payload, Message)]
        assert ("warning", "the worker has not given back the device host") in [
            (m.level, m.text[:45]) for m in messages
        ]
        await daemon.until(other.job_id, S.SUCCEEDED)


async def test_a_job_that_waits_for_its_turn_can_be_paused_resumed_and_cancelled(make: Make) -> None:
    async with make() as daemon:
        # Slow until it is paused, so that it cannot end while the holder starts.
        paused = await daemon.submit(BOB, "paused", Script(num_steps=60, step_s=0.5))
        cancelled = await daemon.submit(CLEO, "cancelled", LONG)
        for job in (paused, cancelled):
            await daemon.until(job.job_id, S.RUNNING, step=2)
        await holds_the_device(daemon, ADA)
        jobs = daemon.services.jobs
        await jobs.pause(BOB, paused.job_id)
        step = (await daemon.until(paused.job_id, S.PAUSED)).step
        assert [c.step for c in await jobs.checkpoints(BOB, paused.job_id)] == [step]
        await jobs.cancel(CLEO, cancelled.job_id)
        await daemon.until(cancelled.job_id, S.CANCELLED)
        daemon.script("paused", Script(num_steps=60))
        # It waits for its first turn now, not ready yet.
        await jobs.resume(BOB, paused.job_id)
        await daemon.until(paused.job_id, S.STARTING, attempt=2)
        await jobs.pause(BOB, paused.job_id)
        await daemon.until(paused.job_id, S.PAUSED)
        await jobs.resume(BOB, paused.job_id)
        daemon.release("holder")
        await daemon.until(paused.job_id, S.SUCCEEDED)
        assert await steps(daemon, paused) == list(range(1, 61))


async def test_a_job_that_does_not_fit_waits_in_the_order_of_the_queue_and_priority(make: Make) -> None:
    async with make(room=1) as daemon:
        await holds_the_device(daemon, ADA)
        parked, first, second, urgent = [
            await daemon.submit(BOB, name, Script(num_steps=1)) for name in ("parked", "first", "second", "urgent")
        ]
        await eventually(daemon, parked, "waiting for .* of host memory, .*; job holder of ada frees it at about")
        behind = await eventually(daemon, first, "job parked of bob is next")
        assert behind.outlook is not None and behind.outlook.share == 0.0
        await daemon.services.jobs.pause(BOB, parked.job_id)
        await daemon.services.jobs.resume(BOB, parked.job_id)
        await daemon.services.jobs.update(BOB, second.job_id, priority=10)
        await daemon.services.jobs.update(ROOT, urgent.job_id, priority=500)
        await eventually(daemon, first, "job urgent of bob is next")
        daemon.release("holder")
        loaded = [await daemon.until(job.job_id, S.SUCCEEDED) for job in (parked, first, second, urgent)]
        loaded.sort(key=lambda job: job.started_s)
        assert [job.spec.name for job in loaded] == ["urgent", "second", "first", "parked"]


async def test_an_urgent_job_has_the_device_to_itself(make: Make) -> None:
    async with make(time_slice_s=0.2) as daemon:
        usual, urgent = await daemon.submit(ADA, "usual", LONG), await daemon.submit(BOB, "urgent", LONG)
        for job in (usual, urgent):
            await daemon.until(job.job_id, S.RUNNING, step=1)
        await daemon.services.jobs.update(ROOT, urgent.job_id, priority=500)
        await eventually(daemon, usual, "the urgent job urgent of bob with priority 500 goes first")
        before_s = used_s(daemon, "ada", "bob")
        await daemon.until(urgent.job_id, step=(await daemon.job(urgent.job_id)).step + 60)
        # At most the slice that it had, and one because it has waited for long: however long these are, soon little
        # of the whole.
        async with asyncio.timeout(WAIT_S):
            while True:
                ada_s, bob_s = (
                    now - before for now, before in zip(used_s(daemon, "ada", "bob"), before_s, strict=True)
                )
                if ada_s < 0.4 * bob_s:
                    break
                await asyncio.sleep(0.1)


async def test_a_job_above_its_share_makes_room_and_loses_nothing(make: Make) -> None:
    async with make(room=1, max_residence_s=0.5) as daemon:
        script = Script(num_steps=100, step_s=STEP_S, checkpoint_every=7, checkpoint_bytes=FAST_DISK)
        above = await daemon.submit(ADA, "above", script)
        await daemon.until(above.job_id, S.RUNNING, step=8)
        below = await daemon.submit(BOB, "below", Script(num_steps=10, step_s=STEP_S))
        await daemon.until(below.job_id, S.SUCCEEDED)
        assert (await daemon.until(above.job_id, S.SUCCEEDED)).attempt > 1
        assert await steps(daemon, above) == list(range(1, 101))
        moves = [payload for _, payload in await stored(daemon, above) if isinstance(payload, StateChanged)]
        assert [(move.job_state, move.reason) for move in moves if move.reason] == [
            ("STOPPING", "DISPLACE"),
            ("QUEUED", "DISPLACED"),
        ]
        assert await reached_s(daemon, below, S.PREPARING) > await reached_s(daemon, above, S.STOPPING)


async def test_quotas_hold_jobs_and_say_what_would_free_them(make: Make) -> None:
    async with make() as daemon:
        await daemon.allow("user", "ada", max_resident_jobs=1)
        running = await holds_the_device(daemon, ADA)
        assert running.plan is not None
        waiting = await daemon.submit(ADA, "waiting", Script(num_steps=1))
        await eventually(daemon, waiting, "^quota: 1 of 1 running jobs of user ada .*; .*job holder")
        await daemon.allow("project", "ada", max_host_bytes=running.plan.host_total_bytes + 1000)
        await daemon.allow("user", "ada")
        await eventually(daemon, waiting, r"^quota: .* of .* host memory of project ada .*, and this job needs .*; ")
        await daemon.services.sharing.store.charge(
            "physics", "ada", device_s=5 * 3600, job_id=running.job_id, now_s=time.time() - 7200
        )
        await daemon.allow("user", "ada", device_hours_per_week=4)
        await eventually(
            daemon, waiting, r"^quota: 5(\.\d+)? of 4 device hours of user ada in the last 7 days .*; .* free again"
        )
        await daemon.allow("user", "ada")
        await daemon.allow("project", "ada")
        daemon.release("holder")
        await daemon.until(waiting.job_id, S.SUCCEEDED)


async def test_a_cordoned_node_starts_nothing_and_a_drained_one_is_empty(make: Make) -> None:
    async with make() as daemon:
        residents = [await daemon.submit(owner, "resident", LONG) for owner in (ADA, BOB)]
        for job in residents:
            await daemon.until(job.job_id, S.RUNNING, step=1)
        await daemon.set_node("cordoned", message="a new GPU comes")
        late = await daemon.submit(CLEO, "late", Script(num_steps=1))
        await eventually(daemon, late, r"cordoned by an admin \(a new GPU comes\): no job starts")
        for job in residents:
            await continues(daemon, job)
        await daemon.set_node("drained")
        for job in residents:
            drained = await daemon.until(job.job_id, S.QUEUED)
            assert (drained.reason, drained.attempt) == ("NODE_DRAINED", 1)
            await eventually(daemon, job, "drained by an admin")
        open_s = time.time() + 1.0
        await daemon.set_node(window_start_s=time.time(), window_end_s=open_s)
        await eventually(daemon, late, "the node is in maintenance until .* UTC: no job starts")
        for job in residents:
            await daemon.until(job.job_id, S.RUNNING, attempt=2)
            assert await reached_s(daemon, job, S.PREPARING, attempt=2) >= open_s
            await continues(daemon, job)
            done = await steps(daemon, job)
            assert done == list(range(1, len(done) + 1)), "each continues from where it was"
        await daemon.until(late.job_id, S.SUCCEEDED)


async def test_a_maintenance_window_drains_the_node_when_it_begins(make: Make) -> None:
    async with make() as daemon:
        job = await daemon.submit(ADA, "resident", LONG)
        await daemon.until(job.job_id, S.RUNNING, step=1)
        start_s = time.time() + 0.5
        await daemon.set_node(window_start_s=start_s, window_end_s=start_s + 3600)
        assert (await daemon.until(job.job_id, S.QUEUED)).reason == "NODE_DRAINED"
        assert await reached_s(daemon, job, S.STOPPING) >= start_s


@pytest.mark.parametrize("end", ["drain", "crash"])
async def test_a_restart_keeps_shares_usage_and_order(make: Make, end: str) -> None:
    async with make() as daemon:
        stored, really_store = list[list[float]](), daemon.parts.scheduler.runtime.meter.store

        async def store() -> None:
            counted = used_s(daemon, "ada", "bob")
            await really_store()
            stored.append(counted)

        daemon.parts.scheduler.runtime.meter.store = store  # type: ignore[method-assign]
        residents = [await daemon.submit(owner, f"of-{owner.name}", LONG) for owner in (ADA, BOB)]
        for job in residents:
            await daemon.until(job.job_id, S.RUNNING, step=20)
        await daemon.set_node("cordoned")
        waiting = [await daemon.submit(owner, "waiting", Script(num_steps=1)) for owner in (BOB, ADA)]
        await (daemon.drain() if end == "drain" else daemon.crash())
        used = used_s(daemon, "ada", "bob")
        order = [job.job_id for job in await daemon.parts.journal.store.queued(10)]
    async with make(queue=False, max_restarts=3) as daemon:
        await daemon.settle()
        queue = await daemon.parts.journal.store.queued(10)
        assert [job.job_id for job in queue] == [job.job_id for job in (*residents, *waiting)]
        if end == "drain":
            assert [job.job_id for job in queue] == order
        # A daemon that is killed has stored all but what came after its last look.
        limits = zip(used if end == "drain" else stored[-1], used_s(daemon, "ada", "bob"), used, strict=True)
        assert all(least - 0.01 <= kept <= most + 0.01 for least, kept, most in limits)
        assert min(used_s(daemon, "ada", "bob")) > 0.2
        usage = {one.user: one.device_s for one in await daemon.services.sharing.usage(ROOT, time.time() - 3600)}
        assert [usage["ada"], usage["bob"]] == pytest.approx(used_s(daemon, "ada", "bob"), rel=0.05, abs=0.2)
        assert {job.reason for job in queue[:2]} == {"DRAINED" if end == "drain" else "RESTARTED"}
        await daemon.set_node("open")
        daemon.start_queue()
        for job in waiting:
            await daemon.until(job.job_id, S.SUCCEEDED)
        for job in residents:
            assert (await daemon.until(job.job_id, S.RUNNING, attempt=2)).attempt == 2
            await continues(daemon, job)
            if end == "drain":
                done = await steps(daemon, job)
                assert done == list(range(1, len(done) + 1))


async def test_limits_and_an_early_stop_end_a_job_with_success(make: Make) -> None:
    async with make() as daemon:
        step_limit = await daemon.submit(ADA, "limited", Script(num_steps=50), limits={"max_steps": 2})
        early = await daemon.submit(BOB, "early", Script(num_steps=50, early_stop_at=3))
        for job, step, reason in ((step_limit, 2, "STEP_LIMIT"), (early, 3, "EARLY_STOPPED")):
            done = await daemon.until(job.job_id, S.SUCCEEDED)
            assert (done.step, done.reason) == (step, reason)
            [checkpoint] = await daemon.services.jobs.checkpoints(ADA, job.job_id) if job is step_limit else [done]
            assert checkpoint.step == step
        # A wall-clock limit holds for a job that waits for its turn too.
        worked = await daemon.submit(BOB, "worked", LONG, limits={"max_hours": 5 / 3600})
        await daemon.until(worked.job_id, S.RUNNING, step=1)
        await holds_the_device(daemon, ADA)
        done = await daemon.until(worked.job_id, S.SUCCEEDED)
        assert done.reason == "WALL_CLOCK_LIMIT"
        assert done.ended_s - done.started_s == pytest.approx(15, abs=11)


async def test_a_job_is_loaded_behind_others_on_the_processors_only_where_there_are_some(make: Make) -> None:
    async with make() as daemon:
        alone = await holds_the_device(daemon, ADA)
        beside = await daemon.submit(BOB, "beside", Script(num_steps=1))
        folders = daemon.parts.scheduler.runtime.folders
        requests = [folders.log(job.job_id, 1).with_name(REQUEST_FILE) for job in (alone, beside)]
        await eventually(daemon, beside, "waits for its first turn on the device")
        daemon.release("holder")
        await daemon.until(beside.job_id, S.SUCCEEDED)
        assert [json.loads(file.read_text())["yields_processors"] for file in requests] == [False, True]


async def test_a_loaded_job_that_waits_for_the_device_says_so(make: Make) -> None:
    async with make() as daemon:
        await holds_the_device(daemon, ADA)
        second = await daemon.submit(BOB, "second", Script(num_steps=1))
        found = await eventually(daemon, second, "waits for its first turn on the device; resident, 2 jobs share")
        assert found.job_state in RESIDENT


def test_a_jobs_time_in_memory_survives_the_daemon(tmp_path: Path) -> None:
    folders = JobFolders(tmp_path)
    spec = parse_job_spec({"name": "j", "model": "m", "dataset": "d"})
    job = JobRecord(
        job_id="job_1",
        owner="ada",
        spec=spec,
        model_id="m",
        dataset_id="d",
        eval_dataset_id="",
        job_state=S.RUNNING,
        queued_s=1000.0,
        started_s=1100.0,
    )
    assert folders.resident_since_s(job) == 1100.0
    # It was queued again, and its third attempt began the present residence.
    for attempt, time_s in ((1, 1100.0), (2, 1500.0), (3, 2200.0), (4, 2300.0)):
        request = folders.log("job_1", attempt).parent / "request.json"
        request.parent.mkdir(parents=True)
        request.touch()
        os.utime(request, (time_s, time_s))
    assert folders.resident_since_s(replace(job, queued_s=2000.0)) == 2200.0


async def test_a_simulated_job_starts_when_there_is_room_for_it(make: Make) -> None:
    async with make(room=1) as daemon:
        simulate = daemon.services.sharing.simulate
        now_s = time.time()
        outlook, _, _ = await simulate(BOB, daemon.spec())
        assert (outlook.why, outlook.share) == ("starts now", 1.0)
        assert outlook.estimated_start_s == pytest.approx(now_s, abs=30)
        running = await holds_the_device(daemon, ADA)
        outlook, _, _ = await simulate(BOB, daemon.spec())
        assert re.search(f"waiting for .* of host memory, .* job {running.job_id} frees it at about", outlook.why)
        assert outlook.estimated_start_s is not None and outlook.estimated_start_s > now_s
        assert {job.job_id for job in await daemon.services.jobs.queue(ROOT)} == {running.job_id}
        assert running.job_state in RESIDENT


async def test_estimates_count_what_loading_has_taken(make: Make, tmp_path: Path) -> None:
    write_rates(tmp_path / "state", num_threads=1)
    async with make(num_threads=1) as daemon:

        async def estimated_s() -> float:
            outlook, _, _ = await daemon.services.sharing.simulate(
                BOB, daemon.spec(train={"max_steps": 1, "compile": "off"})
            )
            assert outlook.estimated_start_s is not None and outlook.estimated_end_s is not None
            return outlook.estimated_end_s - outlook.estimated_start_s

        before_s, begun_s = await estimated_s(), time.monotonic()
        first = await daemon.submit(ADA, "first", Script(num_steps=1))
        await daemon.until(first.job_id, S.SUCCEEDED)
        took_s = time.monotonic() - begun_s
        assert before_s < await estimated_s() < before_s + took_s


async def test_a_job_whose_memory_is_not_free_waits_until_another_has_ended(make: Make) -> None:
    async with make() as daemon:
        planner = daemon.services.jobs.planner
        await holds_the_device(daemon, ADA)
        real = planner._memory
        planner._memory = lambda: replace(real(), available_bytes=1000)
        job = await daemon.submit(BOB, "crowded", Script(num_steps=1))
        waiting = await daemon.until(job.job_id, S.QUEUED, attempt=1)
        assert waiting.reason == "WAITS_FOR_MEMORY"
        assert re.search(r"needs .* of host memory and .* are available", waiting.message)
        # It would come and go all the time; now it is loaded when something has changed.
        daemon.parts.scheduler.wake()
        later = await daemon.submit(CLEO, "later", Script(hold_at="start"))
        await daemon.until(later.job_id, S.QUEUED, attempt=1)
        assert (await daemon.job(job.job_id)).attempt == 1
        planner._memory = real
        daemon.release("holder")
        await daemon.until(job.job_id, S.SUCCEEDED)


async def test_no_job_is_loaded_once_a_drain_has_begun(make: Make) -> None:
    """The measurement that runs while the node is idle takes a moment to end; a drain may come in it."""
    idle, cancelled, may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow_to_end() -> None:
        idle.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
            await may_end.wait()

    async with make(queue=False) as daemon:
        daemon.parts.scheduler.when_idle = slow_to_end
        daemon.start_queue()
        await asyncio.wait_for(idle.wait(), WAIT_S)
        job = await daemon.submit(ADA, "late", Script(hold_at=1))
        await asyncio.wait_for(cancelled.wait(), WAIT_S)
        draining = asyncio.create_task(daemon.drain(5.0))
        await asyncio.sleep(0)
        may_end.set()
        await asyncio.wait_for(draining, WAIT_S)
        assert ((await daemon.job(job.job_id)).job_state, (await daemon.job(job.job_id)).attempt) == (S.QUEUED, 0)


async def test_one_users_many_jobs_are_loaded_a_few_at_a_time_and_a_job_of_another_passes_them(make: Make) -> None:
    async with make(room=20, max_loading_jobs_of_user=2) as daemon:
        loads = Script(num_steps=1, hold_at="start")
        first, second = [await daemon.submit(BOB, name, loads) for name in ("first", "second")]
        for job in (first, second):
            await daemon.until(job.job_id, S.STARTING)
        third, fourth = [await daemon.submit(BOB, "more", Script(num_steps=1)) for _ in range(2)]
        await eventually(daemon, third, "^2 jobs of user bob are being loaded, and 2 may be at a time")
        other = await daemon.submit(CLEO, "other", Script(num_steps=1))
        await daemon.until(other.job_id, S.SUCCEEDED)
        assert (await daemon.job(third.job_id)).job_state is S.QUEUED
        # One of which the worker has asked for its first turn lets the next ones in, one after the other.
        daemon.release("first")
        for job in (first, third, fourth):
            await daemon.until(job.job_id, S.SUCCEEDED)
        assert (await daemon.job(second.job_id)).job_state is S.STARTING
        daemon.release("second")
        await daemon.until(second.job_id, S.SUCCEEDED)


async def test_a_job_that_waits_for_its_first_turn_is_not_being_loaded_any_more(make: Make) -> None:
    async with make(room=20, max_loading_jobs_of_user=1) as daemon:
        await holds_the_device(daemon, ADA)
        waiting = [await daemon.submit(BOB, f"w{i}", Script(num_steps=1)) for i in range(3)]
        for job in waiting:
            await daemon.until(job.job_id, S.STARTING)
        daemon.release("holder")
        for job in waiting:
            await daemon.until(job.job_id, S.SUCCEEDED)


async def test_jobs_that_have_waited_for_a_preparation_are_loaded_a_few_at_a_time_too(make: Make) -> None:
    async with make(room=20, max_loading_jobs=2) as daemon:
        # Of no test before: its data has to be prepared.
        unknown = {"train": {"sequence_length": 59}}
        first = await daemon.submit(ADA, "first", Script(num_steps=1))
        await daemon.until(first.job_id, S.PREPARING)
        attempt = daemon.parts.scheduler.attempt(first.job_id)
        assert attempt is not None
        turn = attempt.preparation._turn
        await turn.acquire()  # as another job's preparation has it
        loads = Script(num_steps=1, hold_at="start")
        users = {"wa": ADA, "wb": BOB, "wc": CLEO}
        jobs = [await daemon.submit(user, name, loads, **unknown) for name, user in users.items()]
        for job in jobs:
            await daemon.until(job.job_id, S.PREPARING)
        turn.release()
        for job in jobs[:2]:
            await daemon.until(job.job_id, S.STARTING)
        for _ in range(20):
            await daemon.parts.scheduler._reschedule()
        assert (await daemon.job(jobs[2].job_id)).job_state is S.PREPARING
        daemon.release("wa")
        await daemon.until(jobs[2].job_id, S.STARTING)
        for name, job in zip(users, jobs, strict=True):
            daemon.release(name)
            await daemon.until(job.job_id, S.SUCCEEDED)


async def test_a_user_has_a_few_resident_jobs_unless_an_admin_sets_another_number(make: Make) -> None:
    async with make(room=20, max_resident_jobs=2, time_slice_s=0.2) as daemon:
        residents = [await daemon.submit(BOB, f"r{i}", LONG) for i in range(2)]
        for job in residents:
            await daemon.until(job.job_id, S.RUNNING, step=1)
        waiting = await daemon.submit(BOB, "waiting", Script(num_steps=1))
        await eventually(daemon, waiting, "^quota: 2 of 2 running jobs of user bob .--max-resident-jobs.; ")
        await daemon.allow("user", "bob", max_resident_jobs=3)
        await daemon.until(waiting.job_id, S.SUCCEEDED)

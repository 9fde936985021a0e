"""Jobs on several devices of a node, whose processors are divided into two: the whole daemon, with workers that follow
a script."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
from tests.component.jobs.conftest import ADA
from tests.conftest import MakeDaemon
from tests.daemon_parts import DaemonParts, Script

from horizon_server.errors import InvalidSpec
from horizon_server.events import Message, StepDone
from horizon_server.records.account import Principal
from horizon_server.records.job import JobRecord, JobState
from horizon_server.worker_link.protocol import REQUEST_FILE

S = JobState
BOB = Principal(name="bob", role="user", project="bob")
STEP_S = 0.02
LONG = Script(num_steps=120, step_s=STEP_S)


def device_s(daemon: DaemonParts, user: str) -> dict[str, float]:
    """Seconds that a user was charged for each device."""
    for turns in daemon.parts.scheduler.turns.values():
        turns.charge()
    return {
        sample.labels["device"]: sample.value
        for family in daemon.parts.metrics.registry.collect()
        for sample in family.samples
        if sample.name == "horizon_device_seconds_total" and sample.labels["user"] == user
    }


async def steps_of(daemon: DaemonParts, job: JobRecord) -> list[float]:
    events = await daemon.parts.journal.store.events_after(job.job_id, 0, 100_000)
    return [event.time_s for event in events if isinstance(event.payload, StepDone)]


async def test_a_job_of_two_devices_and_a_job_of_one_take_turns_and_each_device_is_charged(
    make_daemon: MakeDaemon, state_dir: Path
) -> None:
    async with make_daemon(state_dir, host_devices=2, num_threads=2) as daemon:
        await daemon.dataset(await daemon.user("bob"))
        joint = await daemon.submit(ADA, "joint", LONG, gpus=2)
        single = await daemon.submit(BOB, "single", LONG)
        for job in (joint, single):
            await daemon.until(job.job_id, S.RUNNING, step=1)
        plan = (await daemon.job(joint.job_id)).plan
        assert plan is not None
        assert (plan.device, plan.devices, plan.is_on_host) == ("host:0,host:1", ("host:0", "host:1"), True)
        assert (plan.execution.num_ranks, plan.execution.lanes, plan.execution.num_threads) == (2, 8, 1)
        request = json.loads((state_dir / "jobs" / joint.job_id / "attempt-1" / REQUEST_FILE).read_text())
        assert [Path(file).name for file in request["device_locks"]] == ["host:0.lock", "host:1.lock"]
        of_single = (await daemon.job(single.job_id)).plan
        assert of_single is not None
        assert of_single.device in plan.devices
        done = [await daemon.until(job.job_id, S.SUCCEEDED) for job in (joint, single)]
        assert [job.attempt for job in done] == [1, 1]
        at_s = [await steps_of(daemon, job) for job in (joint, single)]
        order = sorted([(time_s, name) for name, times in zip("js", at_s, strict=True) for time_s in times])
        changes = sum(one[1] != other[1] for one, other in itertools.pairwise(order))
        assert changes >= 4, "turns pass between them"
        await daemon.drain()
        of_ada, of_bob = device_s(daemon, "ada"), device_s(daemon, "bob")
        assert set(of_bob) == {of_single.device}
        least_s = LONG.num_steps * STEP_S
        assert of_ada["host:0"] == pytest.approx(of_ada["host:1"], rel=0.2)
        assert min(*of_ada.values(), *of_bob.values()) > 0.9 * least_s
        used_s = [(await daemon.job(job.job_id)).device_s for job in (joint, single)]
        assert used_s == pytest.approx([sum(of_ada.values()), sum(of_bob.values())], rel=0.05)
        messages = [event.payload for event in await daemon.events(joint.job_id)]
        assert not [one for one in messages if isinstance(one, Message) and one.level == "warning"]


async def test_the_workers_of_both_train_on_without_a_daemon_and_are_taken_over(
    make_daemon: MakeDaemon, state_dir: Path
) -> None:
    script = Script(num_steps=150, step_s=STEP_S)
    async with make_daemon(state_dir, host_devices=2) as daemon:
        joint = await daemon.submit(ADA, "joint", script, gpus=2)
        single = await daemon.submit(ADA, "single", script)
        for job in (joint, single):
            await daemon.until(job.job_id, S.RUNNING, step=1)
        await daemon.vanish()
    async with make_daemon(state_dir, host_devices=2) as daemon:
        for job in (joint, single):
            done = await daemon.until(job.job_id, S.SUCCEEDED)
            assert (done.attempt, done.step, done.num_restarts) == (1, 150, 0)
            assert len(await steps_of(daemon, job)) == 150


async def test_a_worker_that_dies_frees_all_devices_of_its_job(make_daemon: MakeDaemon, state_dir: Path) -> None:
    async with make_daemon(state_dir, host_devices=2) as daemon:
        joint = await daemon.submit(ADA, "joint", Script(num_steps=10_000, step_s=STEP_S, die_on_device=True), gpus=2)
        await daemon.until(joint.job_id, S.RUNNING, step=1)
        single = await daemon.submit(ADA, "single", Script(num_steps=60, step_s=STEP_S))
        await daemon.until(single.job_id, S.RUNNING, step=1)
        daemon.release("joint")
        failed = await daemon.until(joint.job_id, S.FAILED)
        assert failed.reason == "WORKER_DIED"
        await daemon.until(single.job_id, S.SUCCEEDED)


async def test_the_queue_says_which_devices_a_job_shares(make_daemon: MakeDaemon, state_dir: Path) -> None:
    async with make_daemon(state_dir, host_devices=2, look_every_s=0.2) as daemon:
        script = Script(num_steps=10_000, step_s=STEP_S)
        joint = await daemon.submit(ADA, "joint", script, gpus=2)
        await daemon.until(joint.job_id, S.RUNNING, step=1)
        outlook, _, _ = await daemon.services.sharing.simulate(ADA, daemon.spec(gpus=2))
        assert (outlook.why, outlook.share) == ("starts now", 0.5)
        found = daemon.parts.scheduler.outlook(joint.job_id)
        while found is None or not re.match("resident", found.why):
            await daemon.until(joint.job_id, step=(await daemon.job(joint.job_id)).step + 1)
            found = daemon.parts.scheduler.outlook(joint.job_id)
        assert found.why == "resident, the only job on host:0 and host:1"
        status = await daemon.services.node.describe(ADA)
        assert [(device.name, device.num_residents) for device in status.devices] == [("host:0", 1), ("host:1", 1)]


async def test_more_devices_than_the_node_has_are_refused_when_the_job_is_submitted(
    make_daemon: MakeDaemon, state_dir: Path
) -> None:
    async with make_daemon(state_dir, host_devices=2, queue=False) as daemon:
        with pytest.raises(InvalidSpec, match="gpus is 3 and this node's processors are divided into 2 devices"):
            await daemon.submit(ADA, "wide", gpus=3)
        with pytest.raises(InvalidSpec, match=r"train\.lanes is 1 and gpus is 2"):
            await daemon.submit(ADA, "narrow", gpus=2, train={"lanes": 1})

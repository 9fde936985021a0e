"""What was used, by whom, what everyone may take, and the node's condition: kept over a restart, added up exactly."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from horizon_server.db.database import Database
from horizon_server.db.jobs import JobStore
from horizon_server.db.sharing import SharingStore
from horizon_server.events import StateChanged
from horizon_server.records.job import JobRecord, JobState
from horizon_server.records.sharing import Allowance, NodeCondition, Quota, ShareUse, Usage
from horizon_server.spec import parse_job_spec

SPEC = parse_job_spec({"name": "one", "model": "m", "dataset": "d"})
HOUR_S = 3600.0
NOON_S = 20_000 * 24 * HOUR_S + 12 * HOUR_S


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    async with Database.opened(tmp_path / "horizon.db") as opened:
        yield opened


@pytest.fixture
def sharing(database: Database) -> SharingStore:
    return SharingStore(database)


async def created(database: Database, job_id: str, owner: str = "ada", project: str = "lab") -> JobRecord:
    job = JobRecord(
        job_id=job_id,
        owner=owner,
        project=project,
        spec=SPEC,
        model_id="m1",
        dataset_id="d1",
        eval_dataset_id="",
        job_state=JobState.QUEUED,
        created_s=5.0,
        queued_s=5.0,
        priority=3,
    )
    record, _ = await JobStore(database).create(job, request_id=str(uuid.uuid4()))
    return record


async def job_of(database: Database, job_id: str) -> JobRecord:
    job = await JobStore(database).get(job_id)
    assert job is not None
    return job


async def test_a_charge_counts_for_the_hour_and_for_the_job(database: Database, sharing: SharingStore) -> None:
    await created(database, "j1")
    await created(database, "j2", "bob")
    for user, job_id, device_s, num_tokens, now_s in (
        ("ada", "j1", 1.5, 100, NOON_S + 1),
        ("ada", "j1", 2.0, 50, NOON_S + HOUR_S - 1),
        ("ada", "j1", 4.0, 0, NOON_S + HOUR_S),
        ("bob", "j2", 8.0, 7, NOON_S + 2),
    ):
        await sharing.charge("lab", user, device_s=device_s, num_tokens=num_tokens, job_id=job_id, now_s=now_s)
    job = await job_of(database, "j1")
    assert (job.device_s, job.num_tokens, job.project, job.priority) == (7.5, 150, "lab", 3)
    # The hour that the time is in counts as a whole.
    assert await sharing.device_s_since(NOON_S + 1800) == {("lab", "ada"): 7.5, ("lab", "bob"): 8.0}
    assert await sharing.device_s_since(NOON_S + HOUR_S) == {("lab", "ada"): 4.0}
    assert await sharing.device_s_since(NOON_S + 2 * HOUR_S) == {}


async def test_charges_at_the_same_time_are_all_counted(database: Database, sharing: SharingStore) -> None:
    await created(database, "j1")
    charge = sharing.charge
    await asyncio.gather(
        *(charge("lab", "ada", device_s=0.5, num_tokens=2, job_id="j1", now_s=NOON_S) for _ in range(40))
    )
    assert await sharing.device_s_since(NOON_S) == {("lab", "ada"): 20.0}
    assert (await job_of(database, "j1")).num_tokens == 80


async def test_usage_counts_the_jobs_that_ended_since(database: Database, sharing: SharingStore) -> None:
    store = JobStore(database)
    for job_id, owner, project in (
        ("j1", "ada", "lab"),
        ("j2", "ada", "lab"),
        ("j3", "bob", "bob"),
        ("j4", "ada", "lab"),
    ):
        await created(database, job_id, owner, project)
    await sharing.charge("lab", "ada", device_s=9.0, num_tokens=4, job_id="j1", now_s=NOON_S)
    for job_id in ("j1", "j2", "j3"):
        await store.move(job_id, StateChanged(job_state="CANCELLED"))
    await store.set("j2", ended_s=NOON_S - 1)
    for job_id in ("j1", "j3"):
        await store.set(job_id, ended_s=NOON_S + 1)
    assert await sharing.usage(NOON_S) == [
        Usage(project="bob", user="bob", jobs={"CANCELLED": 1}),
        Usage(project="lab", user="ada", device_s=9.0, num_tokens=4, jobs={"CANCELLED": 1}),
    ]
    assert [usage.jobs for usage in await sharing.usage(0.0)] == [{"CANCELLED": 1}, {"CANCELLED": 2}]


async def test_decayed_use_is_replaced_as_a_whole(sharing: SharingStore) -> None:
    assert await sharing.uses() == []
    first = [
        ShareUse(project="lab", user="ada", device_s=12.5, as_of_s=NOON_S),
        ShareUse(project="lab", user="bob", device_s=1.0, as_of_s=NOON_S),
    ]
    await sharing.save_uses(first)
    assert await sharing.uses() == first
    await sharing.save_uses(first[:1])
    assert await sharing.uses() == first[:1]


async def test_an_allowance_is_set_as_a_whole(sharing: SharingStore) -> None:
    assert await sharing.allowances() == []
    quota = Quota(
        max_queued_jobs=4, max_resident_jobs=2, max_host_bytes=2**40, max_stored_bytes=0, device_hours_per_week=1.5
    )
    ada, lab = Allowance(holder="user", name="ada", weight=3.0, quota=quota), Allowance(holder="project", name="ada")
    await sharing.set_allowance(ada)
    await sharing.set_allowance(lab)
    assert await sharing.allowances() == [lab, ada]
    without = Allowance(holder="user", name="ada", quota=Quota(max_queued_jobs=4))
    await sharing.set_allowance(without)
    assert await sharing.allowances() == [lab, without]


async def test_the_condition_of_the_node_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "horizon.db"
    condition = NodeCondition(mode="cordoned", message="new GPU", window_start_s=5.0, withdrawn=("cuda:1", "cuda:3"))
    async with Database.opened(path) as database:
        assert await SharingStore(database).condition() == NodeCondition()
        await SharingStore(database).set_condition(NodeCondition(mode="drained"))
        await SharingStore(database).set_condition(condition)
    async with Database.opened(path) as database:
        assert await SharingStore(database).condition() == condition


async def test_each_way_into_the_queue_starts_the_wait_again(database: Database) -> None:
    store = JobStore(database)
    await created(database, "j1")
    for state in ("PAUSED", "QUEUED"):
        await store.move("j1", StateChanged(job_state=state), requeue=state == "QUEUED")
    resumed = await job_of(database, "j1")
    assert resumed.queued_s > 5.0
    await store.set("j1", queued_s=6.0)
    for state in ("PREPARING", "STARTING"):
        await store.move("j1", StateChanged(job_state=state))
    assert (await job_of(database, "j1")).queued_s == 6.0
    back, *_ = await store.move("j1", StateChanged(job_state="QUEUED"))
    assert back.queued_s >= resumed.queued_s

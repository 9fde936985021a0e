"""The frozen weights that jobs share: one memory file for each key, for as long as a job is on it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.drives import drive_folders

from horizon_server.errors import DriveFailed
from horizon_server.jobs.bases import Bases
from horizon_server.jobs.requests import Stopped, planes_or_stop
from horizon_server.records.execution import Execution, OnDrives
from horizon_server.records.job import JobRecord, JobState
from horizon_server.records.plan import Plan, SharedBase
from horizon_server.spec import parse_job_spec
from horizon_server.store.base_plane import PLANE
from horizon_server.store.planes import lent_memory

BASE, OTHER = SharedBase(key="base", num_bytes=8192), SharedBase(key="other", num_bytes=4096)


def plan_with(base: SharedBase | None) -> Plan:
    return Plan(
        host_bytes={"weights": 4096},
        device_bytes={},
        host_limit_bytes=1 << 30,
        execution=Execution(),
        num_parameters=1,
        plane_bytes={"hi": 4096},
        base=base,
        device="host",
    )


def job(job_id: str, base: SharedBase | None = BASE) -> JobRecord:
    return JobRecord(
        job_id=job_id,
        owner="ada",
        spec=parse_job_spec({"name": "a", "model": "m", "dataset": "d"}),
        model_id="m1",
        dataset_id="d1",
        eval_dataset_id="",
        job_state=JobState.RUNNING,
        plan=plan_with(base),
    )


async def lent(bases: Bases, job_id: str, base: SharedBase | None) -> int:
    """The inode of the base that a job is lent; 0 where it has none."""
    async with bases.lent_planes(plan_with(base), job_id) as planes:
        assert set(planes) == ({"hi"} if base is None else {"hi", PLANE})
        return 0 if base is None else os.fstat(planes[PLANE]).st_ino


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_jobs_on_one_key_get_one_file_which_is_freed_after_the_last() -> None:
    bases, before = Bases(), open_descriptors()
    one, two = [await lent(bases, name, BASE) for name in ("one", "two")]
    other, none = await lent(bases, "other", OTHER), await lent(bases, "none", None)
    assert one == two != other and none == 0
    assert (bases.num_bytes, bases.num_jobs) == (8192 + 4096, 3)
    bases.leave("one")
    assert await lent(bases, "three", BASE) == two
    for job_id in ("two", "three", "nobody"):
        bases.leave(job_id)
    assert (bases.num_bytes, bases.num_jobs) == (4096, 1)
    bases.leave("other")
    assert open_descriptors() == before


async def test_a_job_waits_for_room_on_drives_while_other_jobs_have_files_there(tmp_path: Path) -> None:
    (folder,) = drive_folders(tmp_path, 1)
    execution = Execution(drives=OnDrives(units=(0,), planes=("exp_avg",), folders=(folder,)))
    small = dataclasses.replace(plan_with(None), execution=execution, drive_file_bytes=(8192,))
    large = dataclasses.replace(small, drive_file_bytes=(1 << 50,))
    bases = Bases()
    runtime: Any = SimpleNamespace(bases=bases)
    async with planes_or_stop(runtime, small, "one") as planes:
        assert "drive 0" in planes
        with pytest.raises(Stopped, match="it waits for other jobs on drives") as stopped:
            await planes_or_stop(runtime, large, "two").__aenter__()
        assert stopped.value.reason == "WAITS_FOR_MEMORY"
    bases.leave("one")
    with pytest.raises(DriveFailed, match="it is full"):
        await planes_or_stop(runtime, large, "two").__aenter__()


async def test_a_later_daemon_waits_for_the_workers_that_may_have_the_base() -> None:
    bases = Bases()
    for job_id in ("one", "two", "three"):
        bases.expect(job(job_id))
    bases.expect(job("full", None))
    coming = asyncio.create_task(lent(bases, "new", BASE))
    # A base that nobody is expected to have is there at once.
    await lent(bases, "other", OTHER)
    bases.leave("one")
    await asyncio.sleep(0)
    assert not coming.done()
    with lent_memory({PLANE: 8192}) as brought:
        inode = os.fstat(brought[PLANE]).st_ino
        bases.take_over(job("two"), brought)
    # It has a descriptor of its own: the one that the worker sent is closed.
    assert await coming == inode
    for job_id in ("two", "new"):
        bases.leave(job_id)
    assert bases.num_jobs == 1


@pytest.mark.parametrize("brings", [True, False])
async def test_where_none_of_them_has_it_another_one_is_made(brings: bool) -> None:
    bases = Bases()
    bases.expect(job("one"))
    coming = asyncio.create_task(lent(bases, "new", BASE))
    await asyncio.sleep(0)
    assert not coming.done()
    if brings:
        # Of an earlier plan, without a base.
        bases.take_over(job("one"), {})
    else:
        bases.leave("one")
    assert await coming and bases.num_jobs == 1


async def test_a_worker_with_a_file_of_its_own_keeps_it() -> None:
    bases = Bases()
    with lent_memory({"first": 8192, "second": 8192}) as files:
        bases.take_over(job("one"), {PLANE: files["first"]})
        bases.take_over(job("two"), {PLANE: files["second"]})
        assert await lent(bases, "three", BASE) == os.fstat(files["first"]).st_ino
    assert (bases.num_bytes, bases.num_jobs) == (8192, 2)

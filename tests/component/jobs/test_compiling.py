"""Layers are compiled while a job waits in the queue, which holds nothing meanwhile; and for pushed models while the
node is idle. The compiler here is scripted: `tests.support.scripted_compiler`."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.component.jobs.conftest import ADA
from tests.conftest import MakeDaemon
from tests.daemon_parts import WAIT_S, DaemonParts, Script
from tests.support import scripted_compiler
from tests.support.processes import processes_of

from horizon_server.events import Message, StateChanged
from horizon_server.jobs import compile_request
from horizon_server.jobs.compiling import COMPILING
from horizon_server.records.job import JobRecord, JobState
from horizon_server.records.plan import Plan
from horizon_server.services.idle_compilation import IdleCompilation

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="compiling layers takes g++")

WITH_LAYERS: dict[str, Any] = {"train": {"compile": "on"}}


@pytest.fixture
async def daemon(
    make_daemon: MakeDaemon, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[DaemonParts]:
    monkeypatch.setattr(compile_request, "COMPILER_MODULE", scripted_compiler.MODULE)
    async with make_daemon(state_dir, look_every_s=0.05, compiles=True) as made:
        yield made


def script_of(daemon: DaemonParts) -> Path:
    return scripted_compiler.folder_of(daemon.state_dir / "compiled")


def starts(daemon: DaemonParts) -> list[int]:
    return [int(file.name.removeprefix("started-")) for file in script_of(daemon).glob("started-*")]


def is_made(daemon: DaemonParts) -> bool:
    return any((daemon.state_dir / "compiled" / "made").glob("*.json"))


def of_layers(plan: Plan) -> list[str]:
    return [warning for warning in plan.warnings if "layers" in warning]


async def until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end_s
        await asyncio.sleep(0.01)


async def waiting(daemon: DaemonParts, name: str = "job") -> JobRecord:
    """A job that is prepared and waits for its layers."""
    job = await daemon.submit(ADA, name, Script(), **WITH_LAYERS)
    await until(lambda: job.job_id in daemon.parts.scheduler.runtime.compiler.held and bool(starts(daemon)))
    job = await daemon.until(job.job_id, JobState.QUEUED, attempt=1)
    assert job.reason == COMPILING
    return job


async def test_a_job_waits_for_its_layers_in_the_queue_and_holds_nothing_meanwhile(daemon: DaemonParts) -> None:
    job = await waiting(daemon)
    assert "it holds no memory and no device meanwhile" in job.message
    scheduler = daemon.parts.scheduler
    await until(lambda: scheduler.attempt(job.job_id) is None)
    assert scheduler.promised().num_bytes == 0
    # Another one comes past it.
    other = await daemon.submit(ADA, "other", Script())
    await daemon.until(other.job_id, JobState.SUCCEEDED)
    assert (await daemon.job(job.job_id)).job_state is JobState.QUEUED
    (script_of(daemon) / "released").touch()
    done = await daemon.until(job.job_id, JobState.SUCCEEDED)
    assert (done.step, len(starts(daemon))) == (3, 1)
    events = [event.payload for event in await daemon.events(job.job_id)]
    assert Message(level="info", text="compiling layers: kind 1 of 1") in events
    states = [payload.job_state for payload in events if isinstance(payload, StateChanged)]
    assert states == ["QUEUED", "PREPARING", "QUEUED", "PREPARING", "STARTING", "RUNNING", "SUCCEEDED"]


async def test_layers_are_compiled_while_a_job_cannot_start_and_the_next_job_finds_them(daemon: DaemonParts) -> None:
    await daemon.set_node("cordoned")
    job = await daemon.submit(ADA, "job", Script(), **WITH_LAYERS)
    await until(lambda: len(starts(daemon)) == 1)
    (script_of(daemon) / "released").touch()
    await until(lambda: is_made(daemon))
    assert (await daemon.job(job.job_id)).job_state is JobState.QUEUED
    await daemon.set_node()
    for name in ("job", "again"):
        if name == "again":
            job = await daemon.submit(ADA, name, Script(), **WITH_LAYERS)
        done = await daemon.until(job.job_id, JobState.SUCCEEDED)
        assert done.attempt == 1, "it has waited for nothing"
    assert len(starts(daemon)) == 1


async def test_a_plan_says_beforehand_that_layers_are_compiled_and_how_long_that_takes(daemon: DaemonParts) -> None:
    jobs = daemon.services.jobs
    _, plan, _ = await jobs.plan(ADA, daemon.spec(**WITH_LAYERS))
    assert of_layers(plan) == ["its layers are compiled first, while the job is prepared and waits"]
    _, plan, _ = await jobs.plan(ADA, daemon.spec())
    assert of_layers(plan) == []
    (script_of(daemon) / "released").touch()
    job = await daemon.submit(ADA, "job", Script(), **WITH_LAYERS)
    await daemon.until(job.job_id, JobState.SUCCEEDED)
    _, plan, _ = await jobs.plan(ADA, daemon.spec(train={"compile": "on", "trainable": ["layernorm"]}))
    assert of_layers(plan) == [
        "its layers are compiled first, which takes about 50 s, while the job is prepared and waits"
    ]


async def test_a_compiler_that_is_killed_is_started_again(daemon: DaemonParts) -> None:
    job = await waiting(daemon)
    (pid,) = starts(daemon)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: len(starts(daemon)) == 2)
    (script_of(daemon) / "released").touch()
    assert (await daemon.until(job.job_id, JobState.SUCCEEDED)).step == 3


async def test_a_job_whose_layers_cannot_be_compiled_ahead_starts_all_the_same(daemon: DaemonParts) -> None:
    (script_of(daemon) / "fails").touch()
    job = await daemon.submit(ADA, "job", Script(), **WITH_LAYERS)
    assert (await daemon.until(job.job_id, JobState.SUCCEEDED)).step == 3
    assert len(starts(daemon)) == 1


async def test_a_daemon_that_ends_leaves_no_compiler(daemon: DaemonParts) -> None:
    job = await waiting(daemon)
    (pid,) = starts(daemon)
    await daemon.drain()
    assert not Path(f"/proc/{pid}").exists()
    assert (await daemon.job(job.job_id)).job_state is JobState.QUEUED


async def test_pushed_models_are_compiled_for_while_the_node_is_idle_until_a_job_starts(daemon: DaemonParts) -> None:
    await daemon.model(ADA, "pushed")
    scheduler = daemon.parts.scheduler
    compilation = IdleCompilation(
        models=daemon.services.models,
        planner=scheduler.runtime.planner,
        compiler=scheduler.runtime.compiler,
        most=1,
        idle_s=0.0,
    )
    await scheduler._end_chore()
    scheduler.when_idle = compilation
    scheduler.wake()
    await until(lambda: len(starts(daemon)) == 1)
    job = await daemon.submit(ADA, "job", Script())
    await daemon.until(job.job_id, JobState.SUCCEEDED)
    (first, *_) = starts(daemon)
    assert not Path(f"/proc/{first}").exists()
    # Idle again, it is done.
    (script_of(daemon) / "released").touch()
    await until(lambda: is_made(daemon))
    assert not processes_of("horizon_server.worker.compilation", daemon.state_dir)


async def test_none_is_compiled_for_where_the_operator_wants_none(daemon: DaemonParts) -> None:
    runtime = daemon.parts.scheduler.runtime
    none = IdleCompilation(
        models=daemon.services.models, planner=runtime.planner, compiler=runtime.compiler, most=0, idle_s=0.0
    )
    await none()
    assert starts(daemon) == []

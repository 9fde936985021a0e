"""A daemon whose user `ada` has pushed a dataset already."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import MakeDaemon
from tests.daemon_parts import DaemonParts, Script

from horizon_server.records.account import Principal
from horizon_server.records.job import JobRecord, JobState

ADA = Principal(name="ada", role="user", project="ada")


@pytest.fixture(scope="session")
def state_of_ada(make_daemon: MakeDaemon, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state folder to be copied: a push takes a second."""
    state = tmp_path_factory.mktemp("ada") / "state"

    async def push() -> None:
        async with make_daemon(state, queue=False) as daemon:
            await daemon.dataset(await daemon.user("ada"))

    asyncio.run(push())
    return state


@pytest.fixture
def state_dir(state_of_ada: Path, tmp_path: Path) -> Path:
    """A state folder of this test's own, in which ada has a dataset."""
    shutil.copytree(state_of_ada, tmp_path / "state", symlinks=True)
    return tmp_path / "state"


@pytest.fixture
async def daemon(make_daemon: MakeDaemon, state_dir: Path) -> AsyncIterator[DaemonParts]:
    async with make_daemon(state_dir) as made:
        yield made


@pytest.fixture
def ada() -> Principal:
    return ADA


async def held(daemon: DaemonParts, name: str = "held", **script: Any) -> JobRecord:
    """Submit a job of ada's and return it once its worker waits before step 2."""
    job = await daemon.submit(ADA, name, dataclasses.replace(Script(num_steps=4, hold_at=2), **script))
    return await daemon.until(job.job_id, JobState.RUNNING, step=1)

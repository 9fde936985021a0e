"""A daemon without a queue whose user `ada` has a dataset: jobs are where a test puts them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import MakeDaemon
from tests.daemon_parts import DaemonParts

from horizon_server.records.account import Principal
from horizon_server.records.job import JobRecord, JobState


@pytest.fixture
async def daemon(make_daemon: MakeDaemon, tmp_path: Path) -> AsyncIterator[DaemonParts]:
    # With prepared data of its own: a sweep removes what other daemons know.
    async with make_daemon(tmp_path / "state", queue=False, prepared=None) as made:
        yield made


@pytest.fixture
async def ada(daemon: DaemonParts) -> Principal:
    ada = await daemon.user("ada")
    await daemon.dataset(ada)
    return ada


async def ended_job(
    daemon: DaemonParts,
    owner: Principal,
    name: str = "job",
    *,
    state: JobState = JobState.SUCCEEDED,
    steps: tuple[int, ...] = (5,),
    size: int = 100,
    ended_s: float | None = None,
    **spec: Any,
) -> JobRecord:
    """Return an ended job with checkpoints of `size` bytes of weights and twice as much trainer state."""
    job = await daemon.job_in(state, owner, name=name, **spec)
    for step in steps:
        files = {"model.safetensors": b"w" * size, "trainer/exp_avg.safetensors": b"m" * 2 * size}
        daemon.write_checkpoint(job, step, files)
    if ended_s is not None:
        await daemon.parts.journal.store.set(job.job_id, ended_s=ended_s)
    return await daemon.job(job.job_id)

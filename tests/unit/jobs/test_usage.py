"""What jobs use of the devices is charged at once, and once for each device."""

from __future__ import annotations

from typing import Any

import pytest

from horizon_server.jobs.usage import UsageMeter
from horizon_server.records.execution import Execution
from horizon_server.records.job import JobRecord, JobState
from horizon_server.records.plan import Plan
from horizon_server.scheduling.shares import Shares
from horizon_server.spec import JobSpec

NOW_S = 1000.0


class Kept:
    """Stands for the database: what was stored last."""

    def __init__(self) -> None:
        self.device_s = 0.0

    async def charge(self, project: str, owner: str, *, device_s: float, **_: Any) -> None:
        """Keep it."""
        self.device_s += device_s

    async def save_uses(self, uses: Any) -> None:
        """Nothing looks at them here."""


@pytest.mark.parametrize("num_nodes", [1, 3])
async def test_a_job_of_several_nodes_is_charged_for_each(num_nodes: int) -> None:
    plan = Plan(
        host_bytes={},
        device_bytes={},
        host_limit_bytes=0,
        num_parameters=1,
        device="host",
        execution=Execution(num_nodes=num_nodes, num_ranks=2 * num_nodes, lanes=8),
    )
    job = JobRecord(
        job_id="job_1",
        owner="ada",
        project="lab",
        spec=JobSpec(name="toy", model="m", dataset="d"),
        model_id="m-1",
        dataset_id="d-1",
        eval_dataset_id="",
        job_state=JobState.RUNNING,
        created_s=NOW_S,
        queued_s=NOW_S,
        plan=plan,
    )
    shares, kept = Shares(86400.0), Kept()
    meter = UsageMeter(kept, shares, clock=lambda: NOW_S)  # type: ignore[arg-type]
    # One turn on each of the devices of this node.
    for _ in range(plan.num_devices):
        meter.add(job, 2.0)
    assert shares.use_of("lab", "ada", NOW_S) == 2 * 2.0 * num_nodes
    await meter.store()
    await meter.store()
    assert kept.device_s == 2 * 2.0 * num_nodes

"""The pass over the data before the first step, in what the daemon says of a job: planned, counted, and how far it
is."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tests.conftest import MakeDaemon
from tests.daemon_parts import WAIT_S, Script
from tests.support.rates import write_rates

from horizon_server.events import Message
from horizon_server.records.job import JobState as S

PAIRS = "".join(
    json.dumps({"prompt": f"why {i}?", "chosen": "because of the rain", "rejected": "no"}) + "\n" for i in range(40)
).encode()


async def test_the_pass_is_planned_counted_and_gone_once_it_is_done(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    write_rates(tmp_path / "state", num_threads=1)
    async with make_daemon(tmp_path / "state", num_threads=1) as daemon:
        ada = await daemon.user("ada")
        await daemon.dataset(ada, "pairs", PAIRS)
        spec = daemon.spec(dataset="pairs", method="dpo", eval_fraction=0.2, train={"compile": "off"})

        async def estimated_s() -> float:
            outlook, _, _ = await daemon.services.sharing.simulate(ada, spec)
            assert outlook.estimated_start_s is not None and outlook.estimated_end_s is not None
            return outlook.estimated_end_s - outlook.estimated_start_s

        before_s = await estimated_s()
        job = await daemon.submit(
            ada,
            "preferring",
            Script(references=(25, 100), hold_at="references"),
            dataset="pairs",
            method="dpo",
            eval_fraction=0.2,
            train={"compile": "off"},
        )
        assert job.plan is not None and job.plan.references is not None
        assert job.plan.references.tokens_estimated
        steps_s = 3 * job.plan.prediction.step_s if job.plan.prediction else 0.0
        assert job.remaining_device_s == pytest.approx(steps_s + job.plan.references_s)
        assert before_s == pytest.approx(steps_s + job.plan.references_s, rel=1e-3)

        async with asyncio.timeout(WAIT_S):
            async for event in daemon.parts.journal.follow(job.job_id, 0):
                if event.payload == Message(level="info", text="in the pass"):
                    break
        found = await daemon.job(job.job_id)
        assert found.plan is not None and found.plan.references is not None
        references = found.plan.references
        assert (references.tokens_estimated, references.done_share) == (False, 0.25)
        # Both documents of each row, held out or not.
        counts = found.data_report
        assert references.num_tokens == counts["tokens"] + counts["eval_tokens"] and counts["eval_tokens"]
        assert found.remaining_device_s == pytest.approx(steps_s + 0.75 * found.plan.references_s)

        daemon.release("preferring")
        done = await daemon.until(job.job_id, S.SUCCEEDED)
        assert done.num_steps == 3
        # The pass is counted by itself, and not as a part of loading; of data that is prepared its tokens are known.
        assert await estimated_s() == pytest.approx(steps_s + found.plan.references_s, rel=1e-3)

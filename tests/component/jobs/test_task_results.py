"""What evaluation programs have measured is in the record of its job, as long as there is the job."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from pathlib import Path

import pytest
from tests.daemon_parts import daemon_parts

from horizon_server.errors import InvalidSpec, NotAllowed, NotFound
from horizon_server.events import Message, StepDone
from horizon_server.records.job import JobState
from horizon_server.records.task_result import TaskResult
from horizon_server.services.task_results import MAX_NAME_CHARACTERS, MAX_TASK_RESULTS

ACC = TaskResult(
    step=0, task="arc", metric="acc", value=0.5, stderr=0.1, num_samples=8, num_documents=20, program="p 1"
)
STEP = StepDone(
    step=5,
    loss=1.0,
    grad_norm=1.0,
    learning_rate=1e-4,
    overlap_ratio=0.5,
    num_tokens=1,
    duration_s=0.5,
    num_steps=10,
    epoch=0.5,
    num_input_tokens_seen=1,
    tokens_per_second=1.0,
)


async def test_results_are_recorded_replaced_and_kept_over_a_restart(tmp_path: Path, model_folder: Path) -> None:
    async with daemon_parts(tmp_path / "state", model_folder=model_folder, queue=False) as daemon:
        ada = await daemon.user("ada")
        await daemon.dataset(ada)
        job = await daemon.job_in(JobState.SUCCEEDED, ada, STEP)
        record = daemon.services.task_results.record
        other = dataclasses.replace(ACC, metric="exact_match,strict", stderr=None)
        await record(ada, job.job_id, 5, [ACC, other])
        await record(ada, job.job_id, 4, [ACC])
        await record(ada, job.job_id, 5, [dataclasses.replace(ACC, value=0.75, step=3)])
        kept = (await daemon.job(job.job_id)).task_results
        assert [(one.step, one.metric, one.value) for one in kept] == [
            (5, "exact_match,strict", 0.5),
            (4, "acc", 0.5),
            (5, "acc", 0.75),
        ]
        assert all(one.recorded_s > 0 for one in kept)
        texts = [e.payload.text for e in await daemon.events(job.job_id) if isinstance(e.payload, Message)]
        assert texts[-1] == "p 1 on the checkpoint of step 5, by ada: arc acc 0.7500"
    async with daemon_parts(tmp_path / "state", model_folder=model_folder, queue=False) as daemon:
        assert (await daemon.job(job.job_id)).task_results == kept


async def test_results_are_bounded_and_must_be_numbers(tmp_path: Path, model_folder: Path) -> None:
    async with daemon_parts(tmp_path / "state", model_folder=model_folder, queue=False) as daemon:
        ada = await daemon.user("ada")
        await daemon.dataset(ada)
        job = await daemon.job_in(JobState.SUCCEEDED, ada, STEP)
        record = daemon.services.task_results.record
        many = [dataclasses.replace(ACC, task=f"task-{number}") for number in range(MAX_TASK_RESULTS)]
        # At once: none is lost
        await asyncio.gather(*(record(ada, job.job_id, 5, many[at : at + 20]) for at in range(0, MAX_TASK_RESULTS, 20)))
        assert len((await daemon.job(job.job_id)).task_results) == MAX_TASK_RESULTS
        await record(ada, job.job_id, 5, [ACC])
        kept = (await daemon.job(job.job_id)).task_results
        assert len(kept) == MAX_TASK_RESULTS and kept[-1].task == "arc"
        for results, step, field in (
            ([*many, ACC], 5, "results"),
            ([ACC], 6, "step"),
            ([ACC], -1, "step"),
            ([dataclasses.replace(ACC, value=math.nan)], 5, "results[0].value"),
            ([dataclasses.replace(ACC, stderr=math.inf)], 5, "results[0].value"),
            ([ACC, dataclasses.replace(ACC, metric="")], 5, "results[1].metric"),
            ([dataclasses.replace(ACC, task="x" * (MAX_NAME_CHARACTERS + 1))], 5, "results[0].task"),
            ([dataclasses.replace(ACC, num_samples=-1)], 5, "results[0].num_samples"),
        ):
            with pytest.raises(InvalidSpec) as refused:
                await record(ada, job.job_id, step, results)
            assert [violation.field for violation in refused.value.violations] == [field]
        assert (await daemon.job(job.job_id)).task_results == kept


async def test_who_may_change_a_job_records_its_results(tmp_path: Path, model_folder: Path) -> None:
    async with daemon_parts(tmp_path / "state", model_folder=model_folder, queue=False) as daemon:
        ada, bob = await daemon.user("ada"), await daemon.user("bob")
        eve = await daemon.user("eve", role="viewer")
        await daemon.dataset(ada)
        job = await daemon.job_in(JobState.SUCCEEDED, ada, STEP)
        record = daemon.services.task_results.record
        with pytest.raises(NotFound):
            await record(bob, job.job_id, 5, [])
        # Asked before hours of work
        with pytest.raises(NotAllowed):
            await record(eve, job.job_id, 5, [])
        assert (await record(ada, job.job_id, 5, [])).task_results == ()
        assert not [e for e in await daemon.events(job.job_id) if isinstance(e.payload, Message)]

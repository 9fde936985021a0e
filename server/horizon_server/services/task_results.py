"""Results of evaluation programs in a job's record: a program on a laptop has measured them through /v1."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Sequence

from horizon_server.codec import to_plain
from horizon_server.errors import InvalidSpec
from horizon_server.events import Message
from horizon_server.records.account import Principal
from horizon_server.records.job import JobRecord
from horizon_server.records.task_result import TaskResult
from horizon_server.services.access import require_change
from horizon_server.services.jobs import JobService

MAX_TASK_RESULTS = 200
"""Of a job: beyond them the oldest go. Also of one call."""
MAX_NAME_CHARACTERS = 200
"""Of a task, a metric, a version and a program."""
_NAMES = ("task", "metric", "version", "program")


class TaskResults:
    """Records them. Thread: belongs to one event loop."""

    def __init__(self, jobs: JobService) -> None:
        self._jobs = jobs
        self._turn = asyncio.Lock()

    async def record(self, principal: Principal, key: str, step: int, results: Sequence[TaskResult]) -> JobRecord:
        """Add results of a checkpoint to its job; those of the same step, task and metric are replaced. Without
        any, say only whether the caller may.

        Raises:
            NotFound: when the caller has no such job.
            NotAllowed: when it is another user's.
            InvalidSpec: when there are too many, one is not finite, a name is empty or too long, or the job has not
                reached that step.
        """
        job = await self._jobs.get(principal, key)
        require_change(principal, job.owner, f"job {job.job_id}", project=job.project)
        if self._jobs.boxes.has_arrived(job):
            more = {"step": step, "results": to_plain(results)}
            return await self._jobs.boxes.order(principal, job, "record_task_results", **more)
        _require_possible(job, step, results)
        if not results:
            return job
        now_s = time.time()
        new = {_key(one): one for one in (dataclasses.replace(r, step=step, recorded_s=now_s) for r in results)}
        # One at a time: each adds to what is there.
        async with self._turn:
            there = (await self._jobs.get(principal, job.job_id)).task_results
            kept = [*(one for one in there if _key(one) not in new), *new.values()]
            text = "; ".join(f"{one.task} {one.metric} {one.value:.4f}" for one in results[:5])
            rest = f" and {len(results) - 5} more" if len(results) > 5 else ""
            told = f"{results[0].program or 'an evaluation'} on the checkpoint of step {step}, by {principal.name}: "
            await self._jobs.journal.append_now(
                job.job_id,
                Message(level="info", text=f"{told}{text}{rest}"),
                task_results=tuple(kept[-MAX_TASK_RESULTS:]),
            )
        return await self._jobs.get(principal, job.job_id)


def _key(one: TaskResult) -> tuple[int, str, str]:
    return one.step, one.task, one.metric


def _require_possible(job: JobRecord, step: int, results: Sequence[TaskResult]) -> None:
    if not 0 <= step <= job.step:
        raise InvalidSpec.of("step", f"step is {step}; job {job.job_id} has had the steps 0 to {job.step}")
    if len(results) > MAX_TASK_RESULTS:
        raise InvalidSpec.of(
            "results", f"results has {len(results)} entries; at most {MAX_TASK_RESULTS} are kept of a job"
        )
    for place, one in enumerate(results):
        for name in _NAMES:
            text = getattr(one, name)
            is_needed = name in ("task", "metric")
            if len(text) > MAX_NAME_CHARACTERS or (is_needed and not text):
                raise InvalidSpec.of(
                    f"results[{place}].{name}",
                    f"results[{place}].{name} has {len(text)} characters; it must have {int(is_needed)} to "
                    f"{MAX_NAME_CHARACTERS}",
                )
        if not math.isfinite(one.value) or not math.isfinite(one.stderr or 0.0):
            raise InvalidSpec.of(
                f"results[{place}].value",
                f"results[{place}] has the value {one.value} and the error {one.stderr}; both must be finite numbers",
            )
        if one.num_samples < 0 or one.num_documents < 0:
            raise InvalidSpec.of(
                f"results[{place}].num_samples",
                f"results[{place}] has {one.num_samples} samples of {one.num_documents} documents; both must be 0 or "
                "more",
            )

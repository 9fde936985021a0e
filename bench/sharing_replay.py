"""The replay of a queue: when jobs were estimated to start and to end, and when they did.

The scheduler, its database, shares and turns are the daemon's; the workers only sleep. A job's steps take what its plan
predicts, times a factor of the job's own, as real ones do. Nine of ten jobs are short, as in a lab. An error is
relative to the time from the estimate to the start or the end.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tests.daemon_parts import DaemonParts, Script, daemon_parts

from horizon_server.demo.recipe import write_demo_model
from horizon_server.planning.machine import Machine, RateBook, measure_rates
from horizon_server.records.account import Principal
from horizon_server.records.job import JobRecord, JobState
from horizon_server.records.sharing import Outlook
from horizon_server.settings import child_environment

NUM_USERS = 8
SLICE_S = 0.5
_RESIDENT_JOBS = 5
SIGMA_OF_STEPS = 0.1
_TRAIN = {"sequence_length": 256, "tokens_per_step": 1024, "compile": "off"}
# Earlier starts are not predicted but made: the job is loaded at once.
LEAST_WAIT_S = 1.0
_WAIT_S = 3600.0

_Who = TypeVar("_Who")


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """A job's start and end, in seconds from the estimate, and what they were estimated to be."""

    estimated_start_s: float
    estimated_end_s: float
    start_s: float
    end_s: float


def median_errors(jobs: Sequence[Replayed]) -> tuple[float, float]:
    """Return the median relative errors of start and end; that of the start is of jobs that had to wait."""
    starts = [abs(job.estimated_start_s / job.start_s - 1) for job in jobs if job.start_s >= LEAST_WAIT_S]
    ends = [abs(job.estimated_end_s / job.end_s - 1) for job in jobs]
    return statistics.median(starts) if starts else math.nan, statistics.median(ends)


def drawn_user(drawn: random.Random, users: Sequence[_Who]) -> _Who:
    """Return who submits; the first ones submit the most."""
    return users[int(len(users) * drawn.random() ** 2)]


def drawn_length(drawn: random.Random) -> float:
    """Return a job's device seconds."""
    return drawn.uniform(0.4, 2.0) if drawn.random() < 0.9 else drawn.uniform(2.0, 10.0)


class Replay:
    """One queue's life: jobs of several users, `arrival_s` apart on average."""

    def __init__(self, daemon: DaemonParts, owners: Sequence[Principal], *, arrival_s: float) -> None:
        self._daemon, self._owners, self._arrival_s = daemon, owners, arrival_s
        self._drawn = random.Random(1)
        self._seen: dict[str, tuple[float, Outlook]] = {}

    async def run(self, num_jobs: int) -> list[Replayed]:
        """Submit jobs one after the other and wait for their ends.

        Where they arrive over time, a job's estimate is that of its submission. Where all are there at once, the
        estimates are those that the daemon shows once the last one is.
        """
        jobs = [await self._submit(f"job-{number}") for number in range(num_jobs)]
        if not self._arrival_s:
            looked_s = time.time()
            found = {job_id: self._daemon.parts.scheduler.outlook(job_id) for job_id in jobs}
            self._seen = {job_id: (looked_s, outlook) for job_id, outlook in found.items() if outlook is not None}
        async with asyncio.timeout(_WAIT_S):
            ended = [await self._ended(job_id) for job_id in jobs]
        replayed = []
        for job in ended:
            seen_s, outlook = self._seen.get(job.job_id, (0.0, Outlook(why="")))
            if outlook.estimated_start_s is None or outlook.estimated_end_s is None:
                continue  # it had ended before the look
            replayed.append(
                Replayed(
                    estimated_start_s=outlook.estimated_start_s - seen_s,
                    estimated_end_s=outlook.estimated_end_s - seen_s,
                    start_s=job.started_s - seen_s,
                    end_s=job.ended_s - seen_s,
                )
            )
        return [one for one in replayed if one.end_s > 0]

    async def _ended(self, job_id: str) -> JobRecord:
        async for _ in self._daemon.parts.journal.follow(job_id, 0):
            pass
        job = await self._daemon.job(job_id)
        assert job.job_state is JobState.SUCCEEDED, job.message
        return job

    async def _submit(self, name: str) -> str:
        """Submit a job of a drawn length, by a drawn user."""
        drawn = self._drawn
        owner = drawn_user(drawn, self._owners)
        device_s = drawn_length(drawn)
        _, plan, _ = await self._daemon.services.jobs.plan(owner, self._daemon.spec(name, train=_TRAIN))
        assert plan.prediction is not None, "the machine's rates are known"
        num_steps = max(1, round(device_s / plan.prediction.step_s))
        changes: dict[str, Any] = {"train": {**_TRAIN, "max_steps": num_steps}, "checkpoint": {"every_steps": 0}}
        if self._arrival_s:
            await asyncio.sleep(drawn.expovariate(1 / self._arrival_s))
            simulated, _, _ = await self._daemon.services.sharing.simulate(owner, self._daemon.spec(name, **changes))
        step_s = plan.prediction.step_s * math.exp(drawn.gauss(0, SIGMA_OF_STEPS))
        job = await self._daemon.submit(owner, name, Script(num_steps=num_steps, step_s=step_s), **changes)
        if self._arrival_s:
            self._seen[job.job_id] = job.created_s, simulated
        return job.job_id


async def replay(folder: Path, num_jobs: int, *, arrival_s: float) -> list[Replayed]:
    """Run a daemon that knows its machine's speed and has memory for five jobs."""
    model, state = write_demo_model(folder / "model"), folder / "state"
    state.mkdir()
    machine = Machine.of((), num_threads=1)
    RateBook(state, machine).write(await measure_rates(machine, environment=child_environment()))
    usual: dict[str, Any] = {"model_folder": model, "num_threads": 1, "time_slice_s": SLICE_S}
    async with daemon_parts(folder / "plan", **usual, queue=False) as planning:
        owner = await planning.user("planner")
        await planning.dataset(owner)
        _, plan, _ = await planning.services.jobs.plan(owner, planning.spec(train=_TRAIN))
    usual |= {"host_memory_limit_bytes": _RESIDENT_JOBS * plan.host_total_bytes, "host_memory_reserve_bytes": 0}
    async with daemon_parts(state, **usual) as daemon:
        owners = [await daemon.user(f"user-{number}") for number in range(NUM_USERS)]
        for owner in owners:
            await daemon.dataset(owner)
        return await Replay(daemon, owners, arrival_s=arrival_s).run(num_jobs)


def print_table(*, num_jobs: int) -> None:
    """Print the errors where all jobs are there at once, and where they arrive over time."""
    print(
        "| jobs | arrive | counted | of them waited | median error of the start | of the end | median time to the end "
        "s |"
    )
    print("| --- " * 7 + "|")
    for title, arrival_s in (("all at once", 0.0), ("every 2 s on average", 2.0)):
        with tempfile.TemporaryDirectory() as folder:
            jobs = asyncio.run(replay(Path(folder), num_jobs, arrival_s=arrival_s))
        start, end = median_errors(jobs)
        took_s = statistics.median(job.end_s for job in jobs)
        waited = sum(job.start_s >= LEAST_WAIT_S for job in jobs)
        print(f"| {num_jobs} | {title} | {len(jobs)} | {waited} | {start:.1%} | {end:.1%} | {took_s:.0f} |", flush=True)

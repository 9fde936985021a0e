"""How long the curves of a job of 100,000 steps take to come, from REST in process: as a sketch, with nothing read
yet, again, after one more step, and a part of it in detail.

    python -m bench.series [STEPS]
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import sqlite3
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from horizon_server.api.http.series import AskedSeries, SeriesOfJobs
from horizon_server.db.database import Database
from horizon_server.db.jobs import JobStore
from horizon_server.events import StepDone, encode
from horizon_server.figures import TransferFigures
from horizon_server.services.jobs import JobService

_LINK = TransferFigures(bytes=78_888_888, busy_s=0.5, exposed_s=0.125)
_STEP = StepDone(
    step=1,
    num_steps=1,
    loss=1.2345678,
    grad_norm=0.5123,
    learning_rate=1.2e-4,
    epoch=0.5,
    eta_s=25.5,
    num_input_tokens_seen=123_456,
    num_tokens=2048,
    tokens_per_second=3123.4,
    duration_s=0.512345,
    overlap_ratio=0.987,
    model_flops=1.2e15,
    h2d=_LINK,
    d2h=_LINK,
    compute_s=0.4,
    optimizer_s=0.3,
    method_figures={"rewards/margins": 1.5, "rewards/chosen": 0.2, "rewards/rejected": -0.2},
    host_memory_bytes={"planes": 123_456_789, "staging": 1_234_567, "activations": 1_234_567, "process": 12_345_678},
    device_memory_bytes={"slots": 123_456_789, "activations": 12_345_678, "gradients": 12_345_678},
)


def write_steps(path: Path, job_id: str, first: int, last: int) -> None:
    """Store the steps from one to another as events of a job; the number of each event is that of its step."""
    with sqlite3.connect(path) as connection:
        steps = (dataclasses.replace(_STEP, step=i, num_steps=last, loss=5 / i**0.3) for i in range(first, last + 1))
        rows = ((job_id, step.step, float(step.step), encode(step)) for step in steps)
        connection.executemany("insert into events(job_id, sequence, time_s, body) values (?, ?, ?, ?)", rows)


async def _run(folder: Path, num_steps: int) -> None:
    path = folder / "horizon.db"
    async with Database.opened(path) as database:
        write_steps(path, "job", 1, num_steps)
        series, store = SeriesOfJobs(), JobStore(database)

        class Reader:
            visit_events = JobService.visit_events
            journal = SimpleNamespace(store=store)

        async def measure(what: str, last: int, **asked: Any) -> None:
            job = cast(Any, SimpleNamespace(job_id="job", num_steps=last, last_sequence=last))
            began_s, used_s = time.perf_counter(), time.process_time()
            body = await series.body(cast(Any, Reader()), job, AskedSeries(points=1000, **asked))
            took_s, used_s = time.perf_counter() - began_s, time.process_time() - used_s
            print(f"| {what} | {took_s * 1e3:.0f} ms | {used_s * 1e3:.0f} ms | {math.ceil(len(body) / 1000)} kB |")

        print(f"{num_steps} steps\n\n| what | time | processor time | answer |\n| --- | --- | --- | --- |")
        await measure("a sketch", num_steps, sketch=True)
        await measure("all of it, first", num_steps)
        await measure("the same again", num_steps)
        write_steps(path, "job", num_steps + 1, num_steps + 1)
        await measure("after one more step", num_steps + 1)
        await measure("loss alone", num_steps + 1, names=("loss",))
        middle = num_steps // 2
        await measure("2,000 steps of it", num_steps + 1, from_step=middle, to_step=middle + 1999)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_run(Path(folder), int(sys.argv[1]) if len(sys.argv) > 1 else 100_000))

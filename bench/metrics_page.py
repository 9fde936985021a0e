"""How long the daemon needs for /metrics: with five jobs on the machine, before and after 1,000 others have ended.

In one process, without a daemon, in processor time: every route and call has been called with three results, more than
a lab sees, and ten users have had jobs. What is asked is below 50 ms, and no more after jobs have ended.

python -m bench.metrics_page
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time

from horizon_server.api.grpc.calls import CALLS
from horizon_server.events import CheckpointWritten, EvalDone, StepDone
from horizon_server.figures import TransferFigures
from horizon_server.records.account import Principal
from horizon_server.records.job import JobRecord, JobState
from horizon_server.records.plan import Plan
from horizon_server.services.access import may_see_series
from horizon_server.spec import parse_job_spec
from horizon_server.telemetry.metrics import Metrics

ACTIVE, ENDED, RENDERED, USERS, ROUTES = 5, 1000, 40, 10, 30
_COMPONENTS = ("weights", "moments", "gradients", "activations", "staging", "other")
_MOVED = TransferFigures(bytes=1 << 30, busy_s=1.0, exposed_s=0.1)


def job(number: int) -> JobRecord:
    """A running job of one of the users."""
    memory = dict.fromkeys(_COMPONENTS, 1 << 30)
    return JobRecord(
        job_id=f"job_{number:012x}",
        owner=f"user-{number % USERS}",
        project=f"user-{number % USERS}",
        spec=parse_job_spec({"name": f"job-{number}", "model": "m", "dataset": "d", "eval_dataset": "e"}),
        model_id="m",
        dataset_id="d",
        eval_dataset_id="e",
        job_state=JobState.RUNNING,
        num_steps=100,
        plan=Plan(
            host_bytes=memory, device_bytes=memory, host_limit_bytes=1 << 40, num_parameters=1 << 30, device="cuda:0"
        ),
    )


def live(metrics: Metrics, running: JobRecord) -> None:
    """Have a job come as far as its first step, evaluation and checkpoint."""
    before = None
    for state in (JobState.QUEUED, JobState.PREPARING, JobState.STARTING, JobState.RUNNING):
        metrics.on_job_state(dataclasses.replace(running, job_state=state), before)
        before = state.value
    step = StepDone(
        step=1,
        num_steps=100,
        loss=1.0,
        grad_norm=1.0,
        learning_rate=1e-4,
        epoch=0.1,
        num_input_tokens_seen=64,
        num_tokens=64,
        tokens_per_second=64.0,
        duration_s=1.0,
        h2d=_MOVED,
        d2h=_MOVED,
        host_memory_bytes=dict.fromkeys(_COMPONENTS, 1 << 30),
        device_memory_bytes=dict.fromkeys(_COMPONENTS, 1 << 30),
    )
    for payload in (
        step,
        EvalDone(step=1, eval_loss=1.0, num_targets=9),
        CheckpointWritten(step=1, duration_s=1, size_bytes=1),
    ):
        metrics.on_payload(running, payload)


def rendered(metrics: Metrics) -> str:
    """A row of the table."""
    scraper = Principal(name="prometheus", role="user", project="prometheus", scope="metrics")
    times, body = [], b""
    for _ in range(RENDERED + 1):
        started_s = time.process_time()
        body, _content_type = metrics.render(lambda labels, owners: may_see_series(scraper, labels, owners))
        times.append(time.process_time() - started_s)
    median_ms, best_ms = 1e3 * statistics.median(times[1:]), 1e3 * min(times[1:])
    return f"{body.count(bytes([10]))} | {len(body) / 1024:.0f} | {median_ms:.1f} | {best_ms:.1f} |"


def main() -> None:
    """Print a table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    metrics = Metrics()
    for number in range(ROUTES):
        for code in (200, 401, 404):
            metrics.on_http("GET", f"/horizon/v1/route-{number}", code, 0.01)
    for call in CALLS:
        for status in ("OK", "NOT_FOUND", "INVALID_ARGUMENT"):
            metrics.on_grpc("horizon_proto.v1.Service", call, status, 0.01)
    for number in range(ACTIVE):
        live(metrics, job(number))
    print("| ended jobs | active jobs | lines | KiB | processor ms, median | best |")
    print("| --- | --- | --- | --- | --- | --- |")
    print(f"| 0 | {ACTIVE} | {rendered(metrics)}")
    for number in range(ACTIVE, ACTIVE + ENDED):
        live(metrics, job(number))
        metrics.on_job_state(dataclasses.replace(job(number), job_state=JobState.SUCCEEDED), "RUNNING")
    print(f"| {ENDED} | {ACTIVE} | {rendered(metrics)}")


if __name__ == "__main__":
    main()

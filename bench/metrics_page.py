"""How long Prometheus waits for /metrics: with five jobs on the machine, before and after 1,000 others have ended.

The daemon, its database and its HTTP server are real, in this process, whose client takes processor time too; workers
follow a script. Every route and every call of gRPC has been called with three results, more than a lab sees.

python -m bench.metrics_page
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path

import httpx
from tests.support.both_daemons import demo_spec
from tests.support.daemon_process import wait_for_step
from tests.support.served_daemon import ServedDaemon

from bench.service_load import add_ended_jobs
from horizon_client import Client
from horizon_server.api.grpc.calls import CALLS
from horizon_server.demo.recipe import write_demo_dataset, write_demo_model
from horizon_server.records.job import JobRecord, JobState

ACTIVE, ENDED, SCRAPES = 5, 1000, 50


def scrape(daemon: ServedDaemon, token: str) -> tuple[list[float], int, int]:
    """Seconds of each scrape, and lines and bytes of the last one."""
    times = []
    with httpx.Client(base_url=f"http://{daemon.endpoints['http']}", timeout=60) as client:
        for _ in range(SCRAPES + 1):
            started_s = time.perf_counter()
            answer = client.get("/metrics", headers={"Authorization": f"Bearer {token}"}).raise_for_status()
            times.append(time.perf_counter() - started_s)
    return times[1:], answer.text.count("\n"), len(answer.content)


def end_jobs(daemon: ServedDaemon, client: Client, like: str) -> None:
    """Have so many jobs end in the database and in the metrics, each after a whole life."""
    add_ended_jobs(daemon.state_dir / "horizon.db", like, ENDED)
    parts = daemon.parts.parts

    async def live() -> None:
        jobs: list[JobRecord] = await parts.journal.store.newest_ended(ENDED)
        assert len(jobs) == ENDED
        for job in jobs:
            before = None
            for state in (JobState.QUEUED, JobState.PREPARING, JobState.STARTING, JobState.RUNNING, job.job_state):
                parts.metrics.on_job_state(dataclasses.replace(job, job_state=state), before)
                if state is JobState.RUNNING and job.last_step is not None:
                    parts.metrics.on_payload(dataclasses.replace(job, job_state=state), job.last_step)
                before = state.value
        parts.metrics.set_jobs(await parts.journal.store.counts())

    daemon.call(live())
    assert len(list(client.jobs.list())) > ACTIVE


def main() -> None:
    """Print a table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        (state / "scripts").mkdir(parents=True)
        (state / "scripts" / "any.json").write_text(json.dumps({"num_steps": 1_000_000, "step_s": 0.5}))
        model = write_demo_model(Path(folder) / "model")
        daemon = ServedDaemon(state, model_folder=model).start()
        try:
            token, scraper = daemon.user("ada"), daemon.user("prometheus", role="viewer")
            with daemon.client(token) as client:
                client.models.push(model, name="demo-model")
                client.datasets.push([write_demo_dataset(Path(folder))], name="demo-chats")
                jobs = [client.jobs.submit(demo_spec(f"job-{number}")).job_id for number in range(ACTIVE)]
                for job_id in jobs:
                    wait_for_step(client, job_id, 2)
                metrics = daemon.parts.parts.metrics
                for number in range(30):
                    for code in (200, 401, 404):
                        metrics.on_http("GET", f"/horizon/v1/route-{number}", code, 0.01)
                for call in CALLS:
                    for status in ("OK", "NOT_FOUND", "INVALID_ARGUMENT"):
                        metrics.on_grpc("horizon_proto.v1.Service", str(call), status, 0.01)
                rows.append((0, *scrape(daemon, scraper)))
                end_jobs(daemon, client, jobs[0])
                rows.append((ENDED, *scrape(daemon, scraper)))
        finally:
            daemon.close()
    print("| ended jobs | active | lines | KiB | median ms | p95 ms |\n| --- | --- | --- | --- | --- | --- |")
    for ended, times, lines, size in rows:
        p95 = sorted(times)[int(0.95 * (len(times) - 1))]
        print(
            f"| {ended} | {ACTIVE} | {lines} | {size / 1024:.0f} | {1e3 * statistics.median(times):.1f} "
            f"| {1e3 * p95:.1f} |"
        )


if __name__ == "__main__":
    main()

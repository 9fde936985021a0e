"""What a user's many small jobs cost the training of another: one job trains alone, then next to 250 jobs of one step
that are submitted.

Both on every processor of this machine, in one run, so that the figure is a ratio: steps a second next to the others,
of those alone. Alone is measured before and after.

python -m bench.loading                 # about six minutes
python -m bench.loading --quick         # about three
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import statistics
import tempfile
import time
from pathlib import Path

from tests.support.daemon_process import DaemonProcess, wait_for, wait_for_step

from horizon_client import Client
from horizon_client.job_spec_types import JobSpec, TrainSpec
from horizon_server.demo.recipe import write_demo_dataset, write_demo_model

NUM_JOBS = 250
# Processes that have just been started, or killed, are not what is measured.
_SETTLE_S = 5.0


class Node:
    """A daemon with a job of ada's that trains, and eve, who submits."""

    def __init__(self, daemon: DaemonProcess, folder: Path) -> None:
        self._daemon = daemon
        self._ada, self._eve = (daemon.client(daemon.user(name)) for name in ("ada", "eve"))
        model, data = write_demo_model(folder / "model"), write_demo_dataset(folder)
        for client in (self._ada, self._eve):
            client.models.push(model, name="model")
            client.datasets.push([data], name="chats")
        self._job_id = self._submit(self._ada, 1_000_000)
        wait_for_step(self._ada, self._job_id, 10, timeout_s=180)

    def _submit(self, client: Client, max_steps: int) -> str:
        train: TrainSpec = {"max_steps": max_steps, "sequence_length": 256, "tokens_per_step": 1024, "compile": "off"}
        spec: JobSpec = {"name": "load", "model": "model", "dataset": "chats", "train": train}
        return client.jobs.submit({**spec, "checkpoint": {"every_steps": 0}}).job_id

    def flood(self) -> None:
        """Have eve submit her jobs, and wait until the first of them are being loaded."""
        for _ in range(NUM_JOBS):
            self._submit(self._eve, 1)
        wait_for(lambda: len(self._daemon.worker_pids()) > 1, 60)

    def end_flood(self) -> int:
        """Cancel what is left of eve's jobs, and wait until their workers are gone; return how many had ended by
        themselves."""
        jobs = [job for job in self._eve.jobs.list() if job.state != "SUCCEEDED"]
        for job in jobs:
            self._eve.jobs.cancel(job.job_id)
        wait_for(lambda: len(self._daemon.worker_pids()) == 1, 180)
        return NUM_JOBS - len(jobs)

    def steps_per_s(self, seconds: float) -> tuple[float, int]:
        """Return how fast ada's job is from now on, and the most workers that there were."""
        time.sleep(_SETTLE_S)
        most, began_s = 0, time.time()
        while time.time() - began_s < seconds:
            most = max(most, len(self._daemon.worker_pids()))
            time.sleep(1.0)
        query = 'SELECT count(*) FROM events WHERE job_id = ? AND time_s > ? AND body LIKE \'{"kind":"step"%\''
        with sqlite3.connect(self._daemon.state_dir / "horizon.db", timeout=30) as database:
            (number,) = database.execute(query, (self._job_id, began_s)).fetchone()
        return number / (time.time() - began_s), most

    def close(self) -> None:
        """End ada's job."""
        self._ada.jobs.cancel(self._job_id)
        self._ada.close()
        self._eve.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter windows")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the daemon")
    options = parser.parse_args()
    alone_s, flooded_s = (20.0, 60.0) if options.quick else (45.0, 150.0)
    settings = {name: float(value) for name, _, value in (one.partition("=") for one in options.set)}
    with tempfile.TemporaryDirectory() as folder:
        daemon = DaemonProcess(Path(folder) / "state", "--log-level", "error", **settings)
        try:
            node = Node(daemon.start(), Path(folder))
            before, _ = node.steps_per_s(alone_s)
            node.flood()
            flooded, most = node.steps_per_s(flooded_s)
            num_ended = node.end_flood()
            after, _ = node.steps_per_s(alone_s)
            node.close()
        finally:
            daemon.close()
    alone = statistics.mean([before, after])
    print(f"{os.cpu_count()} processors; {NUM_JOBS} jobs of one step by another user\n")
    print("| what | figure |\n| --- | --- |")
    print(f"| steps/s alone, before and after | {before:.2f}, {after:.2f} |")
    print(f"| steps/s next to the others, for {flooded_s:.0f} s | {flooded:.2f} |")
    print(f"| of alone (wanted: 0.8) | {flooded / alone:.2f} |")
    print(f"| most workers at a time | {most} |")
    print(f"| of the other user's jobs, ended by themselves | {num_ended} |")


if __name__ == "__main__":
    main()

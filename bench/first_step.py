"""Seconds from `submit` to a job's first step, through a real daemon and its client: the first job of a model, and
those after it, whose data and layers are there.

The demo's model and data; every job is submitted on an idle node, and is over before the next one. What happened when
is taken from the job's own events.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.daemon_process import DaemonProcess

from horizon_client import Client
from horizon_server.demo.recipe import DEMO_SPEC, write_demo_dataset, write_demo_model


def measure(client: Client, name: str, *, compile_layers: str, rest_s: float) -> dict[str, float]:
    """Seconds after its submission at which each thing of a job happened; `step` is its first step."""
    time.sleep(rest_s)
    train = {**DEMO_SPEC["train"], "max_steps": 3, "compile": compile_layers}
    spec: dict[str, Any] = {**DEMO_SPEC, "name": name, "model": "demo", "dataset": "demo", "train": train}
    began_s = time.time()
    job = client.jobs.submit(spec)
    times = {"submitted": time.time() - began_s}
    for event in client.jobs.watch(job.job_id):
        what = str(event.state) if event.kind == "state" else event.kind
        times.setdefault(what, event.time.timestamp() - began_s)
        print("   ", f"{event.time.timestamp() - began_s:6.2f}", what, str(event)[:200])
    return times


def main() -> None:
    """Print one line per job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", default="on")
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--rest", type=float, default=5.0, help="seconds that the node is idle before each job")
    parser.add_argument("--spare", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--show", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        daemon = DaemonProcess(folder / "state", spare_worker=arguments.spare)
        try:
            daemon.start()
            with daemon.client(daemon.user("ada")) as client:
                client.models.push(write_demo_model(folder / "model"), name="demo")
                client.datasets.push(write_demo_dataset(folder), name="demo")
                for number in range(arguments.jobs):
                    print(measure(client, f"job-{number}", compile_layers=arguments.compile, rest_s=arguments.rest))
        finally:
            print(daemon.log()[-3000:]) if arguments.show else None
            daemon.close()


if __name__ == "__main__":
    main()

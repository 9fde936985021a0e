"""Seconds from `submit` to a job's first step, through a real daemon and its client: the first job of a model, and
those after it, whose data and layers are there.

The demo's model and data. Each job is submitted on an idle node, and is over before the next one. What happened when is
taken from the job's own events.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import yaml
from tests.support.daemon_process import DaemonProcess

from horizon_client import Client
from horizon_server.demo.recipe import DEMO_SPEC, write_demo_dataset, write_demo_model


def measure(client: Client, folder: Path, name: str, *, compile_layers: str) -> dict[str, float]:
    """Seconds after its submission at which a job came into each state for the last time, and did its first step."""
    train = {**DEMO_SPEC["train"], "max_steps": 3, "compile": compile_layers}
    spec_file = folder / f"{name}.yaml"
    spec_file.write_text(
        yaml.safe_dump({**DEMO_SPEC, "name": name, "model": "demo", "dataset": "demo", "train": train})
    )
    began_s, times = time.time(), dict[str, float]()
    job = client.jobs.submit(spec_file)
    for event in client.jobs.watch(job.job_id):
        assert event.time is not None, "the daemon says when it happened"
        after_s = event.time.timestamp() - began_s
        if event.kind == "state":
            times[event.state] = after_s
        elif event.kind == "step":
            times.setdefault("step", after_s)
    return times


def main() -> None:
    """Print one line per job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", choices=["auto", "on", "off"], default="on")
    parser.add_argument("--spare", action=argparse.BooleanOptionalAction, default=True, help="keep a spare worker")
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--rest", type=float, default=15.0, help="seconds that the node is idle before each job")
    arguments = parser.parse_args()
    print("| job | prepared, its layers compiled | worker ready | first step |")
    print("| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        daemon = DaemonProcess(folder / "state", spare_worker=arguments.spare, compile_pushed_models=0)
        try:
            daemon.start()
            with daemon.client(daemon.user("ada")) as client:
                client.models.push(write_demo_model(folder / "model"), name="demo")
                client.datasets.push(write_demo_dataset(folder), name="demo")
                for number in range(1, arguments.jobs + 1):
                    time.sleep(arguments.rest)
                    times = measure(client, folder, f"job-{number}", compile_layers=arguments.compile)
                    shown = (f"{times.get(what, float('nan')):.1f} s" for what in ("STARTING", "RUNNING", "step"))
                    print(f"| {number} | {' | '.join(shown)} |", flush=True)
        finally:
            daemon.close()


if __name__ == "__main__":
    main()

"""How long a user waits: command start-up, daemon start-up, submit to first step; and what the daemon weighs."""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from horizon_client import Client
from horizon_client.job_spec_types import JobSpec
from horizon_server.demo.recipe import DEMO_SPEC, write_demo_dataset, write_demo_model


def seconds(command: Sequence[str], *, runs: int = 7) -> float:
    """Median wall seconds of a command, after one run that is not counted."""
    times = []
    for _ in range(runs + 1):
        started_s = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - started_s)
    return statistics.median(times[1:])


def daemon_figures(folder: Path) -> dict[str, str]:
    """Start a daemon over a fresh state folder, run the built-in job for three steps, and measure."""
    state = folder / "state"
    command = [sys.executable, "-m", "horizon_server", "serve", "--state-dir", str(state)]
    started_s = time.perf_counter()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"], stdout=log, stderr=log)
    while not (state / "endpoints.json").is_file():
        assert process.poll() is None, (folder / "log").read_text("utf-8")
        time.sleep(0.005)
    ready_s = time.perf_counter() - started_s
    try:
        first_step_s, rss_bytes = _first_step(state, folder, process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
    return {
        "daemon ready": f"{ready_s:.2f} s",
        "submit to first step, 2.6 M parameters": f"{first_step_s:.2f} s",
        "daemon RSS after a job": f"{rss_bytes / 2**20:.0f} MiB",
    }


def _first_step(state: Path, folder: Path, pid: int) -> tuple[float, int]:
    admin = [sys.executable, "-m", "horizon_server"]
    subprocess.run([*admin, "user", "add", "you", "--state-dir", str(state)], check=True, capture_output=True)
    token = subprocess.run(
        [*admin, "token", "create", "you", "--state-dir", str(state)], check=True, capture_output=True, text=True
    ).stdout.strip()
    endpoints = json.loads((state / "endpoints.json").read_text("utf-8"))
    with Client(endpoints["grpc"], token=token) as client:
        client.models.push(write_demo_model(folder / "model"), name="model")
        client.datasets.push([write_demo_dataset(folder)], name="chats")
        spec = {**DEMO_SPEC, "model": "model", "dataset": "chats", "train": {**DEMO_SPEC["train"], "max_steps": 3}}
        started_s = time.perf_counter()
        job = client.jobs.submit(cast("JobSpec", spec))
        first_step_s = 0.0
        for event in client.jobs.watch(job.job_id):
            if event.kind == "step" and event.step == 1:
                first_step_s = time.perf_counter() - started_s
    pages = int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1])
    return first_step_s, pages * os.sysconf("SC_PAGESIZE")


def main() -> None:
    """Print a line per figure."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    horizon = str(Path(sys.executable).with_name("horizon"))
    with tempfile.TemporaryDirectory() as folder:
        figures = {
            "horizon --help": f"{seconds([horizon, '--help']):.3f} s",
            "import horizon_client": f"{seconds([sys.executable, '-c', 'import horizon_client']):.3f} s",
            "python alone, to compare": f"{seconds([sys.executable, '-c', '']):.3f} s",
        } | daemon_figures(Path(folder))
    print("| what | figure |\n| --- | --- |")
    for name, figure in figures.items():
        print(f"| {name} | {figure} |")


if __name__ == "__main__":
    main()

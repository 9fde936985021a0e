"""Record what a healthy, busy daemon shows, tests/data/healthy-hour.json: all alerts must stay silent over it.

A daemon of this version trains small jobs of two users with its real workers: supervised and by preference, with
evaluations and checkpoints. Three jobs wait or train at any time; some are paused and resumed, some cancelled, and
users make mistakes. From the first step on it is scraped every 15 s as Prometheus does, and the series that alerts.yml
reads are kept as they were. The tests play the recording again and again until an hour is full.

python -m tools.record_healthy_hour --minutes 12
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families
from tests.support.daemon_process import DaemonProcess

from horizon_client import Client
from horizon_client.errors import HorizonClientError
from horizon_client.job_spec_types import JobSpec
from horizon_server.demo.recipe import DEMO_SPEC, write_demo_dataset, write_demo_model

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "tests" / "data" / "healthy-hour.json"
INTERVAL_S = 15.0
_LABELS = {"instance": "recorded", "job": "horizond"}
_NUM_JOBS = 3
_ENDED = ("SUCCEEDED", "FAILED", "CANCELLED")


def read_by_alerts() -> set[str]:
    """Names of the series that the alerts read."""
    alerts = yaml.safe_load((ROOT / "deploy" / "alerts.yml").read_text("utf-8"))
    expressions = [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    return {name for text in expressions for name in re.findall(r"\b(?:horizon|grpc_server|process)_\w+|\bup\b", text)}


def scrape(url: str, token: str, names: set[str]) -> dict[str, float]:
    """One scrape, by series as a query writes it."""
    text = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {token}"}, timeout=60).raise_for_status().text
    found = {_series("up", {}): 1.0}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in names:
                value = sample.value
                found[_series(sample.name, sample.labels)] = int(value) if value.is_integer() else round(value, 3)
    return found


def _series(name: str, labels: dict[str, str]) -> str:
    every = sorted({**labels, **_LABELS}.items())
    return f"{name}{{{','.join(f'{key}={json.dumps(value)}' for key, value in every)}}}"


class Lab:
    """Two users who keep a daemon busy."""

    def __init__(self, clients: dict[str, Client]) -> None:
        self._clients = clients
        self._jobs: dict[str, Client] = {}
        self._num_submitted = 0

    def look(self) -> None:
        """Submit where a job has ended, and now and then pause, resume or cancel one."""
        for job_id, client in list(self._jobs.items()):
            if client.jobs.get(job_id).state in _ENDED:
                del self._jobs[job_id]
        while len(self._jobs) < _NUM_JOBS:
            self._submit()
        job_id, client = next(iter(self._jobs.items()))
        job = client.jobs.get(job_id)
        # Users are as fast as that sometimes: the job has ended, or is being stopped already.
        with contextlib.suppress(HorizonClientError):
            if job.state == "PAUSED":
                client.jobs.resume(job_id)
            elif job.state == "RUNNING" and job.name.endswith("4"):
                client.jobs.cancel(job_id)
            elif job.state == "RUNNING" and job.name.endswith("2") and 5 < job.step < 40:
                client.jobs.pause(job_id)
        with contextlib.suppress(HorizonClientError):
            client.jobs.get("no-such-job")

    def trains(self) -> bool:
        """Whether a job has done a step."""
        return any(client.jobs.get(job_id).step for job_id, client in self._jobs.items())

    def _submit(self) -> None:
        number = self._num_submitted
        self._num_submitted += 1
        user = list(self._clients)[number % 2]
        client = self._clients[user]
        spec: dict[str, Any] = {
            **DEMO_SPEC,
            "name": f"{user}-{number % 10}",
            "model": "demo-model",
            "dataset": "demo-chats",
            "eval_dataset": "few-chats",
            "eval_every_steps": 15,
            "train": {**DEMO_SPEC["train"], "max_steps": 60, "tokens_per_step": 256, "compile": "off"},
            "checkpoint": {"every_steps": 15, "keep_last": 2},
        }
        if user == "bob":
            spec |= {"method": "dpo", "dataset": "few-pairs"}
            del spec["eval_dataset"], spec["eval_every_steps"]
        self._jobs[client.jobs.submit(cast("JobSpec", spec)).job_id] = client


@contextlib.contextmanager
def busy_daemon(folder: Path) -> Iterator[tuple[DaemonProcess, Lab, str]]:
    """A daemon with what its two users have pushed, and the token of a scraper."""
    model, dataset = write_demo_model(folder / "model"), write_demo_dataset(folder)
    chats = [json.loads(line)["messages"] for line in dataset.read_text("utf-8").splitlines()[:12]]
    rows = [
        {"prompt": chat[:1], "chosen": chat[1:2], "rejected": other[1:2]}
        for chat, other in zip(chats, [*chats[1:], chats[0]], strict=True)
    ]
    few, pairs = folder / "few.jsonl", folder / "pairs.jsonl"
    few.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats[:4]), "utf-8")
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    daemon = DaemonProcess(folder / "state", num_threads=1, max_resident_jobs=2, time_slice_s=5.0)
    try:
        daemon.start()
        with contextlib.ExitStack() as stack:
            clients = {user: stack.enter_context(daemon.client(daemon.user(user))) for user in ("ada", "bob")}
            for client in clients.values():
                client.models.push(model, name="demo-model")
                for name, file in (("demo-chats", dataset), ("few-chats", few), ("few-pairs", pairs)):
                    client.datasets.push([file], name=name)
            yield daemon, Lab(clients), daemon.user("prometheus", role="viewer")
    finally:
        daemon.close()


def record(minutes: float) -> dict[str, Any]:
    """Return the recording."""
    names = read_by_alerts()
    scrapes: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder, busy_daemon(Path(folder)) as (daemon, lab, token):
        while not lab.trains():
            lab.look()
            time.sleep(1.0)
        start_s = time.time()
        for number in range(int(minutes * 60 / INTERVAL_S)):
            while time.time() < start_s + number * INTERVAL_S:
                lab.look()
                time.sleep(1.0)
            scrapes.append(scrape(f"http://{daemon.endpoints['http']}", token, names))
            print(f"{number}: {len(scrapes[-1])} series", flush=True)
    series = sorted({name for one in scrapes for name in one})
    return {
        "about": "made by tools/record_healthy_hour.py; a value for each scrape, null where the series was not there",
        "minutes": minutes,
        "interval_s": INTERVAL_S,
        "start_s": round(start_s, 3),
        "series": {name: [one.get(name) for one in scrapes] for name in series},
    }


def main() -> None:
    """Record, and write the file with a line for each series."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=12.0, help="how long (default: %(default)s)")
    minutes = parser.parse_args().minutes
    recorded = record(minutes)
    series = recorded.pop("series")
    head = json.dumps(recorded, indent=0)[:-2]
    lines = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(values, separators=(',', ':'))}" for name, values in series.items()
    )
    TARGET.write_text(f'{head},\n"series": {{\n{lines}\n}}\n}}\n', "utf-8")


if __name__ == "__main__":
    main()

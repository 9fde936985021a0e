"""A real Prometheus scrapes a real daemon: no query of the shipped boards and rules stays empty, and no series outlives
its job."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tests.support.boards import DEPLOY, queries, rules
from tests.support.both_daemons import AnyDaemon, demo_spec, process_only
from tests.support.daemon_process import DaemonProcess, free_address, wait_for, wait_for_state, wait_for_step

from horizon_client import Client

EMPTY_HERE = {
    r"horizon_gpu_(?!seconds)": "figures of a GPU, on a machine without one",
    r"DCGM_": "dcgm-exporter needs a GPU",
    r"tls_certificate_expiry": "on loopback there is no certificate",
    r"horizon_(collective|rank)_": "no job here has several devices",
    r"horizon_drive_": "no job here has states on drives",
    r"horizon_fleet_": "no further nodes and boxes are set",
}
"""Queries without data, with their reasons."""
NODE_EXPORTER = "prometheus-node-exporter"
if shutil.which(NODE_EXPORTER) is None:
    EMPTY_HERE[r"\bnode_"] = f"needs {NODE_EXPORTER} (Debian package of that name)"

# Limits for what hangs: each of the two waits for all panels may take long on a busy machine.
pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs the prometheus binary (Debian: prometheus)"),
    process_only("the figures of a real worker, and of the machine"),
]


class Prometheus:
    """A running Prometheus with the shipped configuration and rules, scraping `target`, and node_exporter where it is
    installed, every second."""

    def __init__(self, folder: Path, target: str, token: str) -> None:
        config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text("utf-8"))
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(DEPLOY / name) for name in config["rule_files"]]
        (config["scrape_configs"][0]["static_configs"][0])["targets"] = [target]
        # Nobody is to hear of what a test does.
        del config["alerting"]
        self._node_exporter: subprocess.Popen[bytes] | None = None
        if shutil.which(NODE_EXPORTER):
            node = free_address()
            command = [NODE_EXPORTER, f"--web.listen-address={node}"]
            self._node_exporter = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            config["scrape_configs"].append({"job_name": "node", "static_configs": [{"targets": [node]}]})
        (folder / "secrets").mkdir(parents=True)
        (folder / "secrets" / "prometheus.token").write_text(token)
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config), "utf-8")
        address = free_address()
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=self._log,
            stderr=self._log,
        )
        self._client = httpx.Client(base_url=f"http://{address}/api/v1", timeout=240)
        try:
            wait_for(self._scrapes, 240)
        except BaseException:
            self.close()
            raise

    def get(self, path: str, **parameters: str) -> Any:
        answer = self._client.get(path, params=parameters).raise_for_status()
        body = answer.json()
        assert body["status"] == "success", body
        return body["data"]

    def now(self, expression: str) -> list[Any]:
        """The instant vector of an expression."""
        return list(self.get("/query", query=expression)["result"])

    def ever(self, expression: str, since_s: float) -> list[float]:
        """Every finite value that an expression has had since a time."""
        data = self.get("/query_range", query=expression, start=str(since_s), end=str(time.time()), step="1")
        values = [float(value) for series in data["result"] for _, value in series["values"]]
        return [value for value in values if math.isfinite(value)]

    def close(self) -> None:
        self._client.close()
        self._log.close()
        for process in filter(None, (self._process, self._node_exporter)):
            process.terminate()
            try:
                process.wait(240)
            finally:
                process.kill()

    def _scrapes(self) -> bool:
        """Whether it is up and has reached the daemon: while it starts it refuses, then answers 503 in plain text."""
        assert self._process.poll() is None, Path(self._log.name).read_text("utf-8")
        try:
            return [series["value"][1] for series in self.now('up{job="horizond"}')] == ["1"]
        except httpx.HTTPError:
            return False


@pytest.fixture
def daemon(make_daemon: Callable[..., AnyDaemon]) -> AnyDaemon:
    """A daemon with short turns: within the window of a rate, jobs pass the device on several times."""
    return make_daemon(time_slice_s=0.5, measures=True)


@pytest.fixture
def prometheus(daemon: AnyDaemon, tmp_path: Path) -> Iterator[Prometheus]:
    token = daemon.user("prometheus", role="viewer")
    running = Prometheus(tmp_path / "prometheus", daemon.endpoints["http"], token)
    yield running
    running.close()


@pytest.fixture
def few_chats(demo_files: tuple[Path, Path], tmp_path: Path) -> Path:
    """So few that an evaluation is over in no time."""
    file = tmp_path / "few.jsonl"
    file.write_text("".join(demo_files[1].read_text("utf-8").splitlines(keepends=True)[:4]), "utf-8")
    return file


@pytest.fixture
def few_pairs(few_chats: Path, tmp_path: Path) -> Path:
    """The answers of these chats, each preferred to that of another one."""
    chats = [json.loads(line)["messages"] for line in few_chats.read_text("utf-8").splitlines()]
    file = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": chat[:1], "chosen": chat[1:2], "rejected": other[1:2]}
        for chat, other in zip(chats, [*chats[1:], chats[0]], strict=True)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return file


def asked(job_id: str) -> dict[str, str]:
    """Every query of every panel, variable, mark and recording rule that is to have data here, by where it is."""
    found = {query.where: query.filled(job=job_id) for query in queries()}
    return {
        where: expression
        for where, expression in found.items()
        if not any(re.search(pattern, expression) for pattern in EMPTY_HERE)
    }


def test_no_query_of_the_boards_stays_empty_also_after_a_restart(
    daemon: AnyDaemon, prometheus: Prometheus, push_demo: Callable[[Client], None], few_chats: Path, few_pairs: Path
) -> None:
    assert isinstance(daemon, DaemonProcess)
    daemon.admin("doctor")  # so that the daemon knows the machine's speed, which a step is compared with
    spec = demo_spec(max_steps=100_000, sequence_length=64, tokens_per_step=64, checkpoint={"every_steps": 3})
    # Evaluated on text and by answers to prompts: nothing that a panel shows is missing.
    spec |= {"eval_dataset": "few-chats", "eval_every_steps": 3}
    spec |= {"eval": {"generate": {"prompts": 1, "max_new_tokens": 2, "answer": "(.+)"}}}
    with daemon.client(daemon.user("ada")) as ada, daemon.client(daemon.user("bob")) as bob:
        for client in (ada, bob):
            push_demo(client)
            client.datasets.push([few_chats], name="few-chats")
            client.datasets.push([few_pairs], name="few-pairs")
        with daemon.client(daemon.user("root", role="admin")) as admin:
            begin = datetime.now(UTC) + timedelta(days=300)
            admin.node.set_maintenance(begin, begin + timedelta(hours=1))
        # Two methods, each with figures of its own. With one job nobody asks for the device: no turn ends.
        job_id = ada.jobs.submit({**spec, "method": "dpo", "dataset": "few-pairs"}).job_id
        other_id = bob.jobs.submit({**spec, "name": "other", "method": "orpo", "dataset": "few-pairs"}).job_id
        _all_fill(prometheus, ada, job_id, time.time())
        # A daemon that is killed and started again under both: all has data from when it is there again.
        daemon.kill()
        daemon.start()
        _all_fill(prometheus, bob, other_id, time.time())
        shown = prometheus.get("/label/job_id/values", **{"match[]": "horizon_job_progress_ratio"})
        assert {job_id, other_id} <= set(shown)
        wait_for_step(ada, job_id, ada.jobs.get(job_id).step + 1)
        _says_the_truth(prometheus, ada, job_id)
        for client, one in ((ada, job_id), (bob, other_id)):
            client.jobs.cancel(one)
            wait_for_state(client, one, "CANCELLED")
    wait_for(lambda: not prometheus.now('{job_id=~".+"}'), 240, every_s=0.5)
    assert prometheus.now('horizon_jobs{state="CANCELLED"} == 2')
    assert prometheus.now("horizon_tokens_total > 0"), "a counter outlives its jobs"


def _all_fill(prometheus: Prometheus, client: Client, job_id: str, since_s: float) -> None:
    """Wait until every query has had data since a time, in the view of a job that is in its first attempt."""
    empty = asked(job_id)
    assert len(empty) > 130
    # What ends, and what is waited for.
    short_id = client.jobs.submit(demo_spec("short", max_steps=1)).job_id

    def fill() -> None:
        for where in [where for where, query in empty.items() if prometheus.ever(query, since_s)]:
            del empty[where]
        job = client.jobs.get(job_id)
        assert job.state not in ("FAILED", "SUCCEEDED", "CANCELLED"), (job.message, empty)

    def has_filled(where: str = "") -> bool:
        fill()
        return where not in empty if where else not empty

    try:
        wait_for(lambda: has_filled("job / mark Start"), 300, every_s=1.0)
        # Of a later attempt.
        wait_for_state(client, job_id, "RUNNING")
        client.jobs.pause(job_id)
        wait_for_state(client, job_id, "PAUSED")
        client.jobs.resume(job_id)
        wait_for(has_filled, 300, every_s=1.0)
    finally:
        assert not empty, empty
    wait_for_state(client, short_id, "SUCCEEDED")


def _says_the_truth(prometheus: Prometheus, client: Client, job_id: str) -> None:
    """Figures that can be checked against another source."""
    (progress,) = prometheus.now(f'horizon_job_progress_ratio{{job_id="{job_id}"}}')
    job = client.jobs.get(job_id)
    assert 0 < float(progress["value"][1]) <= job.step / job.num_steps
    assert job.plan is not None and job.plan.prediction is not None
    starting = next(event for event in client.jobs.watch(job_id) if event.kind == "state" and event.state == "STARTING")
    assert f"predicted {job.plan.prediction.tokens_per_second:,.0f} tokens/s" in starting.message
    (utilization,) = prometheus.now(f'horizon_model_flops_utilization_ratio{{job_id="{job_id}"}}')
    assert 0 < float(utilization["value"][1]) < 1.2, "of a peak that was measured on this machine a moment ago"
    planned = {
        series["metric"]["component"]: float(series["value"][1])
        for series in prometheus.now(f'horizon_host_memory_planned_bytes{{job_id="{job_id}"}}')
    }
    assert planned == {name: float(size) for name, size in job.plan.host_bytes.items()}
    (gpu,) = prometheus.now("sum(horizon_gpu_seconds_total)")
    assert float(gpu["value"][1]) == 0, "the job runs on the host"
    found = [rule for group in prometheus.get("/rules")["groups"] for rule in group["rules"]]
    assert len(found) == len(rules("alerts.yml")) + len(rules("rules.yml"))
    assert {rule["health"] for rule in found} == {"ok"}, found

"""A real Prometheus scrapes a real daemon: no panel of the shipped dashboard stays empty, and no series outlives its
job."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tests.support.both_daemons import AnyDaemon, demo_spec, process_only
from tests.support.daemon_process import DaemonProcess, free_address, wait_for, wait_for_state

from horizon_client import Client

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
WINDOW = "5s"
"""What Grafana would put for $__rate_interval at the scrape interval used here."""

# Limits for what hangs: each of the two waits for all panels may take long on a busy machine.
pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs the prometheus binary (Debian: prometheus)"),
    process_only("the figures of a real worker, and of the machine"),
]


class Prometheus:
    """A running Prometheus with the shipped configuration, scraping `target` every second."""

    def __init__(self, folder: Path, target: str, token: str) -> None:
        config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text("utf-8"))
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(DEPLOY / name) for name in config["rule_files"]]
        (config["scrape_configs"][0]["static_configs"][0])["targets"] = [target]
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
        self._process.terminate()
        try:
            self._process.wait(240)
        finally:
            self._process.kill()

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


def panels(job_name: str) -> dict[str, str]:
    """Every expression of the dashboard with its variables filled in, by panel and number; on loopback there is no
    certificate."""
    board = json.loads((DEPLOY / "dashboards" / "horizon.json").read_text("utf-8"))
    return {
        f"{panel['title']} {target['refId']}": target["expr"]
        .replace("$instance", ".*")
        .replace("$name", job_name)
        .replace("$__rate_interval", WINDOW)
        for panel in board["panels"]
        for target in panel.get("targets", [])
        if panel["title"] != "Certificate"
    }


def test_no_panel_stays_empty(
    daemon: AnyDaemon, prometheus: Prometheus, push_demo: Callable[[Client], None], few_chats: Path, few_pairs: Path
) -> None:
    assert isinstance(daemon, DaemonProcess)
    daemon.admin("doctor")  # so that the daemon knows the machine's speed, which a step is compared with
    since_s = time.time()
    spec = demo_spec(max_steps=100_000, sequence_length=64, tokens_per_step=64, checkpoint={"every_steps": 3})
    # A method with figures of its own, evaluated on text and by answers to prompts: nothing that a panel shows is
    # missing.
    spec |= {"method": "dpo", "dataset": "few-pairs"}
    spec |= {"eval": {"generate": {"prompts": 1, "max_new_tokens": 2, "answer": "(.+)"}}}
    with daemon.client(daemon.user("ada")) as client:
        push_demo(client)
        client.datasets.push([few_chats], name="few-chats")
        client.datasets.push([few_pairs], name="few-pairs")
        spec |= {"eval_dataset": "few-chats", "eval_every_steps": 3}
        job_id = client.jobs.submit(spec).job_id
        # Without another job nobody asks for the device: no turn ends, and none is waited for.
        other_id = client.jobs.submit({**spec, "name": "other"}).job_id
        empty = panels(spec["name"])
        assert len(empty) > 40

        def all_filled() -> bool:
            for name in [name for name, expression in empty.items() if prometheus.ever(expression, since_s)]:
                del empty[name]
            job = client.jobs.get(job_id)
            assert not job.state.startswith(("FAIL", "SUCC", "CANC")), (job.message, empty)
            return not empty

        try:
            wait_for(all_filled, 300, every_s=1.0)
        finally:
            assert not empty, empty
        # A daemon that is killed and started again under both: as many panels have data, from when it is there again.
        daemon.kill()
        daemon.start()
        since_s, empty = time.time(), panels(spec["name"])
        try:
            wait_for(all_filled, 300, every_s=1.0)
        finally:
            assert not empty, empty
        shown = prometheus.get("/label/job_id/values", **{"match[]": "horizon_job_progress_ratio"})
        assert sorted(shown) == sorted([job_id, other_id])
        _says_the_truth(prometheus, client, job_id)
        for one in (job_id, other_id):
            client.jobs.cancel(one)
            wait_for_state(client, one, "CANCELLED")
    wait_for(lambda: not prometheus.now('{job_id=~".+"}'), 240, every_s=0.5)
    assert prometheus.now('horizon_jobs{state="CANCELLED"} == 2')
    assert prometheus.now("horizon_tokens_total > 0"), "a counter outlives its jobs"


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
    rules = [rule for group in prometheus.get("/rules")["groups"] for rule in group["rules"]]
    alerts = yaml.safe_load((DEPLOY / "alerts.yml").read_text("utf-8"))["groups"]
    assert len(rules) == sum(len(group["rules"]) for group in alerts)
    assert {rule["health"] for rule in rules} == {"ok"}, rules

"""Every alert says what to do, has a runbook, fires in one case, and is silent in another and over a recorded busy
hour."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.boards import DEPLOY, rules

ROOT = DEPLOY.parent
RECORDED = ROOT / "tests" / "data" / "healthy-hour.json"
ALERTS = {rule["alert"]: rule for rule in rules("alerts.yml")}
HOUR_S = 3600
NOT_HERE = {
    "horizon_gpu_": "a machine without a GPU",
    "horizon_worker_restarts_total": "no worker has died",
    "horizon_steps_skipped_total": "no step was skipped",
    "horizon_rank_": "no job had several devices",
    "horizon_fleet_": "no further nodes and boxes were set",
}
"""Series that the alerts read and the recording does not have, with the reason."""

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool (Debian package prometheus)"
)


def _promtool(file: Path) -> subprocess.CompletedProcess[str]:
    command = ["promtool", "test", "rules", str(file)]
    return subprocess.run(command, cwd=DEPLOY, capture_output=True, text=True, check=False, timeout=240)


def _cases() -> list[dict[str, Any]]:
    tests = yaml.safe_load((DEPLOY / "alerts-test.yml").read_text("utf-8"))["tests"]
    return [case for test in tests for case in test["alert_rule_test"]]


@needs_promtool
def test_the_alerts_do_what_their_cases_say() -> None:
    ran = _promtool(DEPLOY / "alerts-test.yml")
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_is_silent(name: str) -> None:
    cases = [case for case in _cases() if case["alertname"] == name]
    assert any(case["exp_alerts"] for case in cases), f"{name} never fires"
    assert any(not case["exp_alerts"] for case in cases), f"{name} is never silent"


def test_no_case_is_about_an_alert_that_is_not_there() -> None:
    assert {case["alertname"] for case in _cases()} == set(ALERTS)


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_says_where_what_is_wrong_and_what_to_do(name: str) -> None:
    alert = ALERTS[name]
    said = alert["annotations"]
    assert set(said) == {"summary", "description", "runbook_url"}
    assert "{{ $labels.instance }}" in said["summary"]
    assert len(said["description"]) > 80, "it says what to look at and what to do"
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert said["runbook_url"] == f"docs/runbooks.md#{name.lower()}"


def test_every_alert_has_its_runbook_and_every_runbook_its_alert() -> None:
    page = (ROOT / "docs" / "runbooks.md").read_text("utf-8")
    sections = dict(re.findall(r"^## (\w+)\n\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert list(sections) == list(ALERTS), "in the same order"
    for name, text in sections.items():
        assert re.findall(r"^\*\*(\w+)\.\*\*", text, re.MULTILINE) == ["Means", "Look", "Do"], name


def _hour(recorded: dict[str, Any]) -> dict[str, list[float | None]]:
    """The recorded series, played again and again until an hour is full: times move on, and counters go on counting."""
    scrapes = len(recorded["series"][next(iter(recorded["series"]))])
    plays = -(-HOUR_S // int(scrapes * recorded["interval_s"]))
    hour: dict[str, list[float | None]] = {}
    for series, values in recorded["series"].items():
        name = series.partition("{")[0]
        known = [value for value in values if value is not None]
        more_s = scrapes * recorded["interval_s"]
        hour[series] = []
        for play in range(plays):
            for value in values:
                if value is None:
                    hour[series].append(None)
                elif name.endswith("_total"):
                    hour[series].append(value + play * (known[-1] - known[0]))
                elif name.endswith("_timestamp_seconds") and value > 0:
                    hour[series].append(value - recorded["start_s"] + play * more_s)
                else:
                    hour[series].append(value)
    return hour


def _silent(folder: Path, recorded: dict[str, Any], hour: dict[str, list[float | None]]) -> bool:
    """Whether no alert has fired at any time of it."""
    interval = f"{int(recorded['interval_s'])}s"
    inputs = [
        {"series": series, "values": " ".join("_" if value is None else f"{value:.15g}" for value in values)}
        for series, values in hour.items()
    ]
    fired = {"expr": 'count_over_time(ALERTS{alertstate="firing"}[1h])', "eval_time": "1h", "exp_samples": []}
    test = {
        "rule_files": [str(DEPLOY / "alerts.yml"), str(DEPLOY / "rules.yml")],
        "evaluation_interval": interval,
        "tests": [{"interval": interval, "input_series": inputs, "promql_expr_test": [fired]}],
    }
    file = folder / "hour.yml"
    file.write_text(json.dumps(test), "utf-8")
    ran = _promtool(file)
    assert ran.returncode == 0 or "ALERTS" in ran.stdout + ran.stderr, ran.stdout + ran.stderr
    print(ran.stdout + ran.stderr)
    return ran.returncode == 0


@needs_promtool
def test_all_are_silent_over_a_busy_hour_that_a_healthy_daemon_had(tmp_path: Path) -> None:
    recorded = json.loads(RECORDED.read_text("utf-8"))
    hour = _hour(recorded)
    assert all(len(values) * recorded["interval_s"] >= HOUR_S for values in hour.values())
    assert _silent(tmp_path, recorded, hour)
    # The same hour, but for the end: the daemon is gone.
    hour['up{instance="recorded",job="horizond"}'][-20:] = [0.0] * 20
    assert not _silent(tmp_path, recorded, hour)


def test_the_recorded_time_was_busy_and_has_every_series_that_the_alerts_read() -> None:
    recorded = json.loads(RECORDED.read_text("utf-8"))
    series = recorded["series"]
    names = {name.partition("{")[0] for name in series}
    read = {
        name
        for alert in ALERTS.values()
        for name in re.findall(r"\b(?:horizon|grpc_server|process)_\w+|\bup\b", alert["expr"])
    }
    assert {name for name in read - names if not name.startswith(tuple(NOT_HERE))} == set()

    def largest(metric: str, **labels: str) -> float:
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        found = [one for name, one in series.items() if name.startswith(metric) and all(w in name for w in wanted)]
        return max((value for one in found for value in one if value is not None), default=0)

    assert largest("horizon_jobs_ended_total", state="SUCCEEDED", user="ada") >= 2
    assert largest("horizon_jobs_ended_total", state="SUCCEEDED", user="bob") >= 2
    assert largest("horizon_jobs_ended_total", state="CANCELLED") >= 1
    assert largest("horizon_jobs", state="PAUSED") >= 1
    assert largest("horizon_jobs", state="QUEUED") >= 1
    assert largest("horizon_checkpoint_last_success_timestamp_seconds") > recorded["start_s"]
    assert largest("horizon_job_last_evaluation_timestamp_seconds") > recorded["start_s"]
    assert largest("horizon_jobs_ended_total", state="FAILED") == 0
    assert RECORDED.stat().st_size < 300_000

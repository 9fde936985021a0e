"""The deployment files parse, agree with each other and with the daemon; no container engine is needed."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from horizon_server.settings import Settings, load_settings

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


def _yaml(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text("utf-8"))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian package prometheus)")
@pytest.mark.parametrize("arguments", [
    ["check", "config", "--syntax-only", "prometheus.yml"], ["check", "config", "--syntax-only", "prometheus-tls.yml"],
    ["check", "rules", "alerts.yml"], ["test", "rules", "alerts-test.yml"],
])  # fmt: skip
def test_promtool_accepts_the_prometheus_files_and_the_alerts_do_what_their_tests_say(arguments: list[str]) -> None:
    ran = subprocess.run(["promtool", *arguments], cwd=DEPLOY, capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_alerts_that_are_tested_exist_as_they_are_described() -> None:
    rules = {rule["alert"]: rule for group in _yaml("alerts.yml")["groups"] for rule in group["rules"]}
    tested = [case for test in _yaml("alerts-test.yml")["tests"] for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in tested} <= set(rules)
    for case in tested:
        for expected in case["exp_alerts"]:
            rule = rules[case["alertname"]]
            assert expected["exp_labels"].items() >= rule["labels"].items()
            assert expected["exp_annotations"]["description"] == rule["annotations"]["description"]


def test_both_scrape_the_job_that_the_dashboard_selects() -> None:
    for name in ("prometheus.yml", "prometheus-tls.yml"):
        (job,) = _yaml(name)["scrape_configs"]
        assert job["job_name"] == "horizond"
    loopback = _yaml("prometheus.yml")["scrape_configs"][0]["static_configs"][0]["targets"]
    assert loopback == [Settings.model_fields["http"].default]


def test_grafana_knows_the_scrape_interval() -> None:
    source = _yaml("grafana/provisioning/datasources/prometheus.yml")["datasources"][0]
    intervals = {_yaml(name)["global"]["scrape_interval"] for name in ("prometheus.yml", "prometheus-tls.yml")}
    assert intervals == {source["jsonData"]["timeInterval"]}


def test_compose_mounts_what_exists_and_keeps_its_promises() -> None:
    services = _yaml("compose.yaml")["services"]
    assert set(services) == {"horizond", "prometheus", "grafana"}
    for service in services.values():
        for volume in service.get("volumes", []):
            source = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", volume).split(":")[0]
            assert not source.startswith(".") or source == "./secrets" or (DEPLOY / source).exists(), volume
        assert service["cap_drop"] == ["ALL"]
    assert services["horizond"]["ulimits"]["memlock"] == {"soft": -1, "hard": -1}
    (target,) = _yaml("prometheus-tls.yml")["scrape_configs"][0]["static_configs"][0]["targets"]
    assert target.split(":")[0] == services["horizond"]["hostname"]
    provider = _yaml("grafana/provisioning/dashboards/horizon.yml")["providers"][0]
    assert f"./dashboards:{provider['options']['path']}:ro" in services["grafana"]["volumes"]
    assert _yaml("compose.gpu.yaml")["services"].keys() == {"horizond"}


def test_compose_sets_what_the_daemon_reads_and_waits_for_its_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    service = _yaml("compose.yaml")["services"]["horizond"]
    for name, value in service["environment"].items():
        monkeypatch.setenv(name, re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value))
        assert name.removeprefix("HORIZOND_").lower() in Settings.model_fields
    settings = load_settings()
    assert settings.tls_names == ("localhost",)
    assert settings.model_roots == (Path("/models"),)
    assert settings.host_memory_reserve_bytes == load_settings(DEPLOY / "horizond.toml").host_memory_reserve_bytes
    assert int(service["stop_grace_period"].removesuffix("m")) * 60 > settings.drain_timeout_s


def test_the_example_environment_names_every_variable_of_compose() -> None:
    used = set(re.findall(r"\$\{(\w+)", (DEPLOY / "compose.yaml").read_text("utf-8")))
    named = set(re.findall(r"^(\w+)=", (DEPLOY / "env.example").read_text("utf-8"), re.MULTILINE))
    assert used == named - {"COMPOSE_FILE"}


def test_the_image_copies_what_exists_and_nothing_is_ignored_that_it_needs() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text("utf-8")
    kept = set(re.findall(r"^!(.+)$", (DEPLOY / "Dockerfile.dockerignore").read_text("utf-8"), re.MULTILINE))
    copied = [
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", dockerfile, re.MULTILINE)
        for source in line.split()[:-1]
    ]
    assert set(copied) == kept
    for source in copied:
        assert (ROOT / source).exists(), source
    for name in re.findall(r"(HORIZOND_\w+)=", dockerfile):
        assert name.removeprefix("HORIZOND_").lower() in Settings.model_fields
    assert "USER horizond" in dockerfile
    assert "HEALTHCHECK" in dockerfile


def test_the_unit_stops_slower_than_the_daemon_drains() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "horizond.service")
    service = unit["Service"]
    settings = load_settings(DEPLOY / "horizond.toml")
    assert int(service["TimeoutStopSec"]) > settings.drain_timeout_s
    assert (service["Type"], service["KillMode"]) == ("notify", "mixed")
    assert (service["LimitMEMLOCK"], service["OOMPolicy"]) == ("infinity", "continue")
    assert service["StateDirectory"] == "horizond"
    # Each of these would hide the GPU or stop the driver.
    for broken in ("PrivateDevices", "MemoryDenyWriteExecute", "ProtectProc", "DeviceAllow", "PrivateUsers"):
        assert broken not in service
    assert service["ExecStart"].split()[1:2] == ["serve"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_knows_every_directive(tmp_path: Path) -> None:
    unit = tmp_path / "horizond.service"
    text = (DEPLOY / "horizond.service").read_text("utf-8")
    unit.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.MULTILINE), "utf-8")
    ran = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False, timeout=60
    )
    assert "Unknown" not in ran.stderr, ran.stderr
    assert "Failed to parse" not in ran.stderr, ran.stderr

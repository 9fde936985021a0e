"""The deployment files parse, agree with each other and with the daemon; no container engine is needed."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from horizon_server.cli import horizond
from horizon_server.control_groups import DAEMON_GROUP
from horizon_server.settings import Settings, load_settings

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


def _yaml(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text("utf-8"))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian package prometheus)")
@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "config", "--syntax-only", "prometheus.yml"],
        ["check", "config", "--syntax-only", "prometheus-tls.yml"],
        ["check", "rules", "alerts.yml", "rules.yml"],
    ],
)
def test_promtool_accepts_the_prometheus_files(arguments: list[str]) -> None:
    ran = subprocess.run(["promtool", *arguments], cwd=DEPLOY, capture_output=True, text=True, check=False, timeout=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.skipif(shutil.which("amtool") is None, reason="needs amtool (Debian package prometheus-alertmanager)")
def test_amtool_accepts_the_receivers_and_routes_every_alert() -> None:
    def amtool(*arguments: str) -> str:
        command = ["amtool", *arguments]
        ran = subprocess.run(command, cwd=DEPLOY, capture_output=True, text=True, check=False, timeout=240)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    assert "3 receivers" in amtool("check-config", "alertmanager.yml")
    route = ("config", "routes", "test", "--config.file=alertmanager.yml")
    assert amtool(*route, "severity=critical", "alertname=HorizonDown").split() == ["slack,mail"]
    assert amtool(*route, "severity=warning", "alertname=HorizonDiskLow").split() == ["mail"]
    assert amtool(*route, "severity=warning", "alertname=HorizonJobFailed").split() == ["webhook"]


def test_both_scrape_the_job_that_boards_and_alerts_select() -> None:
    for name in ("prometheus.yml", "prometheus-tls.yml"):
        config = _yaml(name)
        assert config["scrape_configs"][0]["job_name"] == "horizond"
        assert config["rule_files"] == ["rules.yml", "alerts.yml"]
    loopback = _yaml("prometheus.yml")["scrape_configs"][0]["static_configs"][0]["targets"]
    assert loopback == [Settings.model_fields["http"].default]


def test_the_profiles_are_found_by_their_names_and_are_no_targets_while_they_are_off() -> None:
    services, config = _yaml("compose.yaml")["services"], _yaml("prometheus-tls.yml")
    optional = {service["profiles"][0]: name for name, service in services.items() if "profiles" in service}
    assert optional == {"alerting": "alertmanager", "node": "node-exporter", "gpu": "dcgm-exporter"}
    found = {job["job_name"]: job["dns_sd_configs"][0]["names"] for job in config["scrape_configs"][1:]}
    assert found == {"node": ["node-exporter"], "gpu": ["dcgm-exporter"]}
    (alerting,) = config["alerting"]["alertmanagers"]
    assert alerting["dns_sd_configs"][0]["names"] == ["alertmanager"]
    (mounted,) = [one for one in services["alertmanager"]["volumes"] if one.startswith("./secrets")]
    folder = mounted.split(":")[1]
    files = re.findall(r"_file: (\S+)", (DEPLOY / "alertmanager.yml").read_text("utf-8"))
    assert len(files) == 3 and all(file.startswith(f"{folder}/") for file in files)


def test_grafana_knows_the_scrape_interval() -> None:
    source = _yaml("grafana/provisioning/datasources/prometheus.yml")["datasources"][0]
    intervals = {_yaml(name)["global"]["scrape_interval"] for name in ("prometheus.yml", "prometheus-tls.yml")}
    assert intervals == {source["jsonData"]["timeInterval"]}


def test_compose_mounts_what_exists_and_keeps_its_promises() -> None:
    services = _yaml("compose.yaml")["services"]
    always = {name for name, service in services.items() if "profiles" not in service}
    assert always == {"horizond", "prometheus", "grafana"}
    for service in services.values():
        for volume in service.get("volumes", []):
            source = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", volume).split(":")[0]
            assert not source.startswith(".") or source == "./secrets" or (DEPLOY / source).exists(), volume
        assert service["cap_drop"] == ["ALL"]
        assert re.search(r":(v?\d+\.\d+\.\d+\S*|local)$", service["image"]), (
            "an image without a version changes by itself"
        )
    assert services["horizond"]["ulimits"]["memlock"] == {"soft": -1, "hard": -1}
    (target,) = _yaml("prometheus-tls.yml")["scrape_configs"][0]["static_configs"][0]["targets"]
    assert target.split(":")[0] == services["horizond"]["hostname"]
    provider = _yaml("grafana/provisioning/dashboards/horizon.yml")["providers"][0]
    assert f"./dashboards:{provider['options']['path']}:ro" in services["grafana"]["volumes"]
    home = Path(services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert home.parent == Path(provider["options"]["path"])
    assert (DEPLOY / "dashboards" / home.name).is_file()
    assert _yaml("compose.gpu.yaml")["services"].keys() == {"horizond"}


def test_compose_sets_what_the_daemon_reads_and_waits_for_its_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    service = _yaml("compose.yaml")["services"]["horizond"]
    for name, value in service["environment"].items():
        monkeypatch.setenv(name, re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value))
        assert name.removeprefix("HORIZOND_").lower() in Settings.model_fields
    settings = load_settings()
    # With an init the daemon is not process 1, and a stopped container takes its workers with it.
    assert service["init"] and settings.on_sigterm == "drain"
    assert settings.tls_names == ("localhost",)
    assert settings.model_roots == (Path("/models"),)
    assert settings.host_memory_reserve_bytes == load_settings(DEPLOY / "horizond.toml").host_memory_reserve_bytes
    assert int(service["stop_grace_period"].removesuffix("m")) * 60 > settings.drain_timeout_s


def test_the_example_environment_names_every_variable_of_compose() -> None:
    used = set(re.findall(r"\$\{(\w+)", (DEPLOY / "compose.yaml").read_text("utf-8")))
    named = set(re.findall(r"^(\w+)=", (DEPLOY / "env.example").read_text("utf-8"), re.MULTILINE))
    assert used == named - {"COMPOSE_FILE", "COMPOSE_PROFILES"}


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
    # Workers outlive the daemon.
    assert (service["Type"], service["KillMode"]) == ("notify", "process")
    assert "Environment=HORIZOND_ON_SIGTERM=leave" in (DEPLOY / "horizond.service").read_text("utf-8")
    assert (service["Delegate"], service["DelegateSubgroup"]) == ("cpu memory", DAEMON_GROUP)
    assert int(service["OOMScoreAdjust"]) < 0
    assert (service["LimitMEMLOCK"], service["OOMPolicy"]) == ("infinity", "continue")
    assert service["StateDirectory"] == "horizond"
    # Each of these would hide the GPU, stop the driver, or forbid groups of workers.
    for broken in (
        "PrivateDevices",
        "MemoryDenyWriteExecute",
        "ProtectProc",
        "DeviceAllow",
        "PrivateUsers",
        "ProtectControlGroups",
    ):
        assert broken not in service
    assert service["ExecStart"].split()[1:2] == ["serve"]


def test_a_further_node_has_the_limits_of_the_daemon_and_a_command_that_is_there() -> None:
    units = {}
    for name in ("horizond", "horizond-node"):
        units[name] = configparser.ConfigParser(strict=False, interpolation=None)
        units[name].read(DEPLOY / f"{name}.service")
    service, daemon = units["horizond-node"]["Service"], units["horizond"]["Service"]
    for same in ("LimitMEMLOCK", "OOMPolicy", "User", "StateDirectory", "RestrictAddressFamilies"):
        assert service[same] == daemon[same]
    assert units["horizond-node"]["Unit"]["Conflicts"] == "horizond.service"
    # Its ranks would inherit what protects the daemon alone.
    assert "OOMScoreAdjust" not in service
    command, group, name, *words = service["ExecStart"].split()
    assert command == daemon["ExecStart"].split()[0]
    found = horizond.commands[group]
    assert isinstance(found, click.Group)
    options = {option for parameter in found.commands[name].params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= options


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize(
    "name", ["horizond.service", "horizond-node.service", "horizond-backup.service", "horizond-backup.timer"]
)
def test_systemd_knows_every_directive(tmp_path: Path, name: str) -> None:
    # The timer wants its service next to it.
    for file in DEPLOY.glob("horizond*.service"):
        text = file.read_text("utf-8")
        (tmp_path / file.name).write_text(
            re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.MULTILINE), "utf-8"
        )
    unit = tmp_path / name
    if not unit.exists():
        shutil.copy(DEPLOY / name, unit)
    ran = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False, timeout=240
    )
    # The daemon does without the one that came with systemd 254.
    unknown = [line for line in ran.stderr.splitlines() if "Unknown" in line and "DelegateSubgroup" not in line]
    assert unknown == [], ran.stderr
    assert "Failed to parse" not in ran.stderr, ran.stderr


def test_a_stop_drains_only_when_the_machine_shuts_down(tmp_path: Path) -> None:
    """The unit's own ExecStop, with a `systemctl` that answers as at a stop and as at a shutdown."""
    (line,) = re.findall(
        r"^ExecStop=/bin/sh -c '(.*)'$", (DEPLOY / "horizond.service").read_text("utf-8"), re.MULTILINE
    )
    script = line.replace("$$", "$")
    systemctl = tmp_path / "systemctl"
    for answer in ("running", "stopping"):
        systemctl.write_text(f"#!/bin/sh\necho {answer}\nexit 1\n")
        systemctl.chmod(0o755)
        daemon = subprocess.Popen(
            ["/bin/sh", "-c", "trap 'echo interrupted; exit 0' INT; echo ready; while :; do sleep 0.05; done"],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert daemon.stdout is not None
            assert daemon.stdout.readline() == "ready\n"
            environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "MAINPID": str(daemon.pid)}
            # The shell of the test stands for systemd, which reaps its child.
            stopping = subprocess.Popen(["/bin/sh", "-c", script], env=environment)
            if answer == "stopping":
                assert daemon.stdout.readline() == "interrupted\n"
                assert daemon.wait(240) == 0
            assert stopping.wait(240) == 0
            assert (daemon.poll() is None) == (answer == "running")
        finally:
            daemon.kill()
            daemon.communicate(timeout=240)


def test_the_backup_unit_calls_the_command_as_it_is() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.read(DEPLOY / "horizond-backup.service")
    command, *words = unit["Service"]["ExecStart"].split()
    assert command == "/opt/horizon/bin/horizond"
    found = horizond.commands[words[0]]
    options = {option for parameter in found.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= options

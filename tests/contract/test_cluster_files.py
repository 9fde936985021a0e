"""The files for Kubernetes, Slurm, proxies and the release workflow are what their programs accept, and agree with the
daemon. No cluster and no container engine is needed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from horizon_server.settings import Settings, load_settings

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
OF_KUSTOMIZE = ("Kustomization", "Component")
OF_OTHERS = ("ServiceMonitor",)
"""Kinds that clusters learn from an operator."""


def _run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)


def _documents(text: str) -> Iterator[dict[str, Any]]:
    yield from (document for document in yaml.safe_load_all(text) if document)


def _resources() -> dict[str, dict[str, Any]]:
    """Return every resource of the folder by kind and name."""
    documents = [document for file in KUBERNETES.rglob("*.yaml") for document in _documents(file.read_text("utf-8"))]
    return {f"{one['kind']}/{one['metadata']['name']}": one for one in documents if one["kind"] not in OF_KUSTOMIZE}


def test_every_resource_is_valid_as_it_is_written() -> None:
    resources = {name: one for name, one in _resources().items() if one["kind"] not in OF_OTHERS}
    assert {"StatefulSet/horizond", "Service/horizond", "Service/horizond-lab"} < set(resources)
    for document in resources.values():
        kubernetes_validate.validate(document, "1.33", strict=True)
    pods = resources["StatefulSet/horizond"]["spec"]
    for service in (one for one in resources.values() if one["kind"] == "Service"):
        assert service["spec"]["selector"] == pods["selector"]["matchLabels"] == pods["template"]["metadata"]["labels"]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, whose kustomize joins the files")
@pytest.mark.parametrize("overlay", ["base", "gpu"])
def test_what_kustomize_makes_of_an_overlay_is_valid(overlay: str) -> None:
    built = _run("kubectl", "kustomize", str(KUBERNETES / overlay), KUBECONFIG=os.devnull)
    assert built.returncode == 0, built.stderr
    documents = list(_documents(built.stdout))
    for document in documents:
        kubernetes_validate.validate(document, "1.33", strict=True)
    (pods,) = (one["spec"]["template"]["spec"] for one in documents if one["kind"] == "StatefulSet")
    assert ("nvidia.com/gpu" in pods["containers"][0]["resources"]["limits"]) == (overlay == "gpu")


def test_every_kustomization_names_files_that_exist() -> None:
    for file in KUBERNETES.rglob("kustomization.yaml"):
        listed = yaml.safe_load(file.read_text("utf-8"))
        for name in (*listed.get("resources", []), *listed.get("components", [])):
            assert (file.parent / name).exists(), f"{file}: {name}"


def test_the_pod_drains_before_it_is_killed_and_has_no_privilege(monkeypatch: pytest.MonkeyPatch) -> None:
    kustomization = yaml.safe_load((KUBERNETES / "base" / "kustomization.yaml").read_text("utf-8"))
    literals = dict(one.split("=", 1) for one in kustomization["configMapGenerator"][0]["literals"])
    for name, value in literals.items():
        assert name.removeprefix("HORIZOND_").lower() in Settings.model_fields
        monkeypatch.setenv(name, value)
    settings = load_settings()
    pod = _resources()["StatefulSet/horizond"]["spec"]["template"]["spec"]
    assert settings.on_sigterm == "drain"
    assert pod["terminationGracePeriodSeconds"] > settings.drain_timeout_s
    # Something else than the daemon is process 1, and reaps.
    assert pod["shareProcessNamespace"] is True
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["securityContext"]["runAsNonRoot"] is True
    ids = set(re.findall(r"--[ug]id (\d+)", (DEPLOY / "Dockerfile").read_text("utf-8")))
    assert ids == {str(pod["securityContext"][name]) for name in ("runAsUser", "runAsGroup", "fsGroup")}
    assert {mount["mountPath"] for mount in container["volumeMounts"]} >= {"/var/lib/horizond", "/tmp"}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["scheme"] == "HTTPS"


def test_prometheus_finds_one_service_by_a_name_of_the_certificate() -> None:
    resources = _resources()
    monitor = resources["ServiceMonitor/horizond"]["spec"]
    (endpoint,) = monitor["endpoints"]
    (expression,) = monitor["selector"]["matchExpressions"]
    found = [one for one in resources.values() if expression["key"] in one["metadata"].get("labels", {})]
    assert [one["metadata"]["name"] for one in found] == ["horizond"]
    assert endpoint["port"] in [port["name"] for port in found[0]["spec"]["ports"]]
    kustomization = (KUBERNETES / "base" / "kustomization.yaml").read_text("utf-8")
    (names,) = re.findall(r"HORIZOND_TLS_NAMES=(\S+)", kustomization)
    assert endpoint["tlsConfig"]["serverName"] in names.split(",")
    secret = resources["Secret/horizond-scrape"]
    used = [endpoint["authorization"]["credentials"], endpoint["tlsConfig"]["ca"]["secret"]]
    assert all(one["name"] == secret["metadata"]["name"] and one["key"] in secret["stringData"] for one in used)
    prometheus = yaml.safe_load((DEPLOY / "prometheus-tls.yml").read_text("utf-8"))
    interval = prometheus["global"]["scrape_interval"]
    assert (endpoint["interval"], monitor["jobLabel"]) == (interval, "app.kubernetes.io/name")
    assert "horizond" in [scraping["job_name"] for scraping in prometheus["scrape_configs"]]


def test_the_script_for_slurm_sets_what_the_daemon_reads_and_drains_in_time() -> None:
    script = DEPLOY / "slurm" / "horizond.sbatch"
    assert _run("bash", "-n", str(script)).returncode == 0
    text = script.read_text("utf-8")
    for name in re.findall(r"HORIZOND_(\w+)=", text):
        assert name.lower() in Settings.model_fields
    (seconds,) = re.findall(r"^#SBATCH --signal=B:USR1@(\d+)$", text, re.MULTILINE)
    (drain,) = re.findall(r"HORIZON_DRAIN_S:-(\d+)", text)
    assert int(seconds) > int(drain) + 60, "Slurm's signal may come a minute later"
    if shutil.which("shellcheck"):
        checked = _run("shellcheck", str(script))
        assert checked.returncode == 0, checked.stdout


def _stub(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(("signal", "requeued"), [("USR1", True), ("TERM", False)])
def test_the_script_for_slurm_goes_back_to_the_queue_when_its_time_is_over(
    tmp_path: Path, signal: str, requeued: bool
) -> None:
    """The script itself, with a daemon and an scontrol that write down what they are asked."""
    state = tmp_path / "state"
    _stub(
        tmp_path / "horizond",
        f"""
if [ "$1" = serve ]; then
    trap 'echo drained > {tmp_path}/drained; exit 0' TERM
    echo '{{}}' > {state}/endpoints.json
    while :; do sleep 0.05; done
fi
if [ "$1" = token ]; then echo secret > "${{@: -1}}"; kill -{signal} $PPID; fi
""",
    )
    _stub(tmp_path / "scontrol", f'echo "$@" > {tmp_path}/scontrol.called')
    ran = _run(
        "bash",
        str(DEPLOY / "slurm" / "horizond.sbatch"),
        HORIZOND=str(tmp_path / "horizond"),
        HORIZON_STATE=str(state),
        SLURM_JOB_ID="7",
        USER="ada",
        PATH=f"{tmp_path}:{os.environ['PATH']}",
    )
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "drained").exists()
    assert "horizon login" in ran.stdout
    assert (tmp_path / "scontrol.called").exists() == requeued


def test_the_script_for_several_hosts_starts_a_node_on_each_other_one_and_the_daemon_here(tmp_path: Path) -> None:
    """The script itself, with stand-ins for the daemon, srun and ip: both hosts have the same address here."""
    script, state = DEPLOY / "slurm" / "horizond-nodes.sbatch", tmp_path / "state"
    for name in re.findall(r"HORIZOND_(\w+)=", script.read_text("utf-8")):
        assert name.lower() in Settings.model_fields
    if shutil.which("shellcheck"):
        checked = _run("shellcheck", "-x", "-P", str(script.parent), str(script))
        assert checked.returncode == 0, checked.stdout
    _stub(
        tmp_path / "horizond",
        f"""
echo "$1 $2: $HORIZOND_FLEET_ADDRESS ${{HORIZOND_NODES:-}} $HORIZOND_FLEET_KEY_FILE" >> {tmp_path}/called
if [ "$1 $2" = "node key" ]; then echo key > "$3"; fi
if [ "$1 $2" = "node serve" ]; then echo $$ > {tmp_path}/node; exec sleep 60 > /dev/null 2>&1; fi
if [ "$1" = serve ]; then
    trap 'exit 0' TERM
    while [ ! -s {tmp_path}/node ]; do sleep 0.05; done
    echo '{{}}' > {state}/endpoints.json
    while :; do sleep 0.05; done
fi
if [ "$1" = token ]; then echo secret > "${{@: -1}}"; kill -TERM $PPID; fi
""",
    )
    _stub(
        tmp_path / "srun",
        f'echo "$@" >> {tmp_path}/srun.called; while [[ "$1" == -* ]]; do shift; done; exec "$@"',
    )
    _stub(tmp_path / "ip", 'echo "2: ib0    inet 10.0.0.2/24 brd 10.0.0.255 scope global ib0"')
    try:
        ran = _run(
            "bash",
            str(script),
            HORIZOND=str(tmp_path / "horizond"),
            HORIZON_STATE=str(state),
            HORIZON_FLEET_KEY=str(tmp_path / "key"),
            HORIZON_SBATCH=str(script.with_name("horizond.sbatch")),
            SLURM_JOB_ID="7",
            SLURM_NNODES="3",
            SLURMD_NODENAME="host1",
            USER="ada",
            PATH=f"{tmp_path}:{os.environ['PATH']}",
        )
        assert ran.returncode == 0, ran.stderr
        called = (tmp_path / "called").read_text().splitlines()
        key = str(tmp_path / "key")
        assert called[0] == f"node key:   {key}"
        assert sorted(called[1:3]) == [f"node serve: 10.0.0.2  {key}", f"serve : 10.0.0.2 10.0.0.2:7173 {key}"]
        asked = (tmp_path / "srun.called").read_text()
        assert asked.count("--nodes=2 --ntasks=2 --ntasks-per-node=1") == asked.count("--exclude=host1") == 2
    finally:
        # Slurm ends the steps of a job with its script.
        if (tmp_path / "node").exists():
            os.kill(int((tmp_path / "node").read_text()), signal.SIGKILL)


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A folder with the certificate files that the proxies' configurations name."""
    made = _run(
        *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"),
        *("-subj", "/CN=gpubox.lab.edu", "-keyout", str(tmp_path / "server.key"), "-out", str(tmp_path / "server.pem")),
    )
    assert made.returncode == 0, made.stderr
    shutil.copy(tmp_path / "server.pem", tmp_path / "ca.pem")
    return tmp_path


@pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx (Debian package nginx-light)")
def test_nginx_accepts_its_configuration(certificate: Path) -> None:
    text = (DEPLOY / "proxy" / "nginx.conf").read_text("utf-8").replace("/etc/nginx/horizon", str(certificate))
    # A test does not run as root everywhere, and nginx opens its ports to check them.
    text = text.replace("443 ssl", "18443 ssl").replace(":80;", ":18080;").replace("listen 80;", "listen 18080;")
    folders = "".join(
        f"{name}_temp_path {certificate};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    whole = certificate / "nginx.conf"
    whole.write_text(
        f"pid {certificate}/pid;\nerror_log stderr;\nevents {{}}\nhttp {{\naccess_log off;\n{folders}{text}}}\n"
    )
    checked = _run("nginx", "-t", "-c", str(whole))
    assert checked.returncode == 0, checked.stderr
    assert "[warn]" not in checked.stderr.replace('[warn] the "user"', "")


@pytest.mark.skipif(shutil.which("caddy") is None, reason="needs caddy (Debian package of that name)")
def test_caddy_accepts_its_configuration(certificate: Path) -> None:
    text = (DEPLOY / "proxy" / "Caddyfile").read_text("utf-8").replace("/etc/caddy/horizon", str(certificate))
    whole = certificate / "Caddyfile"
    whole.write_text(text)
    checked = _run("caddy", "validate", "--adapter", "caddyfile", "--config", str(whole), HOME=str(certificate))
    assert checked.returncode == 0, checked.stderr


def test_workflows_follow_their_schema_and_take_actions_by_their_commit() -> None:
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    assert len(workflows) == 2
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    checked = _run(*command, *map(str, workflows))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    for file in workflows:
        used = re.findall(r"uses: (\S+)@(\S+)", file.read_text("utf-8"))
        moving = {name for name, at in used if not re.fullmatch(r"[0-9a-f]{40}", at)}
        assert moving <= {"pypa/gh-action-pypi-publish"}
        workflow = yaml.safe_load(file.read_text("utf-8"))
        assert workflow["permissions"] == {}, "each job names its own"

"""A metric has one name: in the code, on its page, in the dashboard and in the alerts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from horizon_server.figures import Metric
from horizon_server.telemetry.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
_ROW = re.compile(r"^\| `(?P<name>\w+)` \| (?P<kind>\w+) \| (?P<labels>[\w, ]*?) ?\| .+ \|$", re.MULTILINE)
_NAME = re.compile(r"\b(?:horizon|grpc_server|http_request|process)_\w+")
_SELECTOR_LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"")
_SUFFIXES = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}

# What was promised to users: a rename breaks dashboards that are not ours.
PROMISED = """
horizon_build_info{version} horizon_job_info{job_id,name,owner,project,model,dataset} horizon_disk_total_bytes{}
horizon_disk_free_bytes{}
horizon_tls_certificate_expiry_timestamp_seconds{}
horizon_jobs{state} horizon_job_queue_wait_seconds{} horizon_job_transitions_total{to,reason}
horizon_host_memory_bytes{job_id,component} horizon_host_memory_planned_bytes{job_id,component}
horizon_host_memory_limit_bytes{}
horizon_host_memory_available_bytes{} horizon_device_memory_bytes{job_id,device,component}
horizon_device_memory_planned_bytes{job_id,device,component} horizon_transfer_bytes_total{device,direction}
horizon_transfer_seconds_total{device,direction} horizon_transfer_exposed_seconds_total{device,direction}
horizon_transfer_overlap_ratio{job_id,direction} horizon_compute_seconds_total{device} horizon_optimizer_seconds_total{}
horizon_compute_launching_seconds_total{device}
horizon_optimizer_exposed_seconds_total{} horizon_tokens_total{project} horizon_tokens_per_second{job_id}
horizon_model_flops_utilization_ratio{job_id}
horizon_step_duration_seconds{} horizon_train_loss{job_id} horizon_eval_loss{job_id} horizon_grad_norm{job_id}
horizon_eval_set_loss{job_id,set} horizon_eval_set_accuracy{job_id,set} horizon_eval_set_exact_match{job_id,set}
horizon_method_figure{job_id,component}
horizon_learning_rate{job_id} horizon_job_progress_ratio{job_id} horizon_steps_skipped_total{reason}
horizon_worker_restarts_total{reason} horizon_checkpoint_duration_seconds{}
horizon_checkpoint_last_success_timestamp_seconds{job_id} horizon_upload_bytes_total{result}
horizon_gpu_seconds_total{project,user} horizon_webhook_deliveries_total{outcome}
grpc_server_handled_total{grpc_service,grpc_method,grpc_code}
grpc_server_handling_seconds{grpc_service,grpc_method} http_request_duration_seconds{method,route,code}
horizon_device_seconds_total{project,user,device} horizon_device_turns_total{device}
horizon_device_turn_wait_seconds{device}
horizon_device_handover_seconds{device} horizon_resident_jobs{device} horizon_job_share_ratio{job_id}
horizon_share_use_seconds{project,user} horizon_project_weight{project} horizon_user_weight{user}
horizon_turn_overruns_total{}
horizon_job_loading_since_timestamp_seconds{job_id,state}
horizon_jobs_displaced_total{} horizon_oldest_queued_timestamp_seconds{} horizon_host_memory_promised_bytes{}
horizon_node_open{}
"""


@pytest.fixture(scope="module")
def families() -> dict[str, Metric]:
    return {family.name: family for family in Metrics().families}


def _queryable(families: dict[str, Metric]) -> dict[str, Metric]:
    return {name + suffix: family for name, family in families.items() for suffix in _SUFFIXES[family.kind]}


def _dashboard() -> Any:
    return json.loads((ROOT / "deploy" / "dashboards" / "horizon.json").read_text("utf-8"))


def _expressions() -> list[str]:
    board = _dashboard()
    found = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    found += [variable["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    alerts = yaml.safe_load((ROOT / "deploy" / "alerts.yml").read_text("utf-8"))
    return found + [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]


def _grouped(expression: str) -> set[str]:
    return {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}


def test_every_promised_metric_is_there(families: dict[str, Metric]) -> None:
    promised = {
        name: tuple(filter(None, labels.split(","))) for name, labels in re.findall(r"(\w+)\{(.*?)\}", PROMISED)
    }
    assert promised == {name: family.labels for name, family in families.items()}


def test_the_registry_holds_what_was_declared(families: dict[str, Metric]) -> None:
    exposed = {metric.name + ("_total" if metric.type == "counter" else "") for metric in Metrics().registry.collect()}
    ours = {name for name in exposed if not name.startswith("process_")}
    assert ours == set(families)


def test_the_page_and_the_code_are_the_same(families: dict[str, Metric]) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    documented = {row["name"]: (row["kind"], row["labels"].replace(",", " ").split()) for row in _ROW.finditer(page)}
    assert documented == {name: (family.kind, list(family.labels)) for name, family in families.items()}


def test_every_name_in_dashboard_and_alerts_exists(families: dict[str, Metric]) -> None:
    known = {*_queryable(families), "process_resident_memory_bytes", "process_start_time_seconds"}
    expressions = _expressions()
    assert len(expressions) > 40
    for expression in expressions:
        names = set(_NAME.findall(expression))
        assert names or "up{" in expression, expression
        assert names <= known, expression


def test_every_label_in_dashboard_and_alerts_exists(families: dict[str, Metric]) -> None:
    queryable = _queryable(families)
    from_prometheus = {"job", "instance", "le"}
    for expression in _expressions():
        labels = {label for name in _NAME.findall(expression) if name in queryable for label in queryable[name].labels}
        assert _grouped(expression) | set(_SELECTOR_LABEL.findall(expression)) <= labels | from_prometheus, expression


def test_every_metric_is_on_the_dashboard(families: dict[str, Metric]) -> None:
    shown = {name for expression in _expressions() for name in _NAME.findall(expression)}
    unseen = {name for name, family in families.items() if not shown & {name + s for s in _SUFFIXES[family.kind]}}
    assert unseen == set()


def test_the_dashboard_hangs_together(families: dict[str, Metric]) -> None:
    board, queryable = _dashboard(), _queryable(families)
    identifiers = [panel["id"] for panel in board["panels"]]
    assert len(identifiers) == len(set(identifiers))
    assert [panel["title"] for panel in board["panels"] if panel["type"] == "row"] == [
        "Overview",
        "Sharing",
        "Memory",
        "Transfer",
        "Service",
    ]
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource", "the board must work in a Grafana that is there already"
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == "${datasource}", panel["title"]
            assert all('instance=~"$instance"' in one for one in re.findall(r"\{([^{}]*)\}", target["expr"])), panel[
                "title"
            ]
            kept = _grouped(target["expr"]) or {
                label
                for name in _NAME.findall(target["expr"])
                for label in queryable.get(name, families["horizon_jobs"]).labels
            }
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept, panel["title"]


def test_the_committed_dashboard_is_fresh() -> None:
    check = [sys.executable, str(ROOT / "tools" / "generate_dashboards.py"), "--check"]
    ran = subprocess.run(check, capture_output=True, text=True, check=False, timeout=240)
    assert ran.returncode == 0, ran.stderr

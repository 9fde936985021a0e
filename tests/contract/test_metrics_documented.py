"""A metric has one name: in the code, on its page, on the boards, in the rules and in the alerts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.boards import NAMES, board, queries, rules

from horizon_server.figures import Metric
from horizon_server.telemetry.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
_ROW = re.compile(r"^\| `(?P<name>\w+)` \| (?P<kind>\w+) \| (?P<labels>[\w, ]*?) ?\| .+ \|$", re.MULTILINE)
_NAME = re.compile(r"\b(?:horizon|grpc_server|http_request|process)_\w+")
_OF_THE_PROCESS = {
    "process_resident_memory_bytes",
    "process_start_time_seconds",
    "process_cpu_seconds_total",
    "process_open_fds",
    "process_max_fds",
}
# Of Prometheus itself, node_exporter and dcgm-exporter.
_OF_OTHERS = re.compile(r"\b(?:up|scrape_duration_seconds|node_\w+|DCGM_\w+)\{")
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
horizon_compute_launching_seconds_total{device} horizon_job_ranks{job_id} horizon_rank_wait_seconds_total{job_id,rank}
horizon_collective_bytes_total{device,kind,path} horizon_collective_seconds_total{device,kind,path}
horizon_collective_exposed_seconds_total{device,kind,path}
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
horizon_turn_overruns_total{} horizon_layer_compile_seconds_total{}
horizon_job_loading_since_timestamp_seconds{job_id,state}
horizon_drive_read_bytes_total{drive} horizon_drive_written_bytes_total{drive}
horizon_jobs_displaced_total{} horizon_oldest_queued_timestamp_seconds{} horizon_host_memory_promised_bytes{}
horizon_shared_base_bytes{} horizon_shared_base_jobs{}
horizon_node_open{} horizon_fleet_nodes{state} horizon_fleet_boxes{state}
horizon_job_attempt_start_timestamp_seconds{job_id,attempt} horizon_job_last_step_timestamp_seconds{job_id}
horizon_job_last_evaluation_timestamp_seconds{job_id} horizon_job_remaining_seconds{job_id}
horizon_jobs_ended_total{project,user,state} horizon_queued_jobs{project,user}
horizon_ended_job_timestamp_seconds{ended_job,name,user,project,state,reason} horizon_stored_bytes{user}
horizon_maintenance_start_timestamp_seconds{} horizon_maintenance_end_timestamp_seconds{} horizon_web_page_info{url}
horizon_gpu_info{device,name} horizon_gpu_up{device} horizon_gpu_utilization_ratio{device}
horizon_gpu_memory_used_bytes{device} horizon_gpu_memory_total_bytes{device} horizon_gpu_temperature_celsius{device}
horizon_gpu_temperature_limit_celsius{device} horizon_gpu_power_watts{device} horizon_gpu_power_limit_watts{device}
horizon_gpu_sm_clock_hertz{device} horizon_gpu_slowed{device} horizon_gpu_pcie_bytes_per_second{device,direction}
horizon_gpu_pcie_link_width{device} horizon_gpu_pcie_link_max_width{device} horizon_gpu_memory_errors{device}
"""


@pytest.fixture(scope="module")
def families() -> dict[str, Metric]:
    return {family.name: family for family in Metrics().families}


def _queryable(families: dict[str, Metric]) -> dict[str, Metric]:
    return {name + suffix: family for name, family in families.items() for suffix in _SUFFIXES[family.kind]}


def _expressions() -> list[str]:
    """Of boards, rules and alerts; what rules record stands for the expression that they record."""
    found = [query.expression for query in queries()] + [rule["expr"] for rule in rules("alerts.yml")]
    for rule in rules("rules.yml"):
        found = [re.sub(rf"{re.escape(rule['record'])}({{[^}}]*}})?", f"({rule['expr']})", one) for one in found]
    return found


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


def test_every_name_in_boards_rules_and_alerts_exists(families: dict[str, Metric]) -> None:
    known = {*_queryable(families), *_OF_THE_PROCESS}
    expressions = _expressions()
    assert len(expressions) > 150
    for expression in expressions:
        names = set(_NAME.findall(expression))
        assert names or _OF_OTHERS.search(expression), expression
        assert names <= known, expression


def test_every_label_in_boards_rules_and_alerts_exists(families: dict[str, Metric]) -> None:
    queryable = _queryable(families)
    from_prometheus = {"job", "instance", "le"}
    for expression in _expressions():
        if _OF_OTHERS.search(expression):
            continue
        labels = {label for name in _NAME.findall(expression) if name in queryable for label in queryable[name].labels}
        assert _grouped(expression) | set(_SELECTOR_LABEL.findall(expression)) <= labels | from_prometheus, expression


def test_every_metric_is_on_a_board(families: dict[str, Metric]) -> None:
    shown = {name for expression in _expressions() for name in _NAME.findall(expression)}
    unseen = {name for name, family in families.items() if not shown & {name + s for s in _SUFFIXES[family.kind]}}
    assert unseen == set()


@pytest.mark.parametrize("name", NAMES)
def test_a_board_hangs_together(name: str, families: dict[str, Metric]) -> None:
    shown, queryable = board(name), _queryable(families)
    panels = [panel for panel in shown["panels"] if panel["type"] != "row"]
    identifiers = [panel["id"] for panel in shown["panels"]]
    assert len(identifiers) == len(set(identifiers))
    assert (shown["uid"], shown["tags"]) == (f"horizon-{name}", ["horizon"])
    titles = [panel["title"] for panel in panels]
    assert len(titles) == len(set(titles)), "a title is the name that people use for a panel"
    variables = {variable["name"]: variable for variable in shown["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource", "the board must work in a Grafana that is there already"
    for panel in panels:
        text = panel["description"]
        assert re.fullmatch(r".+\n\nGood: .+\.", text, re.DOTALL), f"{panel['title']} does not say what is good: {text}"
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}", panel["title"]
            if _OF_OTHERS.search(target["expr"]) and not _NAME.search(target["expr"]):
                continue
            selectors = re.findall(r"\{([^{}]*)\}", target["expr"])
            assert all('instance=~"$instance"' in one for one in selectors), panel["title"]
    # Every variable that anything refers to is there, but for those that Grafana has itself.
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(shown))) - {"datasource"}
    assert used <= set(variables), used - set(variables)
    recorded = {rule["record"]: _grouped(rule["expr"]) | {"instance"} for rule in rules("rules.yml")}
    for query in queries():
        if query.where.startswith(f"{name} /") and query.kind != "variable" and _NAME.search(query.expression):
            names = [*_NAME.findall(query.expression), *(one for one in recorded if one in query.expression)]
            kept = _grouped(query.expression) or {"instance"}.union(
                *(recorded.get(one) or set(queryable[one].labels) for one in names if one in {*recorded, *queryable})
            )
            assert set(re.findall(r"\{\{(\w+)\}\}", query.legend)) <= kept, query.where


def test_the_boards_lead_to_each_other_and_to_the_web_page() -> None:
    for name in NAMES:
        links = {link["title"]: link for link in board(name)["links"]}
        assert (links["Boards"]["type"], links["Boards"]["tags"]) == ("dashboards", ["horizon"])
        assert any("${page}/" in link["url"] for link in links.values()), name
    assert "${page}/jobs/${job}" in [link["url"] for link in board("job")["links"]]
    tables = [panel for name in NAMES for panel in board(name)["panels"] if panel["type"] == "table"]
    assert len(tables) == 3
    for panel in tables:
        assert "${page}/jobs/${__data.fields." in json.dumps(panel["fieldConfig"]["overrides"]), panel["title"]
    (job,) = [variable for variable in board("job")["templating"]["list"] if variable["name"] == "job"]
    series = (
        'horizon_job_info{dataset="d",instance="a:1",job="horizond",job_id="job_1",model="m",name="sft",owner="ada"}'
    )
    found = re.search(job["regex"].strip("/").replace("(?<", "(?P<"), series)
    assert found and found.groupdict() == {"value": "job_1", "text": "sft"}


def test_the_committed_boards_are_fresh() -> None:
    check = [sys.executable, str(ROOT / "tools" / "generate_dashboards.py"), "--check"]
    ran = subprocess.run(check, capture_output=True, text=True, check=False, timeout=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr

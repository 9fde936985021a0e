"""What the Grafana dashboard shows: every chart with its expressions, by row. `generate_dashboards.py` makes the JSON
of it.

Every expression is written here once; the contract test compares the metrics in it with those that the code declares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

INSTANCE = 'instance=~"$instance"'
DAEMON = 'job="horizond"'
"""The scrape job: these names are shared with other programs, ours begin with horizon_."""
QUEUED = 'state="QUEUED"'
H2D = 'direction="h2d"'
FAILED = 'to="FAILED"'
RESIDENT = 'state=~"PREPARING|STARTING|RUNNING|STOPPING"'


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One panel: title, what it shows, unit, and (expression, legend) pairs. `width` is of 24 columns."""

    title: str
    text: str
    unit: str
    queries: Sequence[tuple[str, str]]
    width: int = 8
    height: int = 8
    kind: str = "lines"
    """lines, stacked, or number."""
    minimum: float | None = 0
    maximum: float | None = None


def select(metric: str, *matchers: str) -> str:
    """The series of a metric on the chosen nodes."""
    return f"{metric}{{{', '.join((INSTANCE, *matchers))}}}"


def _of_jobs(metric: str, *matchers: str) -> str:
    """The series of the chosen jobs, with the job's name and owner as labels."""
    chosen = select("horizon_job_info", 'name=~"$name"')
    return f"{select(metric, *matchers)} * on (instance, job_id) group_left (name, owner) {chosen}"


def _rate(counter: str, by: str = "", *matchers: str) -> str:
    grouped = f"sum by ({by}) " if by else "sum "
    return f"{grouped}(rate({select(counter, *matchers)}[$__rate_interval]))"


def _quantile(share: float, histogram: str, by: str = "", *matchers: str, window: str = "$__rate_interval") -> str:
    labels = f"le, {by}" if by else "le"
    return (
        f"histogram_quantile({share}, sum by ({labels}) (rate({select(histogram + '_bucket', *matchers)}[{window}])))"
    )


def _in_last_hour(counter: str, *matchers: str) -> str:
    return f"sum(increase({select(counter, *matchers)}[1h])) or vector(0)"


OLDEST = select("horizon_oldest_queued_timestamp_seconds")

OVERVIEW = (
    Chart(
        title="Resident",
        text="Jobs whose model is in host memory, or on its way there.",
        unit="short",
        width=4,
        height=4,
        kind="number",
        queries=[(f"sum({select('horizon_jobs', RESIDENT)})", "jobs")],
    ),
    Chart(
        title="Queued",
        text="Jobs that wait for memory.",
        unit="short",
        width=4,
        height=4,
        kind="number",
        queries=[(f"sum({select('horizon_jobs', QUEUED)})", "jobs")],
    ),
    Chart(
        title="Progress",
        text="Steps done of steps in all.",
        unit="percentunit",
        width=4,
        height=4,
        kind="number",
        maximum=1,
        queries=[(_of_jobs("horizon_job_progress_ratio"), "{{name}} ({{owner}})")],
    ),
    Chart(
        title="Loss",
        text="Train loss of the last step.",
        unit="short",
        width=4,
        height=4,
        kind="number",
        minimum=None,
        queries=[(_of_jobs("horizon_train_loss"), "{{name}} ({{owner}})")],
    ),
    Chart(
        title="Tokens per second",
        text="Real tokens per second in the last step.",
        unit="short",
        width=4,
        height=4,
        kind="number",
        queries=[(_of_jobs("horizon_tokens_per_second"), "{{name}} ({{owner}})")],
    ),
    Chart(
        title="Transfer overlap",
        text="Share of the host-to-device time that compute hid.",
        unit="percentunit",
        width=4,
        height=4,
        kind="number",
        maximum=1,
        queries=[(_of_jobs("horizon_transfer_overlap_ratio", H2D), "{{name}} ({{owner}})")],
    ),
    Chart(
        title="Loss over time",
        text="Token-weighted mean loss.",
        unit="short",
        width=12,
        minimum=None,
        queries=[
            (_of_jobs("horizon_train_loss"), "train {{name}} ({{owner}})"),
            (_of_jobs("horizon_eval_loss"), "eval {{name}} ({{owner}})"),
            (_of_jobs("horizon_eval_set_loss"), "{{set}} {{name}} ({{owner}})"),
        ],
    ),
    Chart(
        title="Evaluations",
        text="Token accuracy and exact match of each eval set.",
        unit="percentunit",
        width=12,
        minimum=0,
        maximum=1,
        queries=[
            (_of_jobs("horizon_eval_set_accuracy"), "accuracy {{set}} {{name}} ({{owner}})"),
            (_of_jobs("horizon_eval_set_exact_match"), "exact match {{set}} {{name}} ({{owner}})"),
        ],
    ),
    Chart(
        title="Tokens per second by project",
        text="Real tokens that were trained on.",
        unit="short",
        width=12,
        queries=[(_rate("horizon_tokens_total", "project"), "{{project}}")],
    ),
    Chart(
        title="Gradient norm",
        text="Global norm before clipping.",
        unit="short",
        queries=[(_of_jobs("horizon_grad_norm"), "{{name}} ({{owner}})")],
    ),
    Chart(
        title="Method figures",
        text="What jobs with a method other than cross-entropy report besides their loss, such as rewards/margins of "
        "dpo.",
        unit="short",
        minimum=None,
        queries=[(_of_jobs("horizon_method_figure"), "{{component}} {{name}} ({{owner}})")],
    ),
    Chart(
        title="Learning rate",
        text="As used in the last step.",
        unit="sci",
        queries=[(_of_jobs("horizon_learning_rate"), "{{name}} ({{owner}})")],
    ),
    Chart(
        title="Step duration",
        text="Optimizer steps of all jobs.",
        unit="s",
        queries=[
            (_quantile(0.5, "horizon_step_duration_seconds"), "p50"),
            (_quantile(0.95, "horizon_step_duration_seconds"), "p95"),
        ],
    ),
    Chart(
        title="Jobs by state",
        text="All jobs the daemon knows.",
        unit="short",
        kind="stacked",
        queries=[(f"sum by (state) ({select('horizon_jobs')})", "{{state}}")],
    ),
    Chart(
        title="Queue wait",
        text="From queued to the start of an attempt, over the last day.",
        unit="s",
        queries=[
            (_quantile(0.5, "horizon_job_queue_wait_seconds", window="1d"), "p50"),
            (_quantile(0.95, "horizon_job_queue_wait_seconds", window="1d"), "p95"),
        ],
    ),
    Chart(
        title="What went wrong",
        text="Skipped steps, workers started again and failed jobs in the last hour.",
        unit="short",
        queries=[
            (_in_last_hour("horizon_steps_skipped_total"), "skipped steps"),
            (_in_last_hour("horizon_worker_restarts_total"), "worker restarts"),
            (_in_last_hour("horizon_job_transitions_total", FAILED), "failed jobs"),
        ],
    ),
)

MEMORY = (
    Chart(
        title="Host memory in use",
        text="What the running job holds, by component.",
        unit="bytes",
        kind="stacked",
        queries=[(f"sum by (component) ({_of_jobs('horizon_host_memory_bytes')})", "{{component}}")],
    ),
    Chart(
        title="Host memory planned",
        text="What the plan gives the running job, by component.",
        unit="bytes",
        kind="stacked",
        queries=[(f"sum by (component) ({_of_jobs('horizon_host_memory_planned_bytes')})", "{{component}}")],
    ),
    Chart(
        title="Host memory against its limit",
        text="The limit is that of the machine or of the control group, whichever is lower.",
        unit="bytes",
        queries=[
            (f"sum({_of_jobs('horizon_host_memory_bytes')})", "in use"),
            (f"sum({_of_jobs('horizon_host_memory_planned_bytes')})", "planned"),
            (select("horizon_host_memory_limit_bytes"), "limit"),
            (select("horizon_host_memory_available_bytes"), "available"),
        ],
    ),
    Chart(
        title="Device memory in use",
        text="Peak of the last step, by component.",
        unit="bytes",
        kind="stacked",
        queries=[
            (f"sum by (device, component) ({_of_jobs('horizon_device_memory_bytes')})", "{{device}} {{component}}")
        ],
    ),
    Chart(
        title="Device memory planned",
        text="What the plan gives the running job, by component.",
        unit="bytes",
        kind="stacked",
        queries=[
            (
                f"sum by (device, component) ({_of_jobs('horizon_device_memory_planned_bytes')})",
                "{{device}} {{component}}",
            )
        ],
    ),
    Chart(
        title="Disk of the state folder",
        text="Checkpoints, datasets, models and the database.",
        unit="bytes",
        queries=[
            (select("horizon_disk_free_bytes"), "free"),
            (select("horizon_disk_total_bytes"), "total"),
        ],
    ),
    Chart(
        title="The daemon itself",
        text="Resident memory of the daemon's process, without workers.",
        unit="bytes",
        queries=[(select("process_resident_memory_bytes", DAEMON), "resident")],
    ),
)

TRANSFER = (
    Chart(
        title="Link throughput",
        text="Bytes over the link between host and device.",
        unit="Bps",
        queries=[(_rate("horizon_transfer_bytes_total", "device, direction"), "{{device}} {{direction}}")],
    ),
    Chart(
        title="Link busy and exposed",
        text="Share of the time the link worked, and share of the time compute stood idle for it.",
        unit="percentunit",
        queries=[
            (_rate("horizon_transfer_seconds_total", "device, direction"), "{{device}} {{direction}} busy"),
            (_rate("horizon_transfer_exposed_seconds_total", "device, direction"), "{{device}} {{direction}} exposed"),
        ],
    ),
    Chart(
        title="Transfer overlap over time",
        text="Share of the transfer time that compute hid, over the last steps; 1 is all of it.",
        unit="percentunit",
        maximum=1,
        queries=[(_of_jobs("horizon_transfer_overlap_ratio"), "{{name}} ({{owner}}) {{direction}}")],
    ),
    Chart(
        title="Compute",
        text="Share of the time the compute queue worked, and the model's own FLOPs of what the device's matrix "
        "products reach.",
        unit="percentunit",
        queries=[
            (_rate("horizon_compute_seconds_total", "device"), "{{device}} busy"),
            (_rate("horizon_compute_launching_seconds_total", "device"), "{{device}} busy while the host launches"),
            (_of_jobs("horizon_model_flops_utilization_ratio"), "{{name}} ({{owner}}) of peak"),
        ],
    ),
    Chart(
        title="Optimizer",
        text="Share of the time the optimizer worked, and of that what nothing hid.",
        unit="percentunit",
        queries=[
            (_rate("horizon_optimizer_seconds_total"), "busy"),
            (_rate("horizon_optimizer_exposed_seconds_total"), "exposed"),
        ],
    ),
    Chart(
        title="GPUs in use by project",
        text="GPU seconds of steps per second; 0 while jobs run on the host.",
        unit="short",
        queries=[(_rate("horizon_gpu_seconds_total", "project, user"), "{{project}} {{user}}")],
    ),
)

SERVICE = (
    Chart(
        title="gRPC calls",
        text="Finished calls by method and status.",
        unit="reqps",
        queries=[
            (
                _rate("grpc_server_handled_total", "grpc_service, grpc_method, grpc_code", DAEMON),
                "{{grpc_method}} {{grpc_code}}",
            )
        ],
    ),
    Chart(
        title="gRPC latency",
        text="p95; streams count until they end.",
        unit="s",
        queries=[
            (_quantile(0.95, "grpc_server_handling_seconds", "grpc_service, grpc_method", DAEMON), "{{grpc_method}}")
        ],
    ),
    Chart(
        title="HTTP requests",
        text="Finished requests by route and code.",
        unit="reqps",
        queries=[(_rate("http_request_duration_seconds_count", "route, code", DAEMON), "{{route}} {{code}}")],
    ),
    Chart(
        title="HTTP latency",
        text="p95; event streams count until they end.",
        unit="s",
        queries=[(_quantile(0.95, "http_request_duration_seconds", "route", DAEMON), "{{route}}")],
    ),
    Chart(
        title="Uploads",
        text="Bytes of upload calls by result.",
        unit="Bps",
        queries=[(_rate("horizon_upload_bytes_total", "result"), "{{result}}")],
    ),
    Chart(
        title="Webhooks",
        text="Attempts to deliver webhooks by outcome.",
        unit="ops",
        queries=[(_rate("horizon_webhook_deliveries_total", "outcome"), "{{outcome}}")],
    ),
    Chart(
        title="Certificate",
        text="Time until the TLS certificate ends; no data without TLS.",
        unit="s",
        minimum=None,
        queries=[
            (f"({select('horizon_tls_certificate_expiry_timestamp_seconds')} > 0) - time()", "ends in"),
        ],
    ),
    Chart(
        title="Checkpoints",
        text="Time to write one over the last hour, and age of the newest.",
        unit="s",
        queries=[
            (_quantile(0.95, "horizon_checkpoint_duration_seconds", window="1h"), "p95"),
            (f"time() - {_of_jobs('horizon_checkpoint_last_success_timestamp_seconds')}", "age {{name}} ({{owner}})"),
        ],
    ),
)

SHARING = (
    Chart(
        title="Device time by user",
        text="Seconds of turns per second; the sum of a device is the part of the time that it is held.",
        unit="percentunit",
        kind="stacked",
        queries=[
            (_rate("horizon_device_seconds_total", "project, user, device"), "{{user}} in {{project}} on {{device}}")
        ],
    ),
    Chart(
        title="Share of resident jobs",
        text="Part of its device's time that each resident job has.",
        unit="percentunit",
        kind="stacked",
        maximum=1,
        queries=[(_of_jobs("horizon_job_share_ratio"), "{{name}} ({{owner}})")],
    ),
    Chart(
        title="Use against weight",
        text="Decayed device seconds divided by the weight. The lowest is next; lines that meet have a fair share.",
        unit="s",
        queries=[
            (
                f"sum by (instance, project) ({select('horizon_share_use_seconds')})"
                f" / on (instance, project) {select('horizon_project_weight')}",
                "project {{project}}",
            ),
            (
                f"{select('horizon_share_use_seconds')}"
                f" / on (instance, user) group_left () {select('horizon_user_weight')}",
                "{{user}} in {{project}}",
            ),
        ],
    ),
    Chart(
        title="Wait for a turn",
        text="From a resident job's request for the device to its turn.",
        unit="s",
        queries=[
            (_quantile(0.5, "horizon_device_turn_wait_seconds", "device", window="1h"), "{{device}} p50"),
            (_quantile(0.95, "horizon_device_turn_wait_seconds", "device", window="1h"), "{{device}} p95"),
        ],
    ),
    Chart(
        title="Hand-over",
        text="How long the device was idle between two jobs.",
        unit="s",
        queries=[
            (_quantile(0.5, "horizon_device_handover_seconds", "device", window="1h"), "{{device}} p50"),
            (_quantile(0.95, "horizon_device_handover_seconds", "device", window="1h"), "{{device}} p95"),
        ],
    ),
    Chart(
        title="Turns",
        text="Turns that ended, per second.",
        unit="ops",
        queries=[(_rate("horizon_device_turns_total", "device"), "{{device}}")],
    ),
    Chart(
        title="Resident jobs by device",
        text="Jobs that share each device.",
        unit="short",
        kind="stacked",
        queries=[(select("horizon_resident_jobs"), "{{device}}")],
    ),
    Chart(
        title="Promised host memory",
        text="Planned memory of all resident jobs, against the limit of the machine or the control group.",
        unit="bytes",
        queries=[
            (select("horizon_host_memory_promised_bytes"), "promised"),
            (select("horizon_host_memory_limit_bytes"), "limit"),
        ],
    ),
    Chart(
        title="Longest wait, displaced jobs, overruns",
        text="How long the oldest queued job has waited; jobs that were unloaded and turns not given back in the last "
        "hour.",
        unit="short",
        queries=[
            (
                f"(time() - {OLDEST}) / 3600 and {OLDEST} > 0 or 0 * {OLDEST}",
                "hours waited",
            ),
            (_in_last_hour("horizon_jobs_displaced_total"), "displaced"),
            (_in_last_hour("horizon_turn_overruns_total"), "overruns"),
            (f"1 - {select('horizon_node_open')}", "node closed"),
        ],
    ),
)

ROWS = (("Overview", OVERVIEW), ("Sharing", SHARING), ("Memory", MEMORY), ("Transfer", TRANSFER), ("Service", SERVICE))

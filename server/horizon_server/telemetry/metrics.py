"""The daemon's metrics: fed with events, states and calls, rendered for Prometheus.

A figure of a step, an evaluation or a checkpoint declares its own metric, where it is defined; all others are in the table below. Names,
labels and units are the contract in docs/metrics.md.

Thread: called on the daemon's event loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, get_args, get_type_hints

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from horizon_server.events import CheckpointWritten, EvalDone, Payload, StepDone
from horizon_server.figures import Metric, QueueFigures, TransferFigures, overlap_ratio
from horizon_server.records.job import ON_DEVICE, JobRecord, JobState
from horizon_server.version import VERSION

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OVERLAP_WINDOW_STEPS = 20
"""The overlap ratio is taken over a job's last steps, at most this number."""

_WAIT_BUCKETS_S = (0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 12 * 3600.0, 86400.0, 3 * 86400.0)
_CALL_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 120.0)
_FAMILIES = (
    Metric("horizon_build_info", "1; the label says which version runs.", ("version",)),
    Metric("horizon_jobs", "Jobs by state.", ("state",)),
    Metric("horizon_job_transitions_total", "Changes of a job's state.", ("to", "reason")),
    Metric("horizon_job_queue_wait_seconds", "Time from queued to the start of an attempt.", buckets=_WAIT_BUCKETS_S),
    Metric("horizon_worker_restarts_total", "Workers that were started again for a job.", ("reason",)),
    Metric(
        "horizon_job_info",
        "1; the labels say what the job_id of the other series stands for.",
        ("job_id", "name", "owner", "project", "model", "dataset"),
    ),
    Metric("horizon_job_progress_ratio", "Steps done of steps in all, 0 to 1.", ("job_id",)),
    Metric(
        "horizon_model_flops_utilization_ratio",
        "The model's own FLOPs per second in the last step, of what the device's matrix products were measured to reach.",
        ("job_id",),
    ),
    Metric(
        "horizon_transfer_overlap_ratio",
        f"Share of the transfer time hidden by compute over the last {OVERLAP_WINDOW_STEPS} steps; 1 is fully hidden.",
        ("job_id", "direction"),
    ),
    Metric(
        "horizon_host_memory_planned_bytes",
        "Host memory the plan gives a running job, by component.",
        ("job_id", "component"),
    ),
    Metric(
        "horizon_device_memory_planned_bytes",
        "Device memory the plan gives a running job, by component.",
        ("job_id", "device", "component"),
    ),
    Metric(
        "horizon_checkpoint_last_success_timestamp_seconds",
        "Unix time of the job's newest complete checkpoint.",
        ("job_id",),
    ),
    Metric("horizon_gpu_seconds_total", "Seconds of steps and evaluations that ran on a GPU.", ("project", "user")),
    Metric("horizon_host_memory_limit_bytes", "Host memory of the machine, or of the control group where lower."),
    Metric("horizon_host_memory_available_bytes", "Host memory that is free for jobs now."),
    Metric("horizon_disk_total_bytes", "Size of the disk of the state folder."),
    Metric("horizon_disk_free_bytes", "Free bytes on the disk of the state folder."),
    Metric(
        "horizon_tls_certificate_expiry_timestamp_seconds", "Unix time when the TLS certificate ends; 0 without TLS."
    ),
    Metric("horizon_upload_bytes_total", "Bytes of upload calls by result.", ("result",)),
    Metric("grpc_server_handled_total", "Finished gRPC calls.", ("grpc_service", "grpc_method", "grpc_code")),
    Metric(
        "grpc_server_handling_seconds",
        "Duration of gRPC calls; of a stream, until it ended.",
        ("grpc_service", "grpc_method"),
        _CALL_BUCKETS_S,
    ),
    Metric(
        "http_request_duration_seconds",
        "Duration of HTTP requests; of an event stream, until it ended.",
        ("method", "route", "code"),
        _CALL_BUCKETS_S,
    ),
)
_SHOWN = {
    kind: {
        name: one
        for name, hint in get_type_hints(kind, include_extras=True).items()
        for one in get_args(hint)[1:]
        if isinstance(one, Metric)
    }
    for kind in (TransferFigures, StepDone, EvalDone, CheckpointWritten)
}
"""Of the records that name metrics: field to metric."""
_HTTP_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Metrics:
    """Everything `/metrics` shows. Series with a job_id exist only while that job has its turn on the device.

    Args:
        version: shown in horizon_build_info.
        clock: Unix seconds; a port for tests.
    """

    def __init__(self, *, version: str = VERSION, clock: Callable[[], float] = time.time) -> None:
        # Else every counter has one more series, which nobody queries.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        # One of its own: the library's global registry would be shared by all daemons of a process, as tests have them.
        self.registry = CollectorRegistry(auto_describe=False)
        self._collectors: dict[str, Any] = {}
        # Each once, though a step and an evaluation share the figures of the queues.
        self.families = tuple(dict.fromkeys([m for shown in _SHOWN.values() for m in shown.values()] + [*_FAMILIES]))
        for metric in self.families:
            kind: Any = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}[metric.kind]
            more = {"buckets": metric.buckets} if metric.buckets else {}
            self._collectors[metric.name] = kind(
                metric.name, metric.help, metric.labels, registry=self.registry, **more
            )
        ProcessCollector(registry=self.registry)
        self._clock = clock
        self._queued_s: dict[str, float] = {}
        self._last_steps: dict[str, deque[StepDone]] = {}
        self._series("horizon_build_info", version=version).set(1)
        for result in ("stored", "partial", "refused", "cut"):
            # A rate sees the first bytes only when the series was there before them.
            self._series("horizon_upload_bytes_total", result=result)
        self.set_jobs({})

    def on_payload(self, job: JobRecord, payload: Payload) -> None:
        """Take one stored event of a job in; `job` as it is after the event."""
        # An attempt's last events may be stored after the job has left the device: they count, but bring no series back.
        shown = job.job_state in ON_DEVICE
        device, project = _device_of(job), _project_of(job)
        self._take(payload, {"device": device, "project": project} | ({"job_id": job.job_id} if shown else {}))
        if isinstance(payload, StepDone | EvalDone):
            gpu_s = 0.0 if device == "host" else max(0.0, payload.duration_s)
            self._series("horizon_gpu_seconds_total", project=project, user=job.owner).inc(gpu_s)
        if shown and isinstance(payload, StepDone):
            self._show_step(job, payload)
        elif shown and isinstance(payload, CheckpointWritten):
            series = self._series("horizon_checkpoint_last_success_timestamp_seconds", job_id=job.job_id)
            series.set(self._clock())

    def on_job_state(self, job: JobRecord, old: str | None) -> None:
        """Take a change of state in; `old` is None for a job just submitted, and `job` holds the new state."""
        state = job.job_state
        self._series("horizon_job_transitions_total", to=state.value, reason=job.reason).inc()
        if old is not None:
            self._series("horizon_jobs", state=old).dec()
        self._series("horizon_jobs", state=state.value).inc()
        if state is JobState.QUEUED:
            self._queued_s[job.job_id] = self._clock()
        elif old == JobState.QUEUED:
            # After a restart of the daemon only a first attempt's wait is known.
            queued_s = self._queued_s.pop(job.job_id, job.created_s if job.attempt <= 1 else 0.0)
            if state in ON_DEVICE and queued_s > 0.0:
                self._series("horizon_job_queue_wait_seconds").observe(max(0.0, self._clock() - queued_s))
        if state in ON_DEVICE:
            names = {"name": job.spec.name, "model": job.spec.model, "dataset": job.spec.dataset}
            project = _project_of(job)
            self._series("horizon_job_info", job_id=job.job_id, owner=job.owner, project=project, **names).set(1)
            self._show_progress(job, job.step, job.num_steps)
        else:
            # Prometheus would otherwise keep one more set of series for every job that ever ran.
            for metric in self.families:
                if "job_id" in metric.labels:
                    self._collectors[metric.name].remove_by_labels({"job_id": job.job_id})
            self._last_steps.pop(job.job_id, None)

    def set_jobs(self, counts: Mapping[str, int]) -> None:
        """Show the number of jobs in each state, from which `on_job_state` counts on; states that are not named have none."""
        for state in JobState:
            self._series("horizon_jobs", state=state.value).set(counts.get(state.value, 0))

    def set_disk(self, total_bytes: int, free_bytes: int) -> None:
        """Show the disk of the state folder."""
        self._series("horizon_disk_total_bytes").set(total_bytes)
        self._series("horizon_disk_free_bytes").set(free_bytes)

    def set_certificate_expiry(self, expires_s: float) -> None:
        """Show when the TLS certificate ends; 0 without TLS."""
        self._series("horizon_tls_certificate_expiry_timestamp_seconds").set(expires_s)

    def set_host_memory(self, limit_bytes: int, available_bytes: int) -> None:
        """Show the node's memory: the limit of machine or control group, and what is free now."""
        self._series("horizon_host_memory_limit_bytes").set(limit_bytes)
        self._series("horizon_host_memory_available_bytes").set(available_bytes)

    def on_worker_restart(self, reason: str) -> None:
        """Count a worker that was started again for a job."""
        self._series("horizon_worker_restarts_total", reason=reason).inc()

    def on_upload(self, num_bytes: int, result: str) -> None:
        """Count the bytes of an upload call under its result."""
        self._series("horizon_upload_bytes_total", result=result).inc(num_bytes)

    def on_grpc(self, service: str, method: str, code: str, seconds: float) -> None:
        """Count one finished gRPC call; `code` is the status name, such as OK."""
        labels = {"grpc_service": service, "grpc_method": method}
        self._series("grpc_server_handled_total", **labels, grpc_code=code).inc()
        self._series("grpc_server_handling_seconds", **labels).observe(seconds)

    def on_http(self, method: str, route: str, code: int | str, seconds: float) -> None:
        """Count one finished HTTP request; `route` is the template, never the path, so that series stay bounded."""
        # A client may send any word as the method.
        known = method if method in _HTTP_METHODS else "other"
        self._series("http_request_duration_seconds", method=known, route=route, code=str(code)).observe(seconds)

    def render(self) -> tuple[bytes, str]:
        """Return the exposition and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE

    def _take(self, figures: Any, labels: Mapping[str, str]) -> None:
        """Count or show every figure that declares a metric; without a job_id in `labels`, only those that need none."""
        if isinstance(figures, QueueFigures):
            for direction in ("h2d", "d2h"):
                self._take(getattr(figures, direction), {**labels, "direction": direction})
        for field, metric in _SHOWN.get(type(figures), {}).items():
            if "job_id" in metric.labels and "job_id" not in labels:
                continue
            value = getattr(figures, field)
            own = {name: labels[name] for name in metric.labels if name in labels}
            if isinstance(value, Mapping):
                self._set_components(metric.name, value, own)
            elif isinstance(value, str):
                if value:
                    self._series(metric.name, reason=value).inc()
            elif metric.kind == "counter":
                # A counter raises on a negative number, and nothing has checked what the worker measured.
                self._series(metric.name, **own).inc(max(0, value))
            elif metric.kind == "histogram":
                self._series(metric.name, **own).observe(value)
            else:
                self._series(metric.name, **own).set(value)

    def _show_step(self, job: JobRecord, step: StepDone) -> None:
        last_steps = self._last_steps.setdefault(job.job_id, deque(maxlen=OVERLAP_WINDOW_STEPS))
        last_steps.append(step)
        for direction in ("h2d", "d2h"):
            ratio = overlap_ratio(getattr(last, direction) for last in last_steps)
            self._series("horizon_transfer_overlap_ratio", job_id=job.job_id, direction=direction).set(ratio)
        if job.plan is not None and job.plan.prediction is not None and step.duration_s > 0:
            utilization = step.model_flops / step.duration_s / job.plan.prediction.peak_flops_per_s
            self._series("horizon_model_flops_utilization_ratio", job_id=job.job_id).set(utilization)
        self._show_progress(job, step.step, step.num_steps)

    def _show_progress(self, job: JobRecord, step: int, num_steps: int) -> None:
        """Show how far a job is, and the memory that its plan gives it."""
        own = {"job_id": job.job_id}
        if num_steps > 0:  # 0 is not known yet
            self._series("horizon_job_progress_ratio", **own).set(min(1.0, step / num_steps))
        if job.plan is not None:
            self._set_components("horizon_host_memory_planned_bytes", job.plan.host_bytes, own)
            own["device"] = _device_of(job)
            self._set_components("horizon_device_memory_planned_bytes", job.plan.device_bytes, own)

    def _set_components(self, name: str, values: Mapping[str, float], labels: dict[str, str]) -> None:
        """Set one series for each component; components that are gone from `values` lose theirs."""
        self._collectors[name].remove_by_labels(labels)
        for component, value in values.items():
            self._series(name, **labels, component=component).set(value)

    def _series(self, metric: str, /, **labels: str) -> Any:
        collector = self._collectors[metric]
        return collector.labels(**labels) if labels else collector


def _device_of(job: JobRecord) -> str:
    """Return the `device` label of a job: host, or cuda:N. A plan that says cuda without a number means the first."""
    device = job.plan.device if job.plan else "host"
    return "cuda:0" if device == "cuda" else device


def _project_of(job: JobRecord) -> str:
    """Return the project to charge: the spec's, which the service fills in, else the owner."""
    return job.spec.project or job.owner

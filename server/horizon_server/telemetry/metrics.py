"""The daemon's metrics: fed with events, states and calls, rendered for Prometheus.

Owns one registry; nothing is global. Names, labels and units are the contract in docs/metrics.md.

Thread: called on the daemon's event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from horizon_server.events import CheckpointWritten, EvalDone, Payload, StepDone
from horizon_server.records.job import ON_DEVICE, JobRecord, JobState
from horizon_server.telemetry.families import Families, Family
from horizon_server.telemetry.step_metrics import MemoryMetrics, TrainingMetrics, TransferMetrics, project_of
from horizon_server.version import VERSION

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_WAIT_BUCKETS_S = (0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 12 * 3600.0, 86400.0, 3 * 86400.0)
_CALL_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 120.0)
_UPLOAD_RESULTS = ("stored", "partial", "refused", "cut")
_HTTP_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Metrics:
    """Everything `/metrics` shows. Series with a job_id exist only while that job has its turn on the device.

    Args:
        version: shown in horizon_build_info.
        clock: Unix seconds; a port for tests.
    """

    def __init__(self, *, version: str = VERSION, clock: Callable[[], float] = time.time) -> None:
        self._families = Families()
        self._clock = clock
        self._queued_s: dict[str, float] = {}
        self._memory = MemoryMetrics(self._families)
        self._transfer = TransferMetrics(self._families)
        self._training = TrainingMetrics(self._families)
        self._declare_jobs()
        self._declare_node()
        self._declare_service()
        self._families.gauge("horizon_build_info", ["version"], "1; the label says which version runs.").labels(
            version
        ).set(1)
        ProcessCollector(registry=self._families.registry)
        self.set_jobs({})

    @property
    def families(self) -> tuple[Family, ...]:
        """Every declared family, for the documentation and dashboard checks."""
        return tuple(self._families.declared)

    @property
    def registry(self) -> CollectorRegistry:
        """The registry behind `render`."""
        return self._families.registry

    def on_payload(self, job: JobRecord, payload: Payload) -> None:
        """Take one stored event of a job in; `job` as it stands after the event."""
        shown = job.job_state in ON_DEVICE
        if isinstance(payload, StepDone):
            self._transfer.on_step(job, payload, shown=shown)
            self._training.on_step(job, payload, shown=shown)
            if shown:
                self._memory.used(job, payload)
                if job.plan is not None:
                    self._memory.planned(job, job.plan)
        elif isinstance(payload, CheckpointWritten):
            self._training.on_checkpoint(job, payload, self._clock(), shown=shown)
        elif isinstance(payload, EvalDone):
            self._transfer.on_eval(job, payload)
            self._training.on_eval(job, payload, shown=shown)

    def on_job_state(self, job: JobRecord, old: str | None) -> None:
        """Take a change of state in; `old` is None for a job just submitted, and `job` holds the new state."""
        self._transitions.labels(job.job_state.value, job.reason).inc()
        if old is not None:
            self._jobs.labels(old).dec()
        self._jobs.labels(job.job_state.value).inc()
        if job.job_state is JobState.QUEUED:
            self._queued_s[job.job_id] = self._clock()
        elif old == JobState.QUEUED:
            # After a restart of the daemon only a first attempt's wait is known.
            queued_s = self._queued_s.pop(job.job_id, job.created_s if job.attempt <= 1 else 0.0)
            if job.job_state in ON_DEVICE and queued_s > 0.0:
                self._wait.observe(max(0.0, self._clock() - queued_s))
        if job.job_state in ON_DEVICE:
            spec = job.spec
            self._info.set(job.job_id, spec.name, job.owner, project_of(job), spec.model, spec.dataset, value=1)
            self._training.progress(job.job_id, job.step, job.num_steps)
            if job.plan is not None:
                self._memory.planned(job, job.plan)
        else:
            self._families.drop_job(job.job_id)
            self._transfer.drop(job.job_id)

    def set_jobs(self, counts: Mapping[str, int]) -> None:
        """Show the number of jobs in each state, from which `on_job_state` counts on; states that are not named have none."""
        for job_state in JobState:
            self._jobs.labels(job_state.value).set(counts.get(job_state.value, 0))

    def set_disk(self, total_bytes: int, free_bytes: int) -> None:
        """Show the disk of the state folder."""
        self._disk_total.set(total_bytes)
        self._disk_free.set(free_bytes)

    def set_certificate_expiry(self, expires_s: float) -> None:
        """Show when the TLS certificate ends; 0 without TLS."""
        self._certificate.set(expires_s)

    def set_host_memory(self, limit_bytes: int, available_bytes: int) -> None:
        """Show the node's memory: the limit of machine or control group, and what is free now."""
        self._limit.set(limit_bytes)
        self._available.set(available_bytes)

    def on_worker_restart(self, reason: str) -> None:
        """Count a worker that was started again for a job."""
        self._restarts.labels(reason).inc()

    def on_upload(self, num_bytes: int, result: str) -> None:
        """Count the bytes of an upload call under its result."""
        self._uploads.labels(result).inc(num_bytes)

    def on_grpc(self, service: str, method: str, code: str, seconds: float) -> None:
        """Count one finished gRPC call; `code` is the status name, such as OK."""
        self._grpc_handled.labels(service, method, code).inc()
        self._grpc_handling.labels(service, method).observe(seconds)

    def on_http(self, method: str, route: str, code: int | str, seconds: float) -> None:
        """Count one finished HTTP request; `route` is the template, never the path, so that series stay bounded."""
        known = method if method in _HTTP_METHODS else "other"
        self._http.labels(known, route, str(code)).observe(seconds)

    def render(self) -> tuple[bytes, str]:
        """Return the exposition and its content type."""
        return generate_latest(self._families.registry), CONTENT_TYPE

    def _declare_jobs(self) -> None:
        families = self._families
        self._jobs = families.gauge("horizon_jobs", ["state"], "Jobs by state.")
        self._transitions = families.counter(
            "horizon_job_transitions_total", ["to", "reason"], "Changes of a job's state."
        )
        self._wait = families.histogram(
            "horizon_job_queue_wait_seconds", [], "Time from queued to the start of an attempt.", _WAIT_BUCKETS_S
        )
        self._restarts = families.counter(
            "horizon_worker_restarts_total", ["reason"], "Workers that were started again for a job."
        )
        self._info = families.job_gauge(
            "horizon_job_info",
            ["name", "owner", "project", "model", "dataset"],
            "1; the labels say what the job_id of the other series stands for.",
        )

    def _declare_node(self) -> None:
        families = self._families
        self._limit = families.gauge(
            "horizon_host_memory_limit_bytes", [], "Host memory of the machine, or of the control group where lower."
        )
        self._available = families.gauge(
            "horizon_host_memory_available_bytes", [], "Host memory that is free for jobs now."
        )
        self._disk_total = families.gauge("horizon_disk_total_bytes", [], "Size of the disk of the state folder.")
        self._disk_free = families.gauge("horizon_disk_free_bytes", [], "Free bytes on the disk of the state folder.")
        self._certificate = families.gauge(
            "horizon_tls_certificate_expiry_timestamp_seconds",
            [],
            "Unix time when the TLS certificate ends; 0 without TLS.",
        )

    def _declare_service(self) -> None:
        families = self._families
        self._uploads = families.counter("horizon_upload_bytes_total", ["result"], "Bytes of upload calls by result.")
        for result in _UPLOAD_RESULTS:
            self._uploads.labels(result)  # a rate sees the first bytes only when the series was there before them
        self._grpc_handled = families.counter(
            "grpc_server_handled_total", ["grpc_service", "grpc_method", "grpc_code"], "Finished gRPC calls."
        )
        self._grpc_handling = families.histogram(
            "grpc_server_handling_seconds",
            ["grpc_service", "grpc_method"],
            "Duration of gRPC calls; of a stream, until it ended.",
            _CALL_BUCKETS_S,
        )
        self._http = families.histogram(
            "http_request_duration_seconds",
            ["method", "route", "code"],
            "Duration of HTTP requests; of an event stream, until it ended.",
            _CALL_BUCKETS_S,
        )

"""The daemon's metrics: fed with events, states and calls, rendered for Prometheus.

A figure of a step, an evaluation, a checkpoint or a GPU declares its own metric, where it is defined; all others are in
`telemetry.families`. Names, labels and units are the contract in docs/metrics.md.

Thread: called on the daemon's event loop.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args, get_type_hints

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)

from horizon_server.events import CheckpointWritten, EvalDone, Payload, StepDone, kind_of
from horizon_server.figures import (
    CollectiveFigures,
    DriveFigures,
    EvalSetFigures,
    Metric,
    QueueFigures,
    RankFigures,
    TransferFigures,
    overlap_ratio,
)
from horizon_server.records.job import ENDED, RESIDENT, JobRecord, JobState
from horizon_server.records.sharing import Allowance, Holder, ShareUse
from horizon_server.telemetry.exposition import CONTENT_TYPE, exposition
from horizon_server.telemetry.families import FAMILIES, NEWEST_ENDED, OVERLAP_WINDOW_STEPS
from horizon_server.telemetry.gpus import GpuFigures
from horizon_server.version import VERSION

Shows = Callable[[Mapping[str, str], Mapping[str, tuple[str, str]]], bool]
"""Whether a series is shown: gets its labels, and owner and project of the resident jobs by id."""
DISPLACED = "DISPLACED"
"""Reason of a job that was unloaded to make room for another, and queued again."""

_LOADING = (JobState.PREPARING, JobState.STARTING)
_SHOWN = {
    kind: {
        name: one
        for name, hint in get_type_hints(kind, include_extras=True).items()
        for one in get_args(hint)[1:]
        if isinstance(one, Metric)
    }
    for kind in (
        TransferFigures,
        CollectiveFigures,
        RankFigures,
        DriveFigures,
        StepDone,
        EvalSetFigures,
        EvalDone,
        CheckpointWritten,
        GpuFigures,
    )
}
"""Of the records that name metrics: field to metric."""
LAST_TIMES = {
    "step": "horizon_job_last_step_timestamp_seconds",
    "eval": "horizon_job_last_evaluation_timestamp_seconds",
    "checkpoint": "horizon_checkpoint_last_success_timestamp_seconds",
}
"""Metrics that say when something was done last, by the kind of its event."""
_HTTP_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Metrics:
    """Everything `/metrics` shows. Series with a job_id exist only while that job is resident.

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
        # By service, method and code, of which there are few: finding a series by its labels takes longer than
        # counting.
        self._grpc_series: dict[tuple[str, str, str], tuple[Any, Any]] = {}
        # Each once, though a step and an evaluation share the figures of the queues.
        self.families = tuple(dict.fromkeys([m for shown in _SHOWN.values() for m in shown.values()] + [*FAMILIES]))
        for metric in self.families:
            kind: Any = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}[metric.kind]
            more = {"buckets": metric.buckets} if metric.buckets else {}
            self._collectors[metric.name] = kind(
                metric.name, metric.help, metric.labels, registry=self.registry, **more
            )
        ProcessCollector(registry=self.registry)
        self._clock = clock
        self._queued: dict[str, JobRecord] = {}
        self._queued_of: Tally[tuple[str, str]] = Tally()
        self._ended: OrderedDict[str, tuple[str, ...]] = OrderedDict()
        self._owners: dict[str, tuple[str, str]] = {}
        self._last_steps: dict[str, deque[StepDone]] = {}
        self._series("horizon_build_info", version=version).set(1)
        for result in ("stored", "partial", "refused", "cut"):
            # A rate sees the first bytes only when the series was there before them.
            self._series("horizon_upload_bytes_total", result=result)
        for outcome in ("delivered", "retried", "failed", "dropped"):
            self._series("horizon_webhook_deliveries_total", outcome=outcome)
        self._series("horizon_oldest_queued_timestamp_seconds").set_function(
            lambda: min((job.queued_s for job in self._queued.values()), default=0.0)
        )
        self.set_jobs({})
        self.set_node_open(True)
        self.set_maintenance(0.0, 0.0)

    def on_payload(self, job: JobRecord, payload: Payload) -> None:
        """Take one stored event of a job in; `job` as it is after the event."""
        # An attempt's last events may be stored after the job has left the device: they count, but bring no series
        # back.
        shown = job.job_state in RESIDENT
        device, project = _device_of(job), _project_of(job)
        self._take(payload, {"device": device, "project": project} | ({"job_id": job.job_id} if shown else {}))
        if shown and isinstance(payload, EvalDone):
            self._show_sets(job, payload)
        if isinstance(payload, StepDone | EvalDone):
            num_gpus = 0 if job.plan is None or job.plan.is_on_host else len(job.plan.devices)
            gpu_s = num_gpus * max(0.0, payload.duration_s)
            self._series("horizon_gpu_seconds_total", project=project, user=job.owner).inc(gpu_s)
        if isinstance(payload, StepDone):
            self._count_ranks(job, payload, {"job_id": job.job_id} if shown else {})
            self._count_drives(job, payload)
        if shown and isinstance(payload, StepDone):
            self._show_step(job, payload)
        if shown and (last := LAST_TIMES.get(kind_of(payload))):
            self._series(last, job_id=job.job_id).set(self._clock())

    def take_over(self, job: JobRecord, times_s: Mapping[str, float]) -> None:
        """Show a resident job of an earlier daemon as that one did.

        Its counters begin with what is reported from now on.

        Args:
            times_s: when its attempt began (`attempt`), and when its last step, evaluation and checkpoint were done, by
                the kinds of `LAST_TIMES`; what is not known is left out.
        """
        self._show_resident(job)
        if (began_s := times_s.get("attempt")) is not None:
            self._show_attempt(job, began_s)
        for kind, metric in LAST_TIMES.items():
            if kind in times_s:
                self._series(metric, job_id=job.job_id).set(times_s[kind])
        labels = {"device": _device_of(job), "project": _project_of(job), "job_id": job.job_id}
        if job.last_eval is not None:
            self._take(job.last_eval, labels, only_gauges=True)
            self._show_sets(job, job.last_eval)
        if job.last_step is not None:
            self._take(job.last_step, labels, only_gauges=True)
            self._show_step(job, job.last_step)

    def on_job_state(self, job: JobRecord, old: str | None) -> None:
        """Take a change of state in; `old` is None for a job just submitted, and `job` holds the new state."""
        state = job.job_state
        self._series("horizon_job_transitions_total", to=state.value, reason=job.reason).inc()
        if old is not None:
            self._series("horizon_jobs", state=old).dec()
        self._series("horizon_jobs", state=state.value).inc()
        self._leave_queue(job.job_id)
        self._forget_end(job.job_id)
        if state is JobState.QUEUED:
            self._enter_queue(job)
            if job.reason == DISPLACED:
                self._series("horizon_jobs_displaced_total").inc()
        elif old == JobState.QUEUED and state in RESIDENT:
            self._series("horizon_job_queue_wait_seconds").observe(max(0.0, self._clock() - job.queued_s))
        if state in ENDED:
            self._ended_of(job)[state].inc()
            self._show_end(job)
        if state in RESIDENT:
            self._show_resident(job)
            if state is JobState.PREPARING:
                self._show_attempt(job, self._clock())
            elif state is JobState.RUNNING:
                self._series(LAST_TIMES["step"], job_id=job.job_id).set(self._clock())
        else:
            # Prometheus would otherwise keep one more set of series for every job that ever ran.
            for metric in self.families:
                if "job_id" in metric.labels:
                    self._collectors[metric.name].remove_by_labels({"job_id": job.job_id})
            self._last_steps.pop(job.job_id, None)
            self._owners.pop(job.job_id, None)

    def on_loaded(self, job_id: str) -> None:
        """A job is loaded: it has asked for its first turn, or has left the states before that."""
        self._collectors["horizon_job_loading_since_timestamp_seconds"].remove_by_labels({"job_id": job_id})

    def set_jobs(self, counts: Mapping[str, int]) -> None:
        """Show the number of jobs in each state, from which `on_job_state` counts on; states that are not named have
        none."""
        for state in JobState:
            self._series("horizon_jobs", state=state.value).set(counts.get(state.value, 0))

    def set_queued(self, jobs: Iterable[JobRecord]) -> None:
        """Take over the jobs that are queued when the daemon starts."""
        for job in jobs:
            self._enter_queue(job)

    def set_ended(self, jobs: Iterable[JobRecord]) -> None:
        """Take over the jobs that have ended last when the daemon starts, the first that ended first."""
        for job in jobs:
            self._ended_of(job)
            self._show_end(job)

    def forget(self, job_id: str) -> None:
        """Show nothing more of a job that was deleted."""
        self._forget_end(job_id)

    def on_device_use(self, device: str, *, project: str, user: str, device_s: float) -> None:
        """Count seconds of a turn, which may not have ended."""
        self._series("horizon_device_seconds_total", project=project, user=user, device=device).inc(max(0.0, device_s))

    def on_turn(self, device: str) -> None:
        """Count a turn that ended."""
        self._series("horizon_device_turns_total", device=device).inc()

    def on_turn_wait(self, device: str, seconds: float) -> None:
        """Take in how long a job waited for its turn."""
        self._series("horizon_device_turn_wait_seconds", device=device).observe(max(0.0, seconds))

    def on_handover(self, device: str, seconds: float) -> None:
        """Take in how long the device was idle between two jobs while one waited for it."""
        self._series("horizon_device_handover_seconds", device=device).observe(max(0.0, seconds))

    def on_turn_overrun(self) -> None:
        """Count a worker that has not given the device back in time."""
        self._series("horizon_turn_overruns_total").inc()

    def set_residents(self, counts: Mapping[str, int], promised_bytes: int) -> None:
        """Show how many jobs share each device, and the host memory that is planned for all of them together."""
        self._replace("horizon_resident_jobs", {(device,): count for device, count in counts.items()})
        self._series("horizon_host_memory_promised_bytes").set(promised_bytes)

    def set_bases(self, num_bytes: int, num_jobs: int) -> None:
        """Show how much memory the frozen weights take that resident jobs share, and how many jobs are on them."""
        self._series("horizon_shared_base_bytes").set(num_bytes)
        self._series("horizon_shared_base_jobs").set(num_jobs)

    def set_node_open(self, is_open: bool) -> None:
        """Show whether jobs may start."""
        self._series("horizon_node_open").set(is_open)

    def set_fleet_nodes(self, counts: Mapping[str, int]) -> None:
        """Show how many further nodes are in each state."""
        self._replace("horizon_fleet_nodes", {(state,): count for state, count in counts.items()})

    def set_fleet_boxes(self, counts: Mapping[str, int]) -> None:
        """Show how many machines that jobs are sent to are in each state."""
        self._replace("horizon_fleet_boxes", {(state,): count for state, count in counts.items()})

    def set_maintenance(self, start_s: float, end_s: float) -> None:
        """Show the maintenance window that has not ended yet; 0 where there is none."""
        self._series("horizon_maintenance_start_timestamp_seconds").set(start_s)
        self._series("horizon_maintenance_end_timestamp_seconds").set(end_s)

    def set_share_uses(
        self,
        uses: Iterable[ShareUse],
        weight_of: Callable[[Holder, str], float] = lambda _holder, _name: Allowance.weight,
    ) -> None:
        """Show what every user has used, decayed, and the weights that it is divided by."""
        uses = list(uses)
        self._replace("horizon_share_use_seconds", {(use.project, use.user): use.device_s for use in uses})
        self._replace("horizon_project_weight", {(use.project,): weight_of("project", use.project) for use in uses})
        self._replace("horizon_user_weight", {(use.user,): weight_of("user", use.user) for use in uses})

    def set_job_shares(self, shares: Mapping[str, float]) -> None:
        """Show the part of its device's time that each resident job has."""
        self._replace("horizon_job_share_ratio", {(job_id,): share for job_id, share in shares.items()})

    def set_disk(self, total_bytes: int, free_bytes: int) -> None:
        """Show the disk of the state folder."""
        self._series("horizon_disk_total_bytes").set(total_bytes)
        self._series("horizon_disk_free_bytes").set(free_bytes)

    def set_certificate_expiry(self, expires_s: float) -> None:
        """Show when the TLS certificate ends; 0 without TLS."""
        self._series("horizon_tls_certificate_expiry_timestamp_seconds").set(expires_s)

    def set_stored(self, stored_bytes: Mapping[str, int]) -> None:
        """Show how much each user stores."""
        self._replace("horizon_stored_bytes", {(user,): size for user, size in stored_bytes.items()})

    def set_page_url(self, url: str) -> None:
        """Show where the web page is."""
        self._replace("horizon_web_page_info", {(url,): 1})

    def set_gpus(self, gpus: Sequence[GpuFigures]) -> None:
        """Show what the driver says of the GPUs."""
        self._replace("horizon_gpu_info", {(gpu.device, gpu.name): 1 for gpu in gpus})
        for field, metric in _SHOWN[GpuFigures].items():
            values: dict[tuple[str, ...], float] = {}
            for gpu in gpus:
                value = getattr(gpu, field)
                if isinstance(value, Mapping):
                    values |= {(gpu.device, component): one for component, one in value.items()}
                elif value is not None:
                    values[(gpu.device,)] = value
            self._replace(metric.name, values)

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

    def on_compiled(self, seconds: float) -> None:
        """Count a compilation of the daemon that has ended by itself."""
        self._series("horizon_layer_compile_seconds_total").inc(seconds)

    def on_webhook(self, outcome: str) -> None:
        """Count an attempt to deliver a webhook."""
        self._series("horizon_webhook_deliveries_total", outcome=outcome).inc()

    def on_grpc(self, service: str, method: str, code: str, seconds: float) -> None:
        """Count one finished gRPC call; `code` is the status name, such as OK."""
        if (service, method, code) not in self._grpc_series:
            labels = {"grpc_service": service, "grpc_method": method}
            handled = self._series("grpc_server_handled_total", **labels, grpc_code=code)
            self._grpc_series[service, method, code] = handled, self._series("grpc_server_handling_seconds", **labels)
        handled, handling = self._grpc_series[service, method, code]
        handled.inc()
        handling.observe(seconds)

    def on_http(self, method: str, route: str, code: int | str, seconds: float) -> None:
        """Count one finished HTTP request; `route` is the template, never the path, so that series stay bounded."""
        # A client may send any word as the method.
        known = method if method in _HTTP_METHODS else "other"
        self._series("http_request_duration_seconds", method=known, route=route, code=str(code)).observe(seconds)

    def render(self, shows: Shows = lambda _labels, _owners: True) -> tuple[bytes, str]:
        """Return the exposition of the series that `shows` is true for, and its content type."""
        return exposition(self.registry, lambda labels: shows(labels, self._owners)), CONTENT_TYPE

    def _enter_queue(self, job: JobRecord) -> None:
        self._ended_of(job)
        self._queued[job.job_id] = job
        self._count_queued(job, 1)

    def _leave_queue(self, job_id: str) -> None:
        if (job := self._queued.pop(job_id, None)) is not None:
            self._count_queued(job, -1)

    def _count_queued(self, job: JobRecord, more: int) -> None:
        whose = (_project_of(job), job.owner)
        self._queued_of[whose] += more
        # At 0, not gone: a curve that ends looks as if nothing were known.
        self._series("horizon_queued_jobs", project=whose[0], user=whose[1]).set(self._queued_of[whose])

    def _ended_of(self, job: JobRecord) -> dict[JobState, Any]:
        """The counters of how this user's jobs in this project ended. A rate sees the first end only when its series
        was there before, at 0."""
        whose = {"project": _project_of(job), "user": job.owner}
        return {state: self._series("horizon_jobs_ended_total", **whose, state=state.value) for state in sorted(ENDED)}

    def _show_end(self, job: JobRecord) -> None:
        labels = (job.job_id, job.spec.name, job.owner, _project_of(job), job.job_state.value, job.reason)
        self._collectors["horizon_ended_job_timestamp_seconds"].labels(*labels).set(job.ended_s or self._clock())
        self._ended[job.job_id] = labels
        if len(self._ended) > NEWEST_ENDED:
            self._forget_end(next(iter(self._ended)))

    def _forget_end(self, job_id: str) -> None:
        if (labels := self._ended.pop(job_id, None)) is not None:
            self._collectors["horizon_ended_job_timestamp_seconds"].remove(*labels)

    def _show_attempt(self, job: JobRecord, began_s: float) -> None:
        name, own = "horizon_job_attempt_start_timestamp_seconds", {"job_id": job.job_id}
        self._collectors[name].remove_by_labels(own)
        self._series(name, **own, attempt=str(job.attempt)).set(began_s)

    def _show_resident(self, job: JobRecord) -> None:
        """Show what a job is, whose, how far, and since when it is being loaded."""
        self.on_loaded(job.job_id)
        if job.job_state in _LOADING:
            loading = {"job_id": job.job_id, "state": job.job_state.value}
            self._series("horizon_job_loading_since_timestamp_seconds", **loading).set(self._clock())
        names = {"name": job.spec.name, "model": job.spec.model, "dataset": job.spec.dataset}
        project = _project_of(job)
        self._ended_of(job)
        self._count_queued(job, 0)
        self._owners[job.job_id] = (job.owner, project)
        self._series("horizon_job_info", job_id=job.job_id, owner=job.owner, project=project, **names).set(1)
        self._show_progress(job, job.step, job.num_steps)

    def _count_ranks(self, job: JobRecord, step: StepDone, own: Mapping[str, str]) -> None:
        """Count what the devices of a job did with each other."""
        # The labels' values are the plan's, whatever the worker reports.
        devices = () if job.plan is None else job.plan.devices
        for rank, (device, figures) in enumerate(zip(devices, step.ranks, strict=False)):
            self._take(figures, {**own, "rank": str(rank)})
            for collective in figures.collectives:
                self._take(collective, {"device": device, "kind": collective.kind, "path": figures.path})

    def _count_drives(self, job: JobRecord, step: StepDone) -> None:
        """Count what a job did with the drives."""
        # The label's values are the plan's, whatever the worker reports.
        folders = () if job.plan is None else job.plan.execution.drives.folders
        for folder, figures in zip(folders, step.drives, strict=False):
            self._take(figures, {"drive": folder})

    def _show_sets(self, job: JobRecord, done: EvalDone) -> None:
        for figures in done.sets:
            # The label's values are the spec's, whatever the worker reports.
            if figures.name in job.spec.eval_sets:
                self._take(figures, {"job_id": job.job_id, "set": figures.name})

    def _take(self, figures: Any, labels: Mapping[str, str], *, only_gauges: bool = False) -> None:
        """Count or show every figure that declares a metric; without a job_id in `labels`, only those that need none.

        With `only_gauges` nothing is counted: the figures were, by an earlier daemon.
        """
        if isinstance(figures, QueueFigures):
            for direction in ("h2d", "d2h"):
                self._take(getattr(figures, direction), {**labels, "direction": direction}, only_gauges=only_gauges)
        for field, metric in _SHOWN.get(type(figures), {}).items():
            if "job_id" in metric.labels and "job_id" not in labels:
                continue
            if only_gauges and metric.kind != "gauge":
                continue
            value = getattr(figures, field)
            if value is None:
                continue
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
            self._series("horizon_job_ranks", **own).set(len(job.plan.devices))
            self._set_components("horizon_host_memory_planned_bytes", job.plan.host_bytes, own)
            own["device"] = _device_of(job)
            self._set_components("horizon_device_memory_planned_bytes", job.plan.device_bytes, own)

    def _replace(self, name: str, values: Mapping[tuple[str, ...], float]) -> None:
        """Make `values`, by label values, the only series of a gauge."""
        self._collectors[name].clear()
        for labels, value in values.items():
            self._collectors[name].labels(*labels).set(value)

    def _set_components(self, name: str, values: Mapping[str, float], labels: dict[str, str]) -> None:
        """Set one series for each component; components that are gone from `values` lose theirs."""
        self._collectors[name].remove_by_labels(labels)
        for component, value in values.items():
            self._series(name, **labels, component=component).set(value)

    def _series(self, metric: str, /, **labels: str) -> Any:
        collector = self._collectors[metric]
        return collector.labels(**labels) if labels else collector


def _device_of(job: JobRecord) -> str:
    """Return the `device` label of a job: host or host:N, or cuda:N, of several devices with commas between. A plan
    that says cuda without a number means the first."""
    device = job.plan.device if job.plan else "host"
    return "cuda:0" if device == "cuda" else device


def _project_of(job: JobRecord) -> str:
    """Return the project to charge: the spec's, which the service fills in, else the owner."""
    return job.spec.project or job.owner

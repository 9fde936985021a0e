"""What a job's steps say in metrics: memory, transfers, compute, loss. Knows events and job records, not the registry's internals."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from horizon_server.events import CheckpointWritten, EvalDone, StepDone
from horizon_server.figures import TransferFigures, overlap_ratio
from horizon_server.records.job import JobRecord
from horizon_server.records.plan import JobPlan
from horizon_server.telemetry.families import Families

OVERLAP_WINDOW_STEPS = 20
"""The overlap ratio is taken over so many of a job's last steps."""

_STEP_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1800.0)
_CHECKPOINT_BUCKETS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 3600.0)
_HOST = "host"


def device_of(job: JobRecord) -> str:
    """Return the `device` label of a job: host, or cuda:N. A plan that says cuda without a number means the first."""
    device = job.plan.device if job.plan else _HOST
    return "cuda:0" if device == "cuda" else device


def project_of(job: JobRecord) -> str:
    """Return the project that pays: the spec's, which the service fills in, else the owner."""
    return job.spec.project or job.owner


class MemoryMetrics:
    """Host and device bytes by component, as planned and as in use."""

    def __init__(self, families: Families) -> None:
        job_gauge = families.job_gauge
        self._host = job_gauge(
            "horizon_host_memory_bytes", ["component"], "Host memory a running job uses, by component."
        )
        self._host_planned = job_gauge(
            "horizon_host_memory_planned_bytes",
            ["component"],
            "Host memory the plan gives a running job, by component.",
        )
        self._device = job_gauge(
            "horizon_device_memory_bytes",
            ["device", "component"],
            "Peak device memory of a running job's last step, by component.",
        )
        self._device_planned = job_gauge(
            "horizon_device_memory_planned_bytes",
            ["device", "component"],
            "Device memory the plan gives a running job, by component.",
        )

    def planned(self, job: JobRecord, plan: JobPlan) -> None:
        """Show the plan of a job that has the device."""
        self._host_planned.set_components(job.job_id, values=plan.host_bytes)
        self._device_planned.set_components(job.job_id, device_of(job), values=plan.device_bytes)

    def used(self, job: JobRecord, step: StepDone) -> None:
        """Show what the last step used."""
        self._host.set_components(job.job_id, values=step.host_memory_bytes)
        self._device.set_components(job.job_id, device_of(job), values=step.device_memory_bytes)


class TransferMetrics:
    """The link between host and device: bytes, busy time, and the part of it that compute waited for."""

    def __init__(self, families: Families) -> None:
        labels = ["device", "direction"]
        self._bytes = families.counter("horizon_transfer_bytes_total", labels, "Bytes moved over the link.")
        self._busy = families.counter("horizon_transfer_seconds_total", labels, "Seconds the link's queue was busy.")
        self._exposed = families.counter(
            "horizon_transfer_exposed_seconds_total", labels, "Seconds compute stood idle waiting for the link."
        )
        self._overlap = families.job_gauge(
            "horizon_transfer_overlap_ratio",
            ["direction"],
            f"Share of the transfer time hidden by compute over the last {OVERLAP_WINDOW_STEPS} steps; 1 is fully hidden.",
        )
        self._windows: dict[str, deque[Mapping[str, TransferFigures]]] = {}

    def on_step(self, job: JobRecord, step: StepDone, *, shown: bool) -> None:
        """Count a step's transfers; update the ratio when the job's series are `shown`."""
        figures = self._count(job, step)
        if not shown:
            return
        window = self._windows.setdefault(job.job_id, deque(maxlen=OVERLAP_WINDOW_STEPS))
        window.append(figures)
        for direction in figures:
            self._overlap.set(job.job_id, direction, value=overlap_ratio(f[direction] for f in window))

    def on_eval(self, job: JobRecord, done: EvalDone) -> None:
        """Count an evaluation's transfers; the ratio is about training."""
        self._count(job, done)

    def drop(self, job_id: str) -> None:
        """Forget the job's last steps."""
        self._windows.pop(job_id, None)

    def _count(self, job: JobRecord, done: StepDone | EvalDone) -> Mapping[str, TransferFigures]:
        figures = {"h2d": done.h2d, "d2h": done.d2h}
        for direction, moved in figures.items():
            labels = (device_of(job), direction)
            self._bytes.labels(*labels).inc(max(0, moved.bytes))
            self._busy.labels(*labels).inc(max(0.0, moved.busy_s))
            self._exposed.labels(*labels).inc(max(0.0, moved.exposed_s))
        return figures


class TrainingMetrics:
    """Compute and optimizer seconds, tokens, loss and the other figures of a step."""

    def __init__(self, families: Families) -> None:
        counter, job_gauge = families.counter, families.job_gauge
        self._compute = counter("horizon_compute_seconds_total", ["device"], "Seconds the compute queue worked.")
        self._optimizer = counter("horizon_optimizer_seconds_total", [], "Seconds the optimizer worked.")
        self._optimizer_exposed = counter(
            "horizon_optimizer_exposed_seconds_total", [], "Seconds of optimizer work that nothing hid."
        )
        self._tokens = counter("horizon_tokens_total", ["project"], "Real tokens trained on.")
        self._gpu = counter(
            "horizon_gpu_seconds_total", ["project", "user"], "Seconds of steps and evaluations that ran on a GPU."
        )
        self._skipped = counter(
            "horizon_steps_skipped_total", ["reason"], "Steps whose update was dropped, wholly or in part."
        )
        self._duration = families.histogram(
            "horizon_step_duration_seconds", [], "Duration of an optimizer step.", _STEP_BUCKETS_S
        )
        self._checkpoint = families.histogram(
            "horizon_checkpoint_duration_seconds", [], "Duration of writing a checkpoint.", _CHECKPOINT_BUCKETS_S
        )
        self._tokens_per_second = job_gauge("horizon_tokens_per_second", [], "Real tokens per second in the last step.")
        self._utilization = job_gauge(
            "horizon_model_flops_utilization_ratio",
            [],
            "The model's own FLOPs per second in the last step, of what the device's matrix products were measured to reach.",
        )
        self._loss = job_gauge("horizon_train_loss", [], "Token-weighted mean loss of the last step.")
        self._eval_loss = job_gauge("horizon_eval_loss", [], "Token-weighted mean loss of the last evaluation.")
        self._grad_norm = job_gauge("horizon_grad_norm", [], "Global gradient norm of the last step before clipping.")
        self._learning_rate = job_gauge("horizon_learning_rate", [], "Learning rate of the last step.")
        self._progress = job_gauge("horizon_job_progress_ratio", [], "Steps done of steps in all, 0 to 1.")
        self._last_checkpoint = job_gauge(
            "horizon_checkpoint_last_success_timestamp_seconds",
            [],
            "Unix time of the job's newest complete checkpoint.",
        )

    def on_step(self, job: JobRecord, step: StepDone, *, shown: bool) -> None:
        """Count a step; update the job's own series when they are `shown`."""
        self._count(job, step)
        self._tokens.labels(project_of(job)).inc(max(0, step.num_tokens))
        self._duration.observe(step.duration_s)
        if step.skipped:
            self._skipped.labels(step.skipped).inc()
        if not shown:
            return
        self._tokens_per_second.set(job.job_id, value=step.tokens_per_second)
        if job.plan is not None and job.plan.prediction is not None and step.duration_s > 0:
            utilization = step.model_flops / step.duration_s / job.plan.prediction.peak_flops_per_s
            self._utilization.set(job.job_id, value=utilization)
        self._loss.set(job.job_id, value=step.loss)
        self._grad_norm.set(job.job_id, value=step.grad_norm)
        self._learning_rate.set(job.job_id, value=step.learning_rate)
        self.progress(job.job_id, step.step, step.num_steps)

    def progress(self, job_id: str, step: int, num_steps: int) -> None:
        """Show how far a job is; nothing while the number of steps is unknown."""
        if num_steps > 0:
            self._progress.set(job_id, value=min(1.0, step / num_steps))

    def on_eval(self, job: JobRecord, done: EvalDone, *, shown: bool) -> None:
        """Count an evaluation; show its loss when the job's series are `shown`."""
        self._count(job, done)
        if shown:
            self._eval_loss.set(job.job_id, value=done.eval_loss)

    def on_checkpoint(self, job: JobRecord, written: CheckpointWritten, now_s: float, *, shown: bool) -> None:
        """Count a checkpoint; show its time when the job's series are `shown`."""
        self._checkpoint.observe(written.duration_s)
        if shown:
            self._last_checkpoint.set(job.job_id, value=now_s)

    def _count(self, job: JobRecord, done: StepDone | EvalDone) -> None:
        device = device_of(job)
        self._compute.labels(device).inc(max(0.0, done.compute_s))
        self._optimizer.inc(max(0.0, done.optimizer_s))
        self._optimizer_exposed.inc(max(0.0, done.optimizer_exposed_s))
        self._gpu.labels(project_of(job), job.owner).inc(0.0 if device == _HOST else max(0.0, done.duration_s))

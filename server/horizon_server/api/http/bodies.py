"""The JSON bodies of REST and how records become them. Times are ISO 8601 in UTC, sizes are bytes, unknown is null."""

from __future__ import annotations

import dataclasses
import math
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, Field

from horizon_server.datasets.preview.request import DatasetPreview
from horizon_server.events import StepDone
from horizon_server.jobs.node import NodeStatus
from horizon_server.records.account import Principal
from horizon_server.records.dataset import DatasetRecord
from horizon_server.records.job import CheckpointRecord, JobRecord
from horizon_server.records.model import ModelRecord
from horizon_server.records.plan import JobPlan
from horizon_server.services.access import may_see


class ViolationBody(BaseModel):
    """One refused field."""

    field: str = Field(description="Path of the field, such as train.learning_rate.")
    description: str = Field(description="What is wrong and what is allowed.")


class ErrorDetail(BaseModel):
    """Why a call failed."""

    reason: str = Field(description="Stable name; scripts may match it.")
    message: str = Field(description="One sentence for people.")
    violations: list[ViolationBody] = Field(
        default_factory=list, description="The refused fields, where there are any."
    )


class ErrorBody(BaseModel):
    """Every error has this shape."""

    error: ErrorDetail


class VersionBody(BaseModel):
    """The daemon's version."""

    version: str


class ReadyBody(BaseModel):
    """Whether the daemon takes work."""

    ready: bool
    message: str = Field("", description="Why not, in one sentence.")


class AcceleratorBody(BaseModel):
    """One GPU."""

    index: int
    name: str
    memory_bytes: int


class NodeBody(BaseModel):
    """The machine the daemon runs on, and the caller as the daemon knows them."""

    hostname: str
    version: str
    host_memory_limit_bytes: int
    host_memory_available_bytes: int
    num_cpus: int
    accelerators: list[AcceleratorBody]
    disk_free_bytes: int
    num_jobs: dict[str, int] = Field(description="Jobs of all users by state.")
    draining: bool
    user: str
    role: str


class TransferBody(BaseModel):
    """One direction of the link over a step."""

    bytes: int
    busy_s: float | None
    exposed_s: float | None = Field(description="Seconds compute stood idle waiting for it.")


class StepBody(BaseModel):
    """One finished optimizer step."""

    step: int
    num_steps: int
    loss: float | None
    grad_norm: float | None
    learning_rate: float | None
    epoch: float | None
    num_input_tokens_seen: int
    num_tokens: int
    tokens_per_second: float | None
    duration_s: float | None
    h2d: TransferBody
    d2h: TransferBody
    compute_s: float | None
    optimizer_s: float | None
    optimizer_exposed_s: float | None
    overlap_ratio: float | None
    model_flops: float | None
    host_memory_bytes: dict[str, int]
    device_memory_bytes: dict[str, int]
    skipped: str
    eta_s: float | None


class PredictionBody(BaseModel):
    """What an optimizer step is expected to take, from the node's measured speed."""

    step_s: float
    tokens_per_second: float
    bound: str = Field(description="What takes the most of it: compute, h2d, d2h or host memory.")
    total_s: float | None = Field(
        description="Null where the number of steps is not known before the data is prepared."
    )
    peak_flops_per_s: float = Field(description="Of the device's matrix products, as measured.")


class PlanBody(BaseModel):
    """The memory ledger of a job, and how fast it is expected to be."""

    host_bytes: dict[str, int]
    device_bytes: dict[str, int]
    host_total_bytes: int
    device_total_bytes: int
    host_limit_bytes: int
    device_limit_bytes: int
    num_parameters: int
    device: str
    fits: bool
    message: str
    prediction: PredictionBody | None = Field(description="Null while the node's speed has not been measured.")


class JobBody(BaseModel):
    """One job as it stands."""

    job_id: str
    name: str
    project: str
    owner: str
    state: str
    reason: str
    message: str
    step: int
    num_steps: int = Field(description="0 while unknown.")
    progress: float = Field(description="0 to 1.")
    attempt: int
    queue_position: int = Field(description="From 1 while queued, else 0.")
    create_time: datetime | None
    start_time: datetime | None
    end_time: datetime | None
    eta_s: float | None
    last_sequence: int = Field(description="Number of the newest event.")
    last_step: StepBody | None
    plan: PlanBody | None
    data_report: dict[str, int] = Field(description="Counts of the data preparation; empty until prepared.")
    spec: dict[str, Any] = Field(description="The job spec with every default filled in.")


class JobPage(BaseModel):
    """A page of jobs, newest first."""

    jobs: list[JobBody]
    next_page_token: str = Field(description="Empty on the last page.")


class QueueEntry(BaseModel):
    """One place in the queue. What the caller may not see of others' jobs is null."""

    job_id: str
    owner: str
    state: str
    position: int = Field(description="From 1 while queued; 0 for a job that has its turn.")
    name: str | None = None
    project: str | None = None
    priority: int | None = None
    step: int | None = None
    num_steps: int | None = None


class QueueBody(BaseModel):
    """Everybody's waiting and running jobs in the order of their turn."""

    jobs: list[QueueEntry]


class CurvePoint(BaseModel):
    """One step of the loss curve."""

    step: int
    loss: float | None
    learning_rate: float | None
    grad_norm: float | None
    tokens_per_second: float | None


class EvalPoint(BaseModel):
    """One evaluation."""

    step: int
    eval_loss: float | None


class CurveBody(BaseModel):
    """The loss curve of a job: at most 2000 points, every `every_steps`-th step and the last one."""

    job_id: str
    num_steps: int
    every_steps: int
    points: list[CurvePoint]
    evals: list[EvalPoint]


class CheckpointFileBody(BaseModel):
    """One file of a checkpoint."""

    path: str
    sha256: str
    size_bytes: int


class CheckpointBody(BaseModel):
    """One complete checkpoint."""

    job_id: str
    step: int
    size_bytes: int
    create_time: datetime | None
    eval_loss: float | None
    last: bool
    best: bool
    files: list[CheckpointFileBody]


class CheckpointList(BaseModel):
    """The complete checkpoints of a job, oldest first."""

    checkpoints: list[CheckpointBody]


class DatasetBody(BaseModel):
    """One pushed dataset."""

    dataset_id: str
    name: str
    owner: str
    format: str
    state: str = Field(description="UPLOADING or READY.")
    num_rows: int
    size_bytes: int
    create_time: datetime | None
    digest: str


class DatasetPage(BaseModel):
    """A page of datasets, newest first."""

    datasets: list[DatasetBody]
    next_page_token: str = Field(description="Empty on the last page.")


class PreviewSpanBody(BaseModel):
    """A piece of a rendered row."""

    text: str
    trained: bool


class PreviewRowBody(BaseModel):
    """One row as a model would see it."""

    file: str
    unit: str = Field(description="What `number` counts: line, row, or piece of a plain text.")
    number: int
    spans: list[PreviewSpanBody]
    num_tokens: int
    num_trained_tokens: int
    num_cut_tokens: int = Field(description="Tokens beyond the sequence length, neither trained on nor shown.")
    num_documents: int = Field(description="Documents that it is trained as.")
    clipped: bool = Field(description="Whether the spans end before the row does, to keep the answer small.")
    problems: list[str] = Field(description="Why nothing of it is trained, where that is so.")


class PreviewBody(BaseModel):
    """Some rows of a dataset as a model would see them, and the options they were rendered with."""

    rows: list[PreviewRowBody]
    num_rows: int = Field(description="Rows of the dataset.")
    format: str
    method: str
    train_on: str
    sequence_length: int
    offset: int


class ModelBody(BaseModel):
    """One pushed model."""

    model_id: str
    name: str
    owner: str
    state: str = Field(description="UPLOADING or READY.")
    architecture: str
    num_parameters: int
    size_bytes: int
    create_time: datetime | None
    digest: str


class ModelPage(BaseModel):
    """A page of models, newest first."""

    models: list[ModelBody]
    next_page_token: str = Field(description="Empty on the last page.")


def finite(value: Any) -> Any:
    """Return plain data with numbers that JSON cannot write (nan, inf) as None, however deep."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value


def node_body(node: NodeStatus) -> NodeBody:
    """Return the body of the node."""
    return NodeBody.model_validate(dataclasses.asdict(node))


def job_body(job: JobRecord) -> JobBody:
    """Return the body of a job."""
    step = job.last_step
    return JobBody(
        job_id=job.job_id,
        name=job.spec.name,
        project=job.spec.project,
        owner=job.owner,
        state=job.job_state.value,
        reason=job.reason,
        message=job.message,
        step=job.step,
        num_steps=job.num_steps,
        progress=min(1.0, job.step / job.num_steps) if job.num_steps > 0 else 0.0,
        attempt=job.attempt,
        queue_position=job.queue_position,
        create_time=_time(job.created_s),
        start_time=_time(job.started_s),
        end_time=_time(job.ended_s),
        eta_s=finite(job.eta_s),
        last_sequence=job.last_sequence,
        last_step=_step_body(step) if step is not None else None,
        plan=_plan_body(job.plan) if job.plan is not None else None,
        data_report=job.data_report,
        spec=finite(job.spec.to_mapping()),
    )


def queue_entry(job: JobRecord, principal: Principal) -> QueueEntry:
    """Return a place in the queue: everything for those who may see the job, who and where for the others."""
    entry = QueueEntry(job_id=job.job_id, owner=job.owner, state=job.job_state.value, position=job.queue_position)
    if not may_see(principal, job.owner):
        return entry
    spec = job.spec
    shown = {"name": spec.name, "project": spec.project, "priority": spec.priority}
    return entry.model_copy(update={**shown, "step": job.step, "num_steps": job.num_steps})


def checkpoint_body(checkpoint: CheckpointRecord) -> CheckpointBody:
    """Return the body of a checkpoint."""
    return CheckpointBody(
        job_id=checkpoint.job_id,
        step=checkpoint.step,
        size_bytes=checkpoint.size_bytes,
        create_time=_time(checkpoint.created_s),
        eval_loss=finite(checkpoint.eval_loss),
        last=checkpoint.last,
        best=checkpoint.best,
        files=[CheckpointFileBody.model_validate(dataclasses.asdict(entry)) for entry in checkpoint.files],
    )


def dataset_body(dataset: DatasetRecord) -> DatasetBody:
    """Return the body of a dataset."""
    return DatasetBody(
        dataset_id=dataset.dataset_id,
        name=dataset.name,
        owner=dataset.owner,
        format=dataset.format,
        state="READY" if dataset.ready else "UPLOADING",
        num_rows=dataset.num_rows,
        size_bytes=dataset.size_bytes,
        create_time=_time(dataset.created_s),
        digest=dataset.digest,
    )


def preview_body(preview: DatasetPreview) -> PreviewBody:
    """Return the body of a preview."""
    plain = dataclasses.asdict(preview)
    return PreviewBody.model_validate({**plain.pop("options"), **plain})


def model_body(model: ModelRecord) -> ModelBody:
    """Return the body of a model."""
    return ModelBody(
        model_id=model.model_id,
        name=model.name,
        owner=model.owner,
        state="READY" if model.ready else "UPLOADING",
        architecture=model.architecture,
        num_parameters=model.num_parameters,
        size_bytes=model.size_bytes,
        create_time=_time(model.created_s),
        digest=model.digest,
    )


def _step_body(step: StepDone) -> StepBody:
    return StepBody.model_validate(finite(dataclasses.asdict(step)))


def _plan_body(plan: JobPlan) -> PlanBody:
    totals = {"host_total_bytes": plan.host_total_bytes, "device_total_bytes": plan.device_total_bytes}
    return PlanBody.model_validate({**dataclasses.asdict(plan), **totals, "fits": plan.fits})


def _time(unix_s: float) -> datetime | None:
    return datetime.fromtimestamp(unix_s, UTC) if unix_s > 0.0 else None

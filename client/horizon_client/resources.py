"""What the daemon answers, as frozen dataclasses with the wire's field names, without protobuf. `conversion` fills them.

Enumerations are text: states in capitals (`RUNNING`), the rest as in a job spec (`prompt-completion`). Times are aware datetimes in UTC,
durations are seconds. A job's spec is the plain mapping that could be submitted again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar, Literal, TypeAlias

ENDED_STATES = frozenset({"SUCCEEDED", "FAILED", "CANCELLED"})


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of a dataset, model or checkpoint."""

    path: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """One pushed dataset. `state` is UPLOADING or READY."""

    dataset_id: str
    name: str
    owner: str
    format: str
    field_map: Mapping[str, str]
    files: tuple[FileEntry, ...] = field(repr=False, metadata={"of": FileEntry})
    state: str
    num_rows: int
    size_bytes: int
    create_time: datetime | None
    digest: str = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Model:
    """One pushed model folder. `state` is UPLOADING or READY."""

    model_id: str
    name: str
    owner: str
    files: tuple[FileEntry, ...] = field(repr=False, metadata={"of": FileEntry})
    state: str
    architecture: str
    num_parameters: int
    size_bytes: int
    create_time: datetime | None
    digest: str = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class PreviewSpan:
    """A piece of a rendered row, and whether it carries loss."""

    text: str
    trained: bool


@dataclass(frozen=True, kw_only=True)
class PreviewRow:
    """One row as a model would see it: the `number`-th `unit` (line, row, piece) of `file`.

    `num_cut_tokens` are beyond the sequence length. `clipped` means that `spans` end before the row does, to keep the answer small.
    `problems` are the reasons why nothing of the row is trained, if there are any.
    """

    file: str
    unit: str
    number: int
    spans: tuple[PreviewSpan, ...] = field(metadata={"of": PreviewSpan})
    num_tokens: int
    num_trained_tokens: int
    num_cut_tokens: int
    num_documents: int
    clipped: bool
    problems: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class DatasetPreview:
    """Some rows of a dataset of `num_rows`, and the options that they were rendered with."""

    rows: tuple[PreviewRow, ...] = field(metadata={"of": PreviewRow})
    num_rows: int
    format: str
    method: str
    train_on: str
    sequence_length: int


@dataclass(frozen=True, kw_only=True)
class TransferFigures:
    """One direction of the link over a step. Units: bytes and seconds."""

    bytes: int
    busy_s: float
    exposed_s: float


@dataclass(frozen=True, kw_only=True)
class StepEvent:
    """One finished optimizer step. `sequence` is 0 and `time` None in a job's `last_step`."""

    kind: ClassVar[Literal["step"]] = "step"
    sequence: int = 0
    time: datetime | None = None
    step: int
    num_steps: int
    loss: float
    grad_norm: float
    learning_rate: float
    epoch: float
    num_input_tokens_seen: int
    num_tokens: int
    tokens_per_second: float
    duration_s: float
    h2d: TransferFigures | None = field(metadata={"of": TransferFigures})
    d2h: TransferFigures | None = field(metadata={"of": TransferFigures})
    compute_s: float
    optimizer_s: float
    optimizer_exposed_s: float
    host_memory_bytes: Mapping[str, int]
    device_memory_bytes: Mapping[str, int]
    skipped: str
    eta_s: float
    overlap_ratio: float
    model_flops: float


@dataclass(frozen=True, kw_only=True)
class StateEvent:
    """A change of the job's state."""

    kind: ClassVar[Literal["state"]] = "state"
    sequence: int
    time: datetime | None
    state: str
    reason: str
    message: str
    attempt: int


@dataclass(frozen=True, kw_only=True)
class PrepareEvent:
    """Progress of the data preparation; the last one has the `report`."""

    kind: ClassVar[Literal["prepare"]] = "prepare"
    sequence: int
    time: datetime | None
    done_rows: int
    total_rows: int
    report: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class EvalEvent:
    """One finished evaluation. What the queues did for it is not part of any step's figures."""

    kind: ClassVar[Literal["eval"]] = "eval"
    sequence: int
    time: datetime | None
    step: int
    eval_loss: float
    num_targets: int
    num_tokens: int
    duration_s: float
    h2d: TransferFigures | None = field(metadata={"of": TransferFigures})
    d2h: TransferFigures | None = field(metadata={"of": TransferFigures})
    compute_s: float
    optimizer_s: float
    optimizer_exposed_s: float


@dataclass(frozen=True, kw_only=True)
class CheckpointEvent:
    """One written checkpoint."""

    kind: ClassVar[Literal["checkpoint"]] = "checkpoint"
    sequence: int
    time: datetime | None
    step: int
    duration_s: float
    size_bytes: int
    eval_loss: float | None
    """Of the last evaluation before it; None when there was none."""


@dataclass(frozen=True, kw_only=True)
class MessageEvent:
    """A message for people. `level` is info, warning or error."""

    kind: ClassVar[Literal["message"]] = "message"
    sequence: int
    time: datetime | None
    level: str
    text: str


JobEvent: TypeAlias = StateEvent | StepEvent | PrepareEvent | EvalEvent | CheckpointEvent | MessageEvent


@dataclass(frozen=True, kw_only=True)
class StepPrediction:
    """The expected time of an optimizer step, from the node's measured speed. `bound` is what takes the most of it.

    `total_s` is None when the number of steps is not known before the data is prepared.
    """

    step_s: float
    tokens_per_second: float
    bound: str
    total_s: float | None
    peak_flops_per_s: float


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The memory plan of a job: bytes by component on host and device. `prediction` is None while the node's speed is not measured."""

    host_bytes: Mapping[str, int]
    device_bytes: Mapping[str, int]
    host_total_bytes: int
    device_total_bytes: int
    host_limit_bytes: int
    device_limit_bytes: int
    fits: bool
    message: str
    num_parameters: int
    device: str
    prediction: StepPrediction | None = field(default=None, metadata={"of": StepPrediction})


@dataclass(frozen=True, kw_only=True)
class PlannedJob:
    """What a job would take, and its spec with every default filled in."""

    plan: MemoryPlan
    spec: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One submitted job."""

    job_id: str
    spec: Mapping[str, Any]
    owner: str
    state: str
    reason: str
    message: str
    step: int
    num_steps: int
    attempt: int
    create_time: datetime | None
    start_time: datetime | None
    end_time: datetime | None
    last_step: StepEvent | None = field(metadata={"of": StepEvent})
    queue_position: int
    plan: MemoryPlan | None = field(metadata={"of": MemoryPlan})
    last_sequence: int
    eta: float | None
    data_report: Mapping[str, int] = field(default_factory=dict)
    """The result of the data preparation: rows, tokens, trained_tokens, error_rows, eval_rows, ...; empty before it."""
    wanted: str = ""
    """What a user has asked the running attempt for: cancel or pause; else empty."""

    @property
    def name(self) -> str:
        """The name it was submitted under."""
        return str(self.spec.get("name", ""))

    @property
    def ended(self) -> bool:
        """Whether it has succeeded, failed or been cancelled."""
        return self.state in ENDED_STATES


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One complete checkpoint of a job."""

    job_id: str
    step: int
    files: tuple[FileEntry, ...] = field(repr=False, metadata={"of": FileEntry})
    size_bytes: int
    create_time: datetime | None
    eval_loss: float | None
    last: bool
    best: bool


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One GPU of the node."""

    index: int
    name: str
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Node:
    """The machine that the daemon runs on, with the caller's user and role."""

    hostname: str
    version: str
    host_memory_limit_bytes: int
    host_memory_available_bytes: int
    num_cpus: int
    accelerators: tuple[Accelerator, ...] = field(metadata={"of": Accelerator})
    disk_free_bytes: int
    num_jobs: Mapping[str, int]
    draining: bool
    user: str
    role: str


@dataclass(frozen=True, kw_only=True)
class DatasetPush:
    """A finished push. `sent_bytes` is 0 when the server already had all of it."""

    dataset: Dataset
    sent_bytes: int


@dataclass(frozen=True, kw_only=True)
class ModelPush:
    """A finished push. `sent_bytes` is 0 when the server already had all of it."""

    model: Model
    sent_bytes: int


@dataclass(frozen=True, kw_only=True)
class CheckpointPull:
    """A finished pull. `received_bytes` does not count files that existed already."""

    checkpoint: Checkpoint
    folder: str
    files: tuple[str, ...]
    received_bytes: int

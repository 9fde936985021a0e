"""A job: its states and the moves between them, its checkpoints, and the record that the server passes around."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from horizon_server.events import EvalDone, StepDone
from horizon_server.records.plan import Plan
from horizon_server.records.sharing import Outlook
from horizon_server.records.task_result import TaskResult
from horizon_server.records.times import UnixTime
from horizon_server.spec import JobSpec


class JobState(StrEnum):
    """What a job is doing."""

    QUEUED = "QUEUED"
    PREPARING = "PREPARING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    STOPPING = "STOPPING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class StopRequest(StrEnum):
    """Why an attempt is to end before its job is done: one word in the job's record, in the order to its worker, and in
    the worker."""

    NOTHING = ""
    CANCEL = "cancel"
    PAUSE = "pause"
    # The daemon's own, never stored: each of these checkpoints the job and queues it again.
    DRAIN = "drain"
    DISPLACE = "displace"
    UNLOAD = "unload"
    LEAVE = "leave"
    # The daemon's own too: checkpointed and paused, until the next call of the session.
    IDLE = "idle"
    # Neither stored nor an end of the job: another worker continues in the same memory, on other devices.
    MOVE = "move"

    @property
    def is_of_user(self) -> bool:
        """Whether a user has asked: then it is stored, so that it is carried out even if the daemon dies."""
        return self in (StopRequest.CANCEL, StopRequest.PAUSE)

    @property
    def checkpoints(self) -> bool:
        """Whether the job is to be checkpointed before the attempt ends."""
        return self not in (StopRequest.NOTHING, StopRequest.CANCEL, StopRequest.MOVE)

    @property
    def why(self) -> str:
        """What a job says that is being stopped for it."""
        return _STOPS[self][0]

    def end(self, name: str) -> tuple[JobState, str, str]:
        """Where it leads a job of that name, whether or not an attempt was running: state, reason and message."""
        _, state, reason, message = _STOPS[self]
        return state, reason, message.format(name=name)


# What a job says while it is being stopped; then its state, the reason of it and what it says.
_STOPS = {
    StopRequest.CANCEL: ("cancelled by a user", JobState.CANCELLED, "CANCELLED", "cancelled by a user"),
    StopRequest.PAUSE: (
        "paused by a user",
        JobState.PAUSED,
        "PAUSED",
        "paused by a user; resume it with: horizon job resume {name}",
    ),
    StopRequest.DRAIN: (
        "the daemon shuts down",
        JobState.QUEUED,
        "DRAINED",
        "the daemon shut down; it continues when the daemon is back",
    ),
    StopRequest.DISPLACE: (
        "another job is to have its memory",
        JobState.QUEUED,
        "DISPLACED",
        "checkpointed, as a job of a user below their share needs its memory; it continues later",
    ),
    StopRequest.UNLOAD: (
        "the node is drained by an admin",
        JobState.QUEUED,
        "NODE_DRAINED",
        "checkpointed, as an admin drained the node; it continues when the node is open again",
    ),
    StopRequest.LEAVE: (
        "a device of it is out of service",
        JobState.QUEUED,
        "DEVICE_OUT_OF_SERVICE",
        "checkpointed, as a device of it is out of service; it continues when there are enough others",
    ),
    StopRequest.IDLE: (
        "no call came for a while",
        JobState.PAUSED,
        "IDLE",
        "checkpointed, and its memory given back, as no call came for a while; the next call brings it back",
    ),
    StopRequest.MOVE: (
        "it is to continue on other devices",
        JobState.QUEUED,
        "MOVED",
        "its worker ended to continue on other devices, and nothing continued it; it continues from its newest "
        "checkpoint",
    ),
}


BEING_DELETED = -1.0
"""As `deletion_s`: the job is being deleted. A deletion that a killed daemon has begun is finished by the next one."""
CHECKPOINTS_BEING_DELETED = -2.0
"""As `deletion_s`: the job's checkpoints are being deleted."""

ENDED = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
RESIDENT = frozenset({JobState.PREPARING, JobState.STARTING, JobState.RUNNING, JobState.STOPPING})
"""States in which a job has an attempt, and with it its planned host memory."""

MOVES: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.PREPARING, JobState.PAUSED, JobState.CANCELLED, JobState.FAILED}),
    JobState.PREPARING: frozenset({JobState.STARTING, JobState.STOPPING, JobState.FAILED, JobState.QUEUED}),
    # STARTING again: its worker died and is replaced.
    JobState.STARTING: frozenset(
        {JobState.STARTING, JobState.RUNNING, JobState.STOPPING, JobState.FAILED, JobState.QUEUED, JobState.SUCCEEDED}
    ),
    JobState.RUNNING: frozenset(
        {JobState.STARTING, JobState.STOPPING, JobState.SUCCEEDED, JobState.FAILED, JobState.QUEUED}
    ),
    JobState.STOPPING: frozenset(
        {JobState.CANCELLED, JobState.PAUSED, JobState.QUEUED, JobState.FAILED, JobState.SUCCEEDED}
    ),
    # SUCCEEDED: a session that is closed while it is written home.
    JobState.PAUSED: frozenset({JobState.QUEUED, JobState.CANCELLED, JobState.SUCCEEDED}),
    # Of the ended states only this one has a way back: a node that failed must not cost the job its checkpoints.
    JobState.FAILED: frozenset({JobState.QUEUED}),
}
"""The state table: the states that a job may move to."""


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """One job. Times are Unix seconds, 0.0 while unknown."""

    job_id: str
    owner: str
    project: str = ""
    """What its device time is charged to: its spec's project, or the owner's own."""
    spec: JobSpec
    priority: int = 0
    """Its spec's at first. Above 100, which only admins can set, it is served before all shares."""
    model_id: str
    dataset_id: str
    eval_dataset_id: str
    """Empty when there is none. The model_id is an absolute folder for models below an allowed root."""
    eval_set_ids: dict[str, str] = field(default_factory=dict)
    """Datasets of `eval.sets` by the name of the set."""
    job_state: JobState
    reason: str = ""
    message: str = ""
    wanted: StopRequest = StopRequest.NOTHING
    """What a user has asked the running attempt for."""
    step: int = 0
    num_steps: int = 0
    attempt: int = 0
    created_s: UnixTime = 0.0
    queued_s: UnixTime = 0.0
    """When it last came into the queue."""
    started_s: UnixTime = 0.0
    ended_s: UnixTime = 0.0
    device_s: float = 0.0
    """Seconds of a device's time that it has used so far, over all attempts."""
    num_tokens: int = 0
    """Tokens it was trained on so far, steps that were done again included."""
    last_step: StepDone | None = None
    first_eval: EvalDone | None = None
    """The first evaluation, the best so far by the spec's `eval.best_by`, and the last one; without their answers."""
    best_eval: EvalDone | None = None
    last_eval: EvalDone | None = None
    task_results: tuple[TaskResult, ...] = ()
    """What evaluation programs have measured of its checkpoints, in the order in which it was recorded."""
    plan: Plan | None = None
    data_report: dict[str, int] = field(default_factory=dict)
    """Counts of the data preparation, and `packed_rows` once a worker has packed them; empty until prepared."""
    last_sequence: int = 0
    num_restarts: int = 0
    """Automatic restarts since it last made progress."""
    failed_step: int = -1
    """The furthest step that it had reached when it was restarted; -1 where it never was."""
    last_failure: str = ""
    """Reason and step of the failure that it was last restarted after; empty where it never was."""
    not_before_s: float = 0.0
    """It stays in the queue until then: the pause after a failure."""
    journal_line: int = 0
    """Lines of the journal of this attempt's worker that are stored."""
    box: str = ""
    """The machine of the fleet that it was sent to, which has its files; empty for this one. `journal_line` counts its
    events there that are stored here; 0 until it has arrived."""
    deletion_s: UnixTime | None = None
    """When its checkpoints are deleted; None where nothing is to be. Negative while it is being deleted."""
    keep_files: bool = False
    """Whether its owner keeps its checkpoints: they are not deleted automatically."""
    queue_position: int = 0
    """From 1 while queued; 0 otherwise. Counted when it is read, not stored."""
    outlook: Outlook | None = None
    """Why it is where it is, and until when. Set by the service that reads it, not stored; None once it has ended."""

    @property
    def progress(self) -> float:
        """Steps done of steps in all, 0 to 1; 0 while their number is unknown."""
        return min(1.0, self.step / self.num_steps) if self.num_steps > 0 else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end of a job on the device: from its last steps' pace, before the first step from the plan's
        prediction."""
        return self.remaining_device_s if self.job_state in RESIDENT else None

    @property
    def remaining_device_s(self) -> float | None:
        """Seconds of a device's time that the job still needs; None while nothing is known of its steps' number or
        time."""
        if self.last_step is not None:
            return self.last_step.eta_s
        num_steps = self.num_steps or (self.plan and self.plan.num_steps) or self.spec.most_steps
        if not num_steps or self.plan is None or self.plan.prediction is None:
            return None
        # A worker reports the number of steps once the pass before the first one is done.
        references = self.plan.references
        left = 0.0 if self.num_steps or references is None else 1.0 - references.done_share
        before_s = left * self.plan.references_s
        return before_s + num_steps * self.plan.prediction.step_s


@dataclass(frozen=True, kw_only=True)
class LogPart:
    """A part of the log of an attempt."""

    attempt: int
    """0 before the first one."""
    attempts: tuple[int, ...]
    """All that have a log, oldest first."""
    offset: int
    """Of its first byte."""
    next_offset: int
    """Where the next part begins."""
    text: str
    complete: bool
    """Whether this is the end, and nothing will follow."""


@dataclass(frozen=True, kw_only=True)
class JobFilter:
    """Which jobs of a list are wanted; what is empty lets all pass."""

    owner: str = ""
    project: str = ""
    search: str = ""
    """Part of the name, the id, the owner, the model or the dataset, in whatever case."""

    def given(self) -> dict[str, str]:
        """Return what is not empty, by name."""
        return {name: value for name, value in vars(self).items() if value}


ANY_JOB = JobFilter()


@dataclass(frozen=True, kw_only=True)
class CheckpointFile:
    """One file of a checkpoint: its relative path, sha256 (hexadecimal) and size in bytes."""

    path: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """One complete checkpoint of a job."""

    job_id: str
    step: int
    files: tuple[CheckpointFile, ...] = ()
    created_s: UnixTime = 0.0
    eval_loss: float | None = None
    last: bool = False
    best: bool = False
    kept: bool = False
    """Whether it is not deleted automatically, whatever `keep_last` and `keep_days` of the spec say."""
    names: tuple[str, ...] = ()
    """Those that the calls of a session have given it."""

    @property
    def size_bytes(self) -> int:
        """Bytes over all files."""
        return sum(f.size_bytes for f in self.files)

"""What the daemon asks a worker for: one attempt at a job."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from horizon_server.records.plan import Plan
from horizon_server.spec import JobSpec
from horizon_server.store.base_digest import DigestBook, file_digest, model_digest
from horizon_server.store.prepared import TOKENS_FILE


@dataclass(frozen=True, kw_only=True)
class RunLimits:
    """What the job may take: steps in all, and the Unix time at which it ends; None: no limit."""

    max_steps: int | None = None
    deadline_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The nodes of a job: this one's address, and HOST:PORT of each further one, in the order of their ranks."""

    address: str
    others: tuple[str, ...]
    key_file: Path


@dataclass(frozen=True, kw_only=True)
class WorkerRequest:
    """One attempt: a JSON file next to its log (see `codec`), so that people can look at it, and run it again by
    hand."""

    job_id: str
    attempt: int
    spec: JobSpec
    plan: Plan
    model: Path
    prepared: Path | None
    """The prepared data; None for a session, which has none."""
    evaluations: dict[str, Path] = field(default_factory=dict)
    """The prepared folder of each eval set, by its name."""
    checkpoints: Path
    min_free_bytes: int | None = None
    """Bytes that checkpoints leave free on their disk; None takes the default for the disk."""
    adapter: Path | None = None
    """The folder of the adapter that a job with `init_from` starts with."""
    resume_from: Path | None = None
    """The newest checkpoint, None where there is none."""
    resume_from_memory: bool = False
    """Whether the planes hold what a killed worker of this job left; where that cannot be continued, `resume_from`
    is."""
    planes: dict[str, int] = field(default_factory=dict)
    """Descriptors that the daemon created and lends; the worker only maps them."""
    compiled: Path | None = None
    """The library of compiled layers."""
    digests: Path | None = None
    """The book of the digests of models; None where a person runs the worker by hand."""
    trace: Path | None = None
    """Where to write what ran when on the device's queues."""
    turns: bool = False
    """Whether the daemon grants turns on the device; without, it is this worker's all the time."""
    yields_processors: bool = False
    """Whether other jobs share the device already: while this one is loaded, they come first on the processors. Alone,
    it has only programs beside it that are none of the daemon's, and would wait behind these."""
    device_locks: tuple[Path, ...] = ()
    """One of each device, in the node's order, locked by the worker that uses it."""
    calls: Path | None = None
    """The folder of a session's calls."""
    fleet: Fleet | None = None
    """What a job on several nodes needs to reach the others."""
    limits: RunLimits = RunLimits()

    def model_digest(self) -> str:
        """Return the digest of the model folder: from the book, or by reading all weights. Raises InvalidModel."""
        return model_digest(self.model) if self.digests is None else DigestBook(self.digests).digest(self.model)

    def tokens_digest(self, prepared: Path) -> str:
        """Return the digest of the tokens of a prepared folder, of its data alone."""
        file = prepared / TOKENS_FILE
        return file_digest(file) if self.digests is None else DigestBook(self.digests).of_file(file)

"""What jobs need from the outside, as Protocols: a store, the resources a spec names, and somebody who watches for metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from horizon_server.events import JobEvent, Payload, StateChanged
from horizon_server.records.account import Principal
from horizon_server.records.job import JobRecord, JobState
from horizon_server.spec import JobSpec


class JobStore(Protocol):
    """Where jobs and their events are kept. Each call is one transaction."""

    async def create(self, job: JobRecord, *, request_id: str) -> tuple[JobRecord, JobEvent | None]:
        """Store a new job with its first event, or return the job of the same earlier request and None."""
        ...

    async def get(self, job_id: str) -> JobRecord | None:
        """Return one job by id."""
        ...

    async def find_by_name(self, name: str, owner: str | None) -> list[JobRecord]:
        """Return the jobs of that name, newest first, of one owner or of all (None)."""
        ...

    async def page(
        self, *, owner: str | None, states: Sequence[JobState], before: int, limit: int
    ) -> list[tuple[int, JobRecord]]:
        """Return jobs newest first with their submission numbers, below `before` where that is not 0."""
        ...

    async def in_states(self, states: Sequence[JobState]) -> list[JobRecord]:
        """Return all jobs in these states in queue order: first submitted first."""
        ...

    async def move(self, job_id: str, change: StateChanged, **fields: Any) -> tuple[JobRecord, JobEvent]:
        """Change the state and store the event; raises WrongJobState when the machine does not allow the move."""
        ...

    async def append(self, job_id: str, payload: Payload, **fields: Any) -> tuple[JobRecord, JobEvent]:
        """Store an event and set `fields` of the job."""
        ...

    async def set(self, job_id: str, **fields: Any) -> JobRecord:
        """Set fields of the job without an event."""
        ...

    async def events_after(self, job_id: str, sequence: int, limit: int) -> list[JobEvent]:
        """Return events with a greater number, in order."""
        ...

    async def counts(self) -> dict[str, int]:
        """Return the number of jobs by state, every state named."""
        ...


@dataclass(frozen=True, kw_only=True)
class DatasetFiles:
    """A READY dataset as the preparation needs it. `files` are the names its user knows and where the bytes lie."""

    dataset_id: str
    digest: str
    format: str
    field_map: dict[str, str]
    num_rows: int
    files: tuple[tuple[str, Path], ...]


@dataclass(frozen=True, kw_only=True)
class PreparationCall:
    """What the preparation child is to do: the folder it makes, whether that is there already, and its request.

    `evaluation` is where the rows held out will lie, or None where none are.
    """

    target: Path
    evaluation: Path | None
    is_whole: bool
    request: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """What was prepared: the folder, that of the rows held out (None where none are), and the counts of the report."""

    folder: Path
    evaluation: Path | None
    report: dict[str, int]


class PreparationRecipe(Protocol):
    """Says how a dataset is prepared for a model; see `datasets.preparation`."""

    def __call__(self, spec: JobSpec, dataset: DatasetFiles, model: Path) -> PreparationCall:
        """Return the call; reads the tokenizer's files, so it belongs in a thread. Raises InvalidModel without a tokenizer."""
        ...


class Resources(Protocol):
    """Turns the names in a spec into files on the node, as the caller may see them."""

    async def dataset(self, principal: Principal, name: str) -> DatasetFiles:
        """Return a READY dataset by name or id; raises NotFound."""
        ...

    async def dataset_by_id(self, dataset_id: str) -> DatasetFiles:
        """Return a READY dataset by id, whoever asks: the job was allowed to use it when it was submitted."""
        ...

    async def model(self, principal: Principal, name: str) -> tuple[str, Path]:
        """Return id and folder of a READY model by name or id, or of a folder below an allowed root; raises NotFound."""
        ...

    async def model_folder(self, model_id: str) -> Path:
        """Return the folder of a model id that `model` gave out."""
        ...


class JobObserver(Protocol):
    """Told of everything that was stored; the metrics. Must return at once and never raise."""

    def on_payload(self, job: JobRecord, payload: Payload) -> None:
        """An event was stored."""
        ...

    def on_job_state(self, job: JobRecord, old: str | None) -> None:
        """A job was submitted (old is None) or changed its state."""
        ...

    def on_worker_restart(self, reason: str) -> None:
        """An attempt that was cut off is queued again."""
        ...

    def set_jobs(self, counts: dict[str, int]) -> None:
        """The number of jobs by state changed."""
        ...

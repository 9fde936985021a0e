"""What both faces are given by main: the services, and the ports of those that have no other home."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from horizon_server.blobs.uploads import Uploads
from horizon_server.datasets.preview.request import DatasetPreview, PreviewOptions
from horizon_server.events import JobEvent
from horizon_server.jobs.node import NodeStatus
from horizon_server.records.account import Principal
from horizon_server.records.job import CheckpointRecord, JobRecord, JobState
from horizon_server.records.plan import JobPlan
from horizon_server.services.datasets import DatasetService
from horizon_server.services.models import ModelService
from horizon_server.spec import JobSpec

JobPage = tuple[list[JobRecord], str]
"""Some jobs, and the token of the next page; empty on the last."""
JobList = list[JobRecord]
CheckpointList = list[CheckpointRecord]


class AccountsPort(Protocol):
    """Turns a token into a caller; `accounts.service.Accounts` is one."""

    async def authenticate(self, secret: str, /) -> Principal:
        """Return who presents `secret`; raises Unauthenticated."""
        ...


class JobsPort(Protocol):
    """What callers can do with jobs; `jobs.service.JobService` is one."""

    async def submit(self, principal: Principal, *, request_id: str, spec: JobSpec) -> JobRecord:
        """Queue a job, or return the one that the same earlier request made."""
        ...

    async def plan(self, principal: Principal, spec: JobSpec) -> tuple[JobSpec, JobPlan]:
        """Return the spec with every default filled in, and its memory ledger."""
        ...

    async def get(self, principal: Principal, key: str) -> JobRecord:
        """Return one job by id or name; raises NotFound."""
        ...

    async def list(
        self,
        principal: Principal,
        *,
        page_size: int = ...,
        page_token: str = ...,
        states: frozenset[JobState] = ...,
    ) -> JobPage:
        """Return a page, newest first, and the token of the next."""
        ...

    async def cancel(self, principal: Principal, key: str) -> JobRecord:
        """End a job."""
        ...

    async def pause(self, principal: Principal, key: str) -> JobRecord:
        """Checkpoint a job and free the device."""
        ...

    async def resume(self, principal: Principal, key: str) -> JobRecord:
        """Queue a paused job again."""
        ...

    def watch(self, principal: Principal, key: str, after_sequence: int = ...) -> AsyncIterator[JobEvent]:
        """Yield events as they come; ends after the last one of an ended job."""
        ...

    def logs(
        self, principal: Principal, key: str, *, attempt: int = ..., offset: int = ..., follow: bool = ...
    ) -> AsyncIterator[tuple[int, bytes]]:
        """Yield (offset, bytes) pieces of an attempt's log."""
        ...

    async def checkpoints(self, principal: Principal, key: str) -> CheckpointList:
        """Return a job's complete checkpoints, oldest first."""
        ...

    async def checkpoint_file(self, principal: Principal, key: str, step: int, path: str) -> Path:
        """Return where one file of a checkpoint lies; raises NotFound."""
        ...

    async def delete_checkpoint(self, principal: Principal, key: str, step: int) -> None:
        """Remove one checkpoint."""
        ...

    async def queue(self) -> JobList:
        """Return everybody's waiting and running jobs in the order of their turn."""
        ...


class NodePort(Protocol):
    """The machine; `jobs.node.NodeFacts` is one."""

    async def describe(self, principal: Principal) -> NodeStatus:
        """Return the node as it stands now."""
        ...


class PreviewsPort(Protocol):
    """Shows rows as a model would see them; `previews.Previews` is one."""

    async def preview(self, principal: Principal, dataset: str, model: str, options: PreviewOptions) -> DatasetPreview:
        """Return some rows of a dataset, rendered for a model; raises NotFound, InvalidSpec, InvalidData, InvalidModel."""
        ...


@dataclass(frozen=True, kw_only=True)
class Services:
    """Everything behind gRPC and REST."""

    accounts: AccountsPort
    jobs: JobsPort
    datasets: DatasetService
    previews: PreviewsPort
    models: ModelService
    blobs: Uploads
    node: NodePort

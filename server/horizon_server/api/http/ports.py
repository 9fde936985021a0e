"""What HTTP needs from the services, as Protocols: the real ones satisfy them as they are, and tests put small ones here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from horizon_server.datasets.preview.request import DatasetPreview, PreviewOptions
from horizon_server.events import JobEvent
from horizon_server.jobs.node import NodeStatus
from horizon_server.records.account import Principal
from horizon_server.records.dataset import DatasetRecord
from horizon_server.records.job import CheckpointRecord, JobRecord, JobState
from horizon_server.records.model import ModelRecord


class AccountsPort(Protocol):
    """Turns a token into a caller."""

    async def authenticate(self, token: str, /) -> Principal:
        """Return the caller; raises Unauthenticated."""
        ...


class JobsPort(Protocol):
    """Jobs as their services show them to a caller."""

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
    ) -> tuple[list[JobRecord], str]:
        """Return a page, newest first, and the token of the next page."""
        ...

    def watch(self, principal: Principal, key: str, after_sequence: int = ...) -> AsyncIterator[JobEvent]:
        """Yield events as they come; ends after the last one of an ended job."""
        ...

    async def checkpoints(self, principal: Principal, key: str) -> Sequence[CheckpointRecord]:
        """Return the complete checkpoints of a job, oldest first."""
        ...

    async def queue(self) -> Sequence[JobRecord]:
        """Return everybody's waiting and running jobs in the order of their turn."""
        ...


class DatasetsPort(Protocol):
    """Datasets as their service shows them to a caller."""

    async def list(
        self, principal: Principal, *, page_size: int = ..., page_token: str = ...
    ) -> tuple[Sequence[DatasetRecord], str]:
        """Return a page, newest first, and the token of the next page."""
        ...


class PreviewsPort(Protocol):
    """Rows of a dataset as a model would see them."""

    async def preview(self, principal: Principal, dataset: str, model: str, options: PreviewOptions) -> DatasetPreview:
        """Return some rows, rendered; raises NotFound, InvalidSpec, InvalidData, InvalidModel."""
        ...


class ModelsPort(Protocol):
    """Models as their service shows them to a caller."""

    async def list(
        self, principal: Principal, *, page_size: int = ..., page_token: str = ...
    ) -> tuple[Sequence[ModelRecord], str]:
        """Return a page, newest first, and the token of the next page."""
        ...


class NodePort(Protocol):
    """The machine."""

    async def describe(self, principal: Principal) -> NodeStatus:
        """Return the node as it stands now."""
        ...


class HttpServices(Protocol):
    """The services behind REST; `api.services.Services` is one."""

    @property
    def accounts(self) -> AccountsPort:
        """Who calls."""
        ...

    @property
    def jobs(self) -> JobsPort:
        """Jobs."""
        ...

    @property
    def datasets(self) -> DatasetsPort:
        """Datasets."""
        ...

    @property
    def previews(self) -> PreviewsPort:
        """Rendered rows."""
        ...

    @property
    def models(self) -> ModelsPort:
        """Models."""
        ...

    @property
    def node(self) -> NodePort:
        """The node."""
        ...

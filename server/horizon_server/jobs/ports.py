"""What jobs need from the outside, as Protocols: a store, the resources a spec names, and somebody who watches for metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from horizon_server.records.account import Principal
from horizon_server.spec import JobSpec


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

"""What an attempt works with: the files on this node that a job's ids stand for, and what their preparation is given and gives back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horizon_server.records.job import JobRecord
from horizon_server.spec import JobSpec


@dataclass(frozen=True, kw_only=True)
class DatasetFiles:
    """A READY dataset as the preparation needs it. `files` are the names its user knows and where the bytes are."""

    dataset_id: str
    digest: str
    format: str
    field_map: dict[str, str]
    num_rows: int
    files: tuple[tuple[str, Path], ...]


@dataclass(frozen=True, kw_only=True)
class JobInputs:
    """The model and the datasets of one job."""

    model: Path
    dataset: DatasetFiles
    evaluation: DatasetFiles | None


FindInputs = Callable[[JobRecord], Awaitable[JobInputs]]


@dataclass(frozen=True, kw_only=True)
class PreparationCall:
    """What the preparation child is to do: the folder it makes, whether that is there already, and its request.

    `evaluation` is where the rows held out will be, or None where none are.
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


Recipe = Callable[[JobSpec, DatasetFiles, Path], PreparationCall]
"""How a dataset is prepared for a model. Reads the tokenizer's files: call it in a thread. Raises InvalidModel without a tokenizer."""

"""Pushed datasets and models, as the server passes them around: an owner, a name, files by content, and whether they were checked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import ClassVar, Self

from horizon_server.records.blob import BlobFile


@dataclass(frozen=True, kw_only=True)
class PushedRecord(ABC):
    """One pushed resource. Until it is `ready` its contents are missing or unchecked; from then on it never changes."""

    kind: ClassVar[str]
    """What users call it: dataset or model. Its id is the field `<kind>_id`."""

    owner: str
    name: str
    files: tuple[BlobFile, ...]
    ready: bool = False
    digest: str = ""
    """sha256 over the files' paths and contents, and over what else decides how they are read."""
    created_s: float = 0.0

    @property
    def id(self) -> str:
        """Its stable id."""
        return str(getattr(self, f"{self.kind}_id"))

    @property
    def state(self) -> str:
        """READY or UPLOADING."""
        return "READY" if self.ready else "UPLOADING"

    @property
    def size_bytes(self) -> int:
        """Bytes over all files."""
        return sum(file.size_bytes for file in self.files)

    @property
    @abstractmethod
    def announcement(self) -> object:
        """What makes two create calls the same call, as plain data."""

    @abstractmethod
    def same_content(self, other: Self) -> bool:
        """Whether a push of the one is a repeat of a push of the other."""


@dataclass(frozen=True, kw_only=True)
class DatasetRecord(PushedRecord):
    """One dataset."""

    kind: ClassVar[str] = "dataset"

    dataset_id: str
    format: str
    """Wire name of the format: as announced until ready, then as found in the data, never auto."""
    field_map: dict[str, str]
    num_rows: int = 0

    @property
    def announcement(self) -> object:
        """What makes two create calls the same call, as plain data. The order of the files is that of the rows."""
        return [self.name, self.format, self.field_map, [asdict(file) for file in self.files]]

    def same_content(self, other: Self) -> bool:
        """Whether a push of the one is a repeat of a push of the other; `auto` is the same as the format that was found."""
        same_format = self.format == other.format or "auto" in (self.format, other.format)
        return same_format and self.field_map == other.field_map and self.files == other.files


@dataclass(frozen=True, kw_only=True)
class ModelRecord(PushedRecord):
    """One model."""

    kind: ClassVar[str] = "model"

    model_id: str
    architecture: str = ""
    """model_type of its config.json; known when ready."""
    num_parameters: int = 0

    @property
    def announcement(self) -> object:
        """What makes two create calls the same call, as plain data, in whatever order the files are named."""
        return [self.name, [asdict(file) for file in sorted(self.files, key=lambda file: file.path)]]

    def same_content(self, other: Self) -> bool:
        """Whether a push of the one is a repeat of a push of the other, in whatever order the files are named."""
        return set(self.files) == set(other.files)

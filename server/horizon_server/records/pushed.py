"""What pushed datasets and models have in common: an owner, a name, files by content, and whether the files were checked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
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

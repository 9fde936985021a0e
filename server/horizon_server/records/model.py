"""A pushed model folder, as the server passes it around."""

from __future__ import annotations

from dataclasses import dataclass

from horizon_server.records.blob import BlobFile


@dataclass(frozen=True, kw_only=True)
class ModelRecord:
    """One model as it stands. Until it is `ready` its files are missing or unchecked; from then on it never changes."""

    model_id: str
    owner: str
    name: str
    files: tuple[BlobFile, ...]
    ready: bool = False
    architecture: str = ""
    """model_type of its config.json; known when ready."""
    num_parameters: int = 0
    digest: str = ""
    """sha256 over the files' paths and contents."""
    created_s: float = 0.0

    @property
    def id(self) -> str:
        """Its stable id."""
        return self.model_id

    @property
    def state(self) -> str:
        """READY or UPLOADING."""
        return "READY" if self.ready else "UPLOADING"

    @property
    def size_bytes(self) -> int:
        """Bytes over all files."""
        return sum(file.size_bytes for file in self.files)

    def same_content(self, other: ModelRecord) -> bool:
        """Whether a push of the one is a repeat of a push of the other, in whatever order the files are named."""
        return set(self.files) == set(other.files)

"""A pushed dataset, as the server passes it around."""

from __future__ import annotations

from dataclasses import dataclass

from horizon_server.records.blob import BlobFile


@dataclass(frozen=True, kw_only=True)
class DatasetRecord:
    """One dataset as it stands. Until it is `ready` its contents are missing or unchecked; from then on it never changes."""

    dataset_id: str
    owner: str
    name: str
    format: str
    """Wire name of the format: as announced until ready, then as found in the data, never auto."""
    field_map: dict[str, str]
    files: tuple[BlobFile, ...]
    ready: bool = False
    num_rows: int = 0
    digest: str = ""
    """sha256 over format, map and the files' contents."""
    created_s: float = 0.0

    @property
    def id(self) -> str:
        """Its stable id."""
        return self.dataset_id

    @property
    def state(self) -> str:
        """READY or UPLOADING."""
        return "READY" if self.ready else "UPLOADING"

    @property
    def size_bytes(self) -> int:
        """Bytes over all files."""
        return sum(file.size_bytes for file in self.files)

    def same_content(self, other: DatasetRecord) -> bool:
        """Whether a push of the one is a repeat of a push of the other; `auto` is the same as what it was found to be."""
        same_format = self.format == other.format or "auto" in (self.format, other.format)
        return same_format and self.field_map == other.field_map and self.files == other.files

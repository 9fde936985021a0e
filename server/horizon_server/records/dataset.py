"""A pushed dataset, as the server passes it around."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar, Self

from horizon_server.records.pushed import PushedRecord


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

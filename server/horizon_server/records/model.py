"""A pushed model folder, as the server passes it around."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar, Self

from horizon_server.records.pushed import PushedRecord


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

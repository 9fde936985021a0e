"""Many violations, kept in bounded memory: the first hundred and the count of all.

Owns the sentence in which data is refused. Must not know what was wrong.
"""

from __future__ import annotations

from collections.abc import Iterable

from horizon_server.errors import FieldViolation, InvalidData

MAX_KEPT = 100


class ViolationTally:
    """The first 100 violations of a file or dataset, and how many there were."""

    def __init__(self) -> None:
        self.kept: list[FieldViolation] = []
        self.total = 0

    def add(self, violations: Iterable[FieldViolation]) -> None:
        """Count these, keeping them while there is room."""
        for violation in violations:
            self.total += 1
            if len(self.kept) < MAX_KEPT:
                self.kept.append(violation)

    def refuse(self, name: str) -> None:
        """Raise InvalidData with the first problem and their number, unless there were none."""
        if not self.total:
            return
        count = "the only problem found" if self.total == 1 else f"the first of {self.total} problems"
        raise InvalidData(f"{name}: {self.kept[0].description} ({count})", violations=self.kept)

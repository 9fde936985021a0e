"""How much data a job's pass before the first step goes over: counted once it is prepared, before that estimated from its files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Text of most languages that models are trained on, with its share of JSON.
_BYTES_PER_TOKEN = 4


@dataclass(frozen=True, kw_only=True)
class DataSize:
    """Tokens of all documents, trained and evaluated."""

    num_tokens: int
    is_estimated: bool = False

    @classmethod
    def estimated(cls, *, num_bytes: int, num_rows: int, documents_per_row: int, sequence_length: int) -> DataSize:
        """Estimate the tokens of files: four bytes each, half of a row in all of its documents, and none above the sequence length."""
        of_bytes = num_bytes * (1 + documents_per_row) // (2 * _BYTES_PER_TOKEN)
        return cls(num_tokens=min(of_bytes, num_rows * documents_per_row * sequence_length), is_estimated=True)

    @classmethod
    def total(cls, sizes: Iterable[DataSize]) -> DataSize:
        """Add up the data of several files."""
        found = list(sizes)
        return cls(
            num_tokens=sum(size.num_tokens for size in found), is_estimated=any(size.is_estimated for size in found)
        )

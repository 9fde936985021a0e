"""What became of a batch of rows, in a form that is cheap to send from one process to another and to append to a file.

Must not know tokenizers or folders.
"""

from __future__ import annotations

import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from horizon_server.datasets.documents import Document
from horizon_server.datasets.tokenization import TokenizedRow
from horizon_server.errors import FieldViolation


@dataclass(kw_only=True)
class DocumentColumns:
    """Documents laid end to end: their tokens, their masks and their lengths."""

    ids: array.array[int] = field(default_factory=lambda: array.array("i"))
    trained: bytearray = field(default_factory=bytearray)
    lengths: array.array[int] = field(default_factory=lambda: array.array("q"))
    num_targets: int = 0

    def add(self, document: Document) -> None:
        """Append one document."""
        assert document.num_targets, "every document has something to train on"
        self.ids += document.ids
        # Nothing precedes a document's first token, so it is never a target.
        self.trained += b"\0" + document.trained[1:]
        self.lengths.append(len(document.ids))
        self.num_targets += document.num_targets


@dataclass(kw_only=True)
class TokenBatch:
    """Documents for training and evaluation, and the counts and sentences of the report."""

    num_rows: int = 0
    train: DocumentColumns = field(default_factory=DocumentColumns)
    evaluation: DocumentColumns = field(default_factory=DocumentColumns)
    num_eval_rows: int = 0
    num_truncated_rows: int = 0
    num_cut_tokens: int = 0
    violations: list[FieldViolation] = field(default_factory=list)
    left_out: list[FieldViolation] = field(default_factory=list)

    def add_rows(self, rows: Iterable[TokenizedRow]) -> TokenBatch:
        """Append what became of some rows, and return the batch."""
        for row in rows:
            self.num_rows += 1
            self.violations += row.violations
            self.left_out += [row.left_out] if row.left_out else []
            self.num_truncated_rows += row.num_cut_tokens > 0
            self.num_cut_tokens += row.num_cut_tokens
            self.num_eval_rows += row.held_out and bool(row.documents)
            side = self.evaluation if row.held_out else self.train
            for document in row.documents:
                side.add(document)
        return self

"""The tokens of a step as the schedule needs them: laid end to end, embedding ids renumbered, targets listed.

Owns that rearrangement, done on the host before anything is queued.

Shapes: N = tokens of the step, T = tokens of one micro-batch, R = distinct ids, S = supervised tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from horizon_server.engine.device.protocol import Device
from horizon_server.engine.micro_batch import IGNORED_LABEL, MicroBatch


@dataclass(frozen=True, kw_only=True)
class StepTokens:
    """All micro-batches of a step. `rows_R` stays on the host; the rest, a copy of it included, is where compute reads it."""

    spans: tuple[slice, ...]
    rows_R: Tensor
    placed_rows_R: Tensor
    row_ids_N: Tensor
    position_ids_N: Tensor
    supervised_S: Tensor
    targets_S: Tensor

    @classmethod
    def of(cls, micro_batches: Sequence[MicroBatch], device: Device, *, num_rows: int | None = None) -> StepTokens:
        """Join the micro-batches in the order given. With `num_rows`, ids keep their numbers in a table of `num_rows` rows."""
        assert micro_batches, "a step has at least one micro-batch"
        spans, start = [], 0
        for micro_batch in micro_batches:
            spans.append(slice(start, start + micro_batch.num_tokens))
            start += micro_batch.num_tokens
        ids_N = torch.cat([m.input_ids_T for m in micro_batches])
        if num_rows is None:
            rows_R, row_ids_N = torch.unique(ids_N, return_inverse=True)
        else:
            rows_R, row_ids_N = torch.arange(num_rows), ids_N
        labels_N = torch.cat([m.labels_T for m in micro_batches])
        supervised_S = (labels_N != IGNORED_LABEL).nonzero()[:, 0]
        return cls(
            spans=tuple(spans),
            rows_R=rows_R,
            placed_rows_R=device.place(rows_R),
            row_ids_N=device.place(row_ids_N),
            position_ids_N=device.place(torch.cat([m.position_ids_T for m in micro_batches])),
            supervised_S=device.place(supervised_S),
            targets_S=device.place(labels_N[supervised_S]),
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return self.row_ids_N.numel()

    @property
    def num_targets(self) -> int:
        """Supervised tokens of the step, by which every chunk of the loss is scaled."""
        return self.targets_S.numel()

    def row_of(self, token_id: int | None) -> int | None:
        """The row that a token id was renumbered to, if the step uses it."""
        found = (self.rows_R == token_id).nonzero() if token_id is not None else torch.empty(0)
        return int(found[0]) if found.numel() else None

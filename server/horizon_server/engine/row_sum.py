"""The gradients that several passes have for rows of a table, added up.

Shapes: V = rows of the table, D = its width, R = rows with a gradient.
"""

from __future__ import annotations

import torch

from horizon_server.store.adamw import RowGradient


class RowSum:
    """Has room for all rows of a table of this shape, [V, D]; memory of rows that have no gradient is not touched.

    Thread: one at a time.
    """

    def __init__(self, num_rows: int, width: int) -> None:
        self._values_VD = torch.empty(num_rows, width)
        self._rows_V = torch.empty(num_rows, dtype=torch.int64)
        self._place_V = torch.full((num_rows,), -1)
        """Where each row's values are; -1 where it has none."""
        self._num_rows = 0

    @property
    def gradient(self) -> RowGradient:
        """The sum, in the memory that the next sum uses too. Rows have the order in which they came first."""
        return RowGradient(rows_R=self._rows_V[: self._num_rows], values_RD=self._values_VD[: self._num_rows])

    def forget(self) -> None:
        """Begin a new sum."""
        self._place_V[self._rows_V[: self._num_rows]] = -1
        self._num_rows = 0

    def add(self, gradient: RowGradient) -> None:
        """Add the gradient of distinct rows, fp32."""
        places_R = self._place_V[gradient.rows_R]
        known, new = (places_R >= 0).nonzero()[:, 0], (places_R < 0).nonzero()[:, 0]
        self._values_VD.index_add_(0, places_R[known], gradient.values_RD[known])
        start, end = self._num_rows, self._num_rows + new.numel()
        rows_R = gradient.rows_R[new]
        self._rows_V[start:end] = rows_R
        self._place_V[rows_R] = torch.arange(start, end)
        torch.index_select(gradient.values_RD, 0, new, out=self._values_VD[start:end])
        self._num_rows = end

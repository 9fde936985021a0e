"""From a prepared dataset on disk to the micro-batches of step i: order, packing and labels.

Owns the order in which documents are seen. Everything follows from (dataset, arguments, i): the cursor of a checkpoint is the number
of its step, so a resume asks for the next i.

Shapes: N tokens of the dataset, D documents, T tokens of one row.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from horizon_server.engine.micro_batch import IGNORED_LABEL, MicroBatch
from horizon_server.engine.packing import PackedRows, SingleRows
from horizon_server.engine.permutation import Keys, permutation_keys, permuted
from horizon_server.errors import InvalidData
from horizon_server.store.prepared import open_prepared

# What is permuted; part of the key of its permutation.
_ROWS, _DOCUMENTS = 1, 2
_ROWS_AT_ONCE = 1 << 16


class PreparedDataset:
    """The tokens of a prepared dataset, mapped from disk and never loaded as a whole."""

    def __init__(
        self,
        *,
        input_ids_N: NDArray[np.int32],
        trained_N: NDArray[np.uint8],
        document_starts: NDArray[np.int64],
        report: dict[str, Any],
    ) -> None:
        if len(document_starts) < 2:
            raise InvalidData("the prepared dataset holds no documents; prepare the dataset again")
        if document_starts[0] != 0 or bool((np.diff(document_starts) <= 0).any()):
            raise InvalidData(
                "the prepared dataset's document_starts do not increase from 0; prepare the dataset again"
            )
        if not len(input_ids_N) == len(trained_N) == int(document_starts[-1]):
            raise InvalidData("the prepared dataset's tensors differ in length; prepare the dataset again")
        self.report = report
        self.document_lengths = np.diff(document_starts)
        self._input_ids_N = input_ids_N
        self._trained_N = trained_N
        self._document_starts = document_starts

    @classmethod
    def open(cls, folder: Path) -> PreparedDataset:
        """Map the planes that the preparation child wrote into `folder`.

        Raises: InvalidData where the folder is incomplete or inconsistent.
        """
        planes, report = open_prepared(folder)
        return cls(
            input_ids_N=planes["input_ids"],
            trained_N=planes["trained"],
            document_starts=planes["document_starts"],
            report=report,
        )

    @property
    def num_documents(self) -> int:
        """Documents: what is never split, and never sees its neighbours."""
        return len(self.document_lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self._document_starts[-1])

    def micro_batch(self, documents: Iterable[int]) -> MicroBatch:
        """Join these documents to one row."""
        ids, positions, labels, lengths = [], [], [], []
        for document in documents:
            begin, end = int(self._document_starts[document]), int(self._document_starts[document + 1])
            # The planes are int32 to halve the file; embedding tables are indexed with int64.
            input_ids = self._input_ids_N[begin:end].astype(np.int64)
            ids.append(input_ids)
            positions.append(np.arange(end - begin, dtype=np.int64))
            # A token's label is the next one; the last token of a document has none, so no label crosses documents.
            targets = np.full(len(input_ids), IGNORED_LABEL, dtype=np.int64)
            targets[:-1] = np.where(self._trained_N[begin + 1 : end] != 0, input_ids[1:], IGNORED_LABEL)
            labels.append(targets)
            lengths.append(end - begin)
        return MicroBatch(
            input_ids_T=torch.from_numpy(np.concatenate(ids)),
            position_ids_T=torch.from_numpy(np.concatenate(positions)),
            labels_T=torch.from_numpy(np.concatenate(labels)),
            document_lengths=tuple(lengths),
        )


class StepPlan:
    """Which documents make up step i, for every i of a run.

    Each epoch is its own seeded order: documents are packed into rows of at most `sequence_length` tokens, the rows follow a
    permutation and are grouped into steps of at most `tokens_per_step` real tokens (a single longer row makes a step of its own). The
    last step of an epoch is smaller; nothing is dropped or repeated within an epoch. With `max_steps` epochs follow each other until
    the steps are reached; a fraction of `epochs` takes that share of the last epoch's steps.

    `packing=False` gives every document its own row; `packing_limit` is the most tokens of a row with more than one document.
    `shuffle=False` keeps the order of the file: for evaluation.
    Thread: not thread-safe; a plan caches the epoch it is in.
    """

    ORDER = 2
    """Raised whenever the same arguments would give another order: a checkpoint continues only in the order that it began in."""

    def __init__(
        self,
        dataset: PreparedDataset,
        *,
        sequence_length: int,
        tokens_per_step: int,
        packing: bool = True,
        packing_limit: int | None = None,
        seed: int = 0,
        epochs: float | None = None,
        max_steps: int | None = None,
        shuffle: bool = True,
    ) -> None:
        assert sequence_length > 0, "sequence_length is positive"
        assert tokens_per_step > 0, "tokens_per_step is positive"
        assert seed >= 0, "seed is not negative"
        assert (epochs is None) != (max_steps is None), "give epochs or max_steps, not both"
        assert (epochs or max_steps or 0) > 0, "epochs and max_steps are positive"
        _check_lengths(dataset, sequence_length)
        self._dataset = dataset
        # A row longer than a whole step would overrun it, so rows are never packed beyond it.
        self._row_limit = min(sequence_length, tokens_per_step, packing_limit or sequence_length)
        self._tokens_per_step = tokens_per_step
        lengths = dataset.document_lengths
        self._rows = PackedRows(lengths, self._row_limit) if packing else SingleRows(lengths)
        self._seed = seed
        self._shuffle = shuffle
        self._first_steps = [0]  # first_steps[e] is the number of steps before epoch e
        self._epoch: tuple[int, list[int]] | None = None  # the one at hand, and the first row of each of its steps
        self.num_steps = max_steps if max_steps is not None else self._steps_of_epochs(epochs or 0)

    @property
    def num_rows(self) -> int:
        """Rows of an epoch."""
        return self._rows.num_rows

    @property
    def packing_efficiency(self) -> float:
        """Share of an epoch's rows that holds tokens, were every row padded to its limit; 1 = full rows."""
        longest = int(self._dataset.document_lengths.max())
        return self._dataset.num_tokens / (self._rows.num_rows * max(self._row_limit, longest))

    def step(self, i: int) -> list[MicroBatch]:
        """Return the micro-batches of step i (from 0); the same in any order of calls and in any process."""
        return [self._dataset.micro_batch(documents) for documents in self.documents_of(i)]

    def documents_of(self, i: int) -> list[list[int]]:
        """Return the document numbers of step i, row by row."""
        epoch, within = self._locate(i)
        starts = self._step_starts(epoch)
        rows = self._row_order(epoch, starts[within], starts[within + 1])
        return self._rows.documents_of(rows, self._keys(epoch, _DOCUMENTS))

    def epoch_of(self, i: int) -> float:
        """Epochs done once step i is done: 0.25 after a quarter of the first epoch's steps, 1.0 at its end."""
        epoch, within = self._locate(i)
        return epoch + (within + 1) / self._steps_in(epoch)

    def _locate(self, i: int) -> tuple[int, int]:
        assert 0 <= i < self.num_steps, f"step {i} is outside 0..{self.num_steps - 1}"
        while self._first_steps[-1] <= i:
            self._steps_before(len(self._first_steps))
        epoch = bisect.bisect_right(self._first_steps, i) - 1
        return epoch, i - self._first_steps[epoch]

    def _steps_of_epochs(self, epochs: float) -> int:
        # A fraction takes that share of the last epoch's steps, at least one.
        whole = int(epochs)
        steps = self._steps_before(whole)
        return steps if epochs == whole else steps + math.ceil((epochs - whole) * self._steps_in(whole))

    def _steps_before(self, epoch: int) -> int:
        while len(self._first_steps) <= epoch:
            self._first_steps.append(self._first_steps[-1] + self._steps_in(len(self._first_steps) - 1))
        return self._first_steps[epoch]

    def _steps_in(self, epoch: int) -> int:
        return len(self._step_starts(epoch)) - 1

    def _step_starts(self, epoch: int) -> list[int]:
        """Return the first row of each step of an epoch, and the number of its rows."""
        # One epoch is kept: a run asks for its steps one after the other.
        if self._epoch is None or self._epoch[0] != epoch:
            starts, filled = [0], 0
            # In parts, so that the order of ten million rows is never in memory as a whole.
            for begin in range(0, self.num_rows, _ROWS_AT_ONCE):
                order = self._row_order(epoch, begin, min(begin + _ROWS_AT_ONCE, self.num_rows))
                filled = _fill_steps(starts, begin, filled, self._rows.tokens_of(order), self._tokens_per_step)
            self._epoch = (epoch, [*starts, self.num_rows])
        return self._epoch[1]

    def _row_order(self, epoch: int, begin: int, end: int) -> NDArray[np.int64]:
        places = np.arange(begin, end)
        keys = self._keys(epoch, _ROWS)
        return places if keys is None else permuted(places, self.num_rows, keys)

    def _keys(self, epoch: int, what: int) -> Keys | None:
        return permutation_keys(self._seed, epoch, what) if self._shuffle else None


def _fill_steps(starts: list[int], begin: int, filled: int, tokens: NDArray[np.int64], limit: int) -> int:
    """Continue filling steps with rows of `tokens` tokens each, from row `begin`; returns the tokens in the last, open step."""
    ends = np.cumsum(tokens)
    before = -filled
    while (row := int(np.searchsorted(ends, before + limit, side="right"))) < len(ends):
        if begin + row == starts[-1]:
            # The row alone is longer than a step.
            row += 1
            if row == len(ends):
                break
        starts.append(begin + row)
        before = int(ends[row - 1]) if row else 0
    return int(ends[-1]) - before


def _check_lengths(dataset: PreparedDataset, sequence_length: int) -> None:
    longest = int(dataset.document_lengths.max())
    if longest > sequence_length:
        raise InvalidData(
            f"the dataset was prepared with documents of up to {longest} tokens, train.sequence_length is "
            f"{sequence_length}; prepare the dataset again with this sequence_length"
        )

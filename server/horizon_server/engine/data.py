"""From a prepared dataset on disk to the micro-batches of step i: order, packing and labels.

Owns the order in which documents are seen and how they share rows. Must not know how they were tokenised, what a job
is or how a step is computed. Everything follows from (dataset, arguments, i): there is no cursor, so a resume asks for
the next i.

Shapes: N tokens of the dataset, D documents, T tokens of one row.
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from horizon_server.engine.micro_batch import IGNORED_LABEL, MicroBatch
from horizon_server.errors import InvalidData

TOKENS_FILE = "tokens.safetensors"
REPORT_FILE = "report.json"

# Documents are packed best-fit among this many neighbours of the permutation: enough to fill rows, few enough to stay
# random.
PACKING_WINDOW = 512

_DTYPES = {"input_ids": np.dtype(np.int32), "trained": np.dtype(np.uint8), "document_starts": np.dtype(np.int64)}


class PreparedDataset:
    """The tokens of a prepared dataset, mapped from disk and never loaded as a whole.

    Raises: InvalidData where the folder is incomplete or inconsistent.
    """

    def __init__(
        self,
        *,
        input_ids_N: NDArray[np.int32],
        trained_N: NDArray[np.uint8],
        document_starts: NDArray[np.int64],
        report: dict[str, Any],
    ) -> None:
        _check_planes(input_ids_N, trained_N, document_starts)
        self.report = report
        self.document_lengths = np.diff(document_starts)
        self._input_ids_N = input_ids_N
        self._trained_N = trained_N
        self._document_starts = document_starts

    @classmethod
    def open(cls, folder: Path) -> PreparedDataset:
        """Map the tensors that the preparation child wrote into `folder`."""
        path = folder / TOKENS_FILE
        planes: dict[str, NDArray[Any]] = {}
        try:
            report = json.loads((folder / REPORT_FILE).read_text(encoding="utf-8"))
            with safe_open(path, framework="pt") as tensors:
                for name, dtype in _DTYPES.items():
                    planes[name] = tensors.get_tensor(name).numpy()
                    if planes[name].dtype != dtype:
                        raise InvalidData(
                            f"{path}: {name} is {planes[name].dtype}, expected {dtype}; prepare the dataset again"
                        )
        except (OSError, SafetensorError, json.JSONDecodeError) as error:
            raise InvalidData(f"{folder} is not a prepared dataset ({error}); prepare the dataset again") from error
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
        """Lay these documents end to end in one row."""
        ids, positions, labels, lengths = [], [], [], []
        for document in documents:
            begin, end = int(self._document_starts[document]), int(self._document_starts[document + 1])
            input_ids = self._input_ids_N[begin:end].astype(np.int64)
            ids.append(input_ids)
            positions.append(np.arange(end - begin, dtype=np.int64))
            labels.append(_labels(input_ids, self._trained_N[begin:end]))
            lengths.append(end - begin)
        return MicroBatch(
            input_ids_T=torch.from_numpy(np.concatenate(ids)),
            position_ids_T=torch.from_numpy(np.concatenate(positions)),
            labels_T=torch.from_numpy(np.concatenate(labels)),
            document_lengths=tuple(lengths),
        )


class StepPlan:
    """Which documents make up step i, for every i of a run.

    Each epoch is its own seeded permutation, packed into rows of at most `sequence_length` tokens, the rows grouped
    into steps of at most `tokens_per_step` real tokens (a single longer row makes a step of its own). The last step of
    an epoch is smaller; nothing is dropped or repeated within an epoch. With `max_steps` epochs follow each other until
    the steps are reached; a fraction of `epochs` takes that share of the last epoch's steps.

    `packing=False` gives every document its own row. `shuffle=False` keeps the order of the file: for evaluation.
    Thread: not thread-safe; a plan caches the epoch it is in.
    """

    def __init__(
        self,
        dataset: PreparedDataset,
        *,
        sequence_length: int,
        tokens_per_step: int,
        packing: bool = True,
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
        self._row_limit = min(sequence_length, tokens_per_step)
        self._tokens_per_step = tokens_per_step
        self._packing = packing
        self._seed = seed
        self._shuffle = shuffle
        self._first_steps = [0]  # first_steps[e] is the number of steps before epoch e
        self._epoch_plan: tuple[int, _EpochPlan] | None = None
        self.num_steps = max_steps if max_steps is not None else self._steps_of_epochs(epochs or 0)

    @property
    def packing_efficiency(self) -> float:
        """Share of the first epoch's rows that holds tokens, were every row padded to its limit; 1 = full rows."""
        lengths = self._plan_of(0).row_tokens
        return float(lengths.sum()) / (len(lengths) * max(self._row_limit, int(lengths.max())))

    def step(self, i: int) -> list[MicroBatch]:
        """Return the micro-batches of step i (from 0); the same in any order of calls and in any process."""
        return [self._dataset.micro_batch(documents) for documents in self.documents_of(i)]

    def documents_of(self, i: int) -> list[list[int]]:
        """Return the document numbers of step i, row by row."""
        epoch, within = self._locate(i)
        return self._plan_of(epoch).rows_of_step(within)

    def epoch_of(self, i: int) -> float:
        """Epochs done once step i is done: 0.25 after a quarter of the first epoch's steps, 1.0 at its end."""
        epoch, within = self._locate(i)
        return epoch + (within + 1) / self._plan_of(epoch).num_steps

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
        return steps if epochs == whole else steps + math.ceil((epochs - whole) * self._plan_of(whole).num_steps)

    def _steps_before(self, epoch: int) -> int:
        while len(self._first_steps) <= epoch:
            self._first_steps.append(self._first_steps[-1] + self._plan_of(len(self._first_steps) - 1).num_steps)
        return self._first_steps[epoch]

    def _plan_of(self, epoch: int) -> _EpochPlan:
        if self._epoch_plan is None or self._epoch_plan[0] != epoch:
            self._epoch_plan = (epoch, self._build_plan(epoch))
        return self._epoch_plan[1]

    def _build_plan(self, epoch: int) -> _EpochPlan:
        lengths = self._dataset.document_lengths
        order = np.arange(len(lengths))
        random = np.random.default_rng((self._seed, epoch))
        if self._shuffle:
            order = random.permutation(order)
        rows = _pack(order, lengths, self._row_limit) if self._packing else [[int(document)] for document in order]
        if self._shuffle:
            # Best-fit puts a window's long documents into its first rows; steps must not inherit that pattern.
            rows = [rows[index] for index in random.permutation(len(rows))]
        row_tokens = np.array([int(lengths[row].sum()) for row in rows], dtype=np.int64)
        return _EpochPlan(rows=rows, row_tokens=row_tokens, step_starts=_group(row_tokens, self._tokens_per_step))


@dataclass(frozen=True, kw_only=True)
class _EpochPlan:
    """Rows of one epoch in order; step k holds rows step_starts[k] to step_starts[k + 1]."""

    rows: list[list[int]]
    row_tokens: NDArray[np.int64]
    step_starts: list[int]

    @property
    def num_steps(self) -> int:
        return len(self.step_starts) - 1

    def rows_of_step(self, k: int) -> list[list[int]]:
        return self.rows[self.step_starts[k] : self.step_starts[k + 1]]


def _pack(order: NDArray[np.int64], lengths: NDArray[np.int64], row_limit: int) -> list[list[int]]:
    rows: list[list[int]] = []
    for begin in range(0, len(order), PACKING_WINDOW):
        rows += _pack_window(order[begin : begin + PACKING_WINDOW], lengths, row_limit)
    return rows


def _pack_window(window: NDArray[np.int64], lengths: NDArray[np.int64], row_limit: int) -> list[list[int]]:
    # Best-fit decreasing: the longest document first, each into the row that it leaves fullest.
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for document in window[np.argsort(-lengths[window], kind="stable")]:
        length = int(lengths[document])
        slot = bisect.bisect_left(open_rows, (length, -1))
        if slot < len(open_rows):
            free, row = open_rows.pop(slot)
        else:
            free, row = row_limit, len(rows)
            rows.append([])
        rows[row].append(int(document))
        bisect.insort(open_rows, (free - length, row))
    return rows


def _group(row_tokens: NDArray[np.int64], tokens_per_step: int) -> list[int]:
    starts = [0]
    filled = 0
    for row, tokens in enumerate(row_tokens.tolist()):
        if filled and filled + tokens > tokens_per_step:
            starts.append(row)
            filled = 0
        filled += tokens
    return [*starts, len(row_tokens)]


def _labels(input_ids: NDArray[np.int64], trained: NDArray[np.uint8]) -> NDArray[np.int64]:
    labels = np.full(len(input_ids), IGNORED_LABEL, dtype=np.int64)
    labels[:-1] = np.where(trained[1:] != 0, input_ids[1:], IGNORED_LABEL)
    return labels


def _check_planes(
    input_ids_N: NDArray[np.int32], trained_N: NDArray[np.uint8], document_starts: NDArray[np.int64]
) -> None:
    if len(document_starts) < 2:
        raise InvalidData("the prepared dataset holds no documents; prepare the dataset again")
    if document_starts[0] != 0 or bool((np.diff(document_starts) <= 0).any()):
        raise InvalidData("the prepared dataset's document_starts do not increase from 0; prepare the dataset again")
    if not len(input_ids_N) == len(trained_N) == int(document_starts[-1]):
        raise InvalidData("the prepared dataset's tensors differ in length; prepare the dataset again")


def _check_lengths(dataset: PreparedDataset, sequence_length: int) -> None:
    longest = int(dataset.document_lengths.max())
    if longest > sequence_length:
        raise InvalidData(
            f"the dataset was prepared with documents of up to {longest} tokens, train.sequence_length is "
            f"{sequence_length}; prepare the dataset again with this sequence_length"
        )

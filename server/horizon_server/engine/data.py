"""From a prepared dataset on disk to the micro-batches of step i: order, packing and labels.

Everything follows from (dataset, arguments, i): the cursor of a checkpoint is the number of its step, so a resume asks
for the next i.

Shapes: N tokens of the dataset, D documents, M supervised tokens of the dataset, T tokens of one row, K documents and S
supervised tokens of a selection.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from horizon_formats.formats import DataKind
from horizon_server.engine.micro_batch import IGNORED_LABEL, MicroBatch
from horizon_server.errors import InvalidData
from horizon_server.store.prepared import WEIGHTS, group_size_of, open_prepared
from horizon_server.store.row_packing import DOCUMENTS, EpochSteps, permutation_keys, rows_of_groups

# Of a run's order: its first steps, and as many over a whole epoch.
_DIGESTED_STEPS = 64


class PreparedDataset:
    """The tokens of a prepared dataset, mapped from disk and never loaded as a whole.

    A document is never split, and never sees its neighbours. `kind` says what the documents are:

    * `text`: each is by itself.
    * `preference`: document 2i is chosen over document 2i + 1.
    * `kto`: document 2i is a row, labelled desirable or undesirable (`labels_of`); 2i + 1 joins its prompt with the
      completion of another row, and is labelled mismatched.
    * `samples`: each was sampled by a policy, with its log-probabilities and advantages (`old_logprobs_of`,
      `advantages_of`).

    Targets of `text` may count more or less than others (`weights_of`).

    `group_size` documents belong together: give it to `StepPlan`.
    """

    def __init__(
        self,
        *,
        input_ids_N: NDArray[np.int32],
        trained_N: NDArray[np.uint8],
        document_starts: NDArray[np.int64],
        report: dict[str, Any],
        labels_D: NDArray[np.int8] | None = None,
        old_logprobs_M: NDArray[np.float32] | None = None,
        advantages_M: NDArray[np.float32] | None = None,
        weights_M: NDArray[np.float32] | None = None,
    ) -> None:
        if len(document_starts) < 2:
            raise InvalidData("the prepared dataset holds no documents; prepare the dataset again")
        if document_starts[0] != 0 or bool((np.diff(document_starts) <= 0).any()):
            raise InvalidData(
                "the prepared dataset's document_starts do not increase from 0; prepare the dataset again"
            )
        if not len(input_ids_N) == len(trained_N) == int(document_starts[-1]):
            raise InvalidData("the prepared dataset's tensors differ in length; prepare the dataset again")
        self.report, self.kind = report, DataKind(report.get("kind", DataKind.TEXT))
        self.group_size = group_size_of(self.kind)
        self.document_lengths = np.diff(document_starts)
        self.num_documents, self.num_tokens = len(self.document_lengths), len(input_ids_N)
        if self.num_documents % self.group_size or (labels_D is not None and len(labels_D) != self.num_documents):
            raise InvalidData(
                f"the prepared dataset has {self.num_documents} documents, which do not match its kind, {self.kind}; "
                "prepare the dataset again"
            )
        self._labels_D, self._old_logprobs_M, self._advantages_M = labels_D, old_logprobs_M, advantages_M
        self._weights_M = weights_M
        self._input_ids_N, self._trained_N, self._document_starts = input_ids_N, trained_N, document_starts

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
            labels_D=planes.get("labels"),
            old_logprobs_M=planes.get("old_logprobs"),
            advantages_M=planes.get("advantages"),
            weights_M=planes.get(WEIGHTS),
        )

    def labels_of(self, documents: Iterable[int]) -> Tensor:
        """The labels of these documents of kind `kto`: 1 desirable, 0 undesirable, -1 mismatched. Shapes: [K], int8.

        Raises: InvalidData for another kind.
        """
        if self._labels_D is None:
            raise self._lacks("labels", DataKind.KTO)
        return torch.from_numpy(self._labels_D[list(documents)])

    def old_logprobs_of(self, documents: Iterable[int]) -> Tensor:
        """The log-probabilities that these documents of kind `samples` were sampled with, token by token. Shapes: [S],
        fp32.

        Raises: InvalidData for another kind.
        """
        if self._old_logprobs_M is None:
            raise self._lacks("recorded log-probabilities", DataKind.SAMPLES)
        return self._of_targets(self._old_logprobs_M, documents)

    def advantages_of(self, documents: Iterable[int]) -> Tensor:
        """The advantages of these documents of kind `samples`, token by token. Shapes: [S], fp32. Raises: InvalidData
        for another kind."""
        if self._advantages_M is None:
            raise self._lacks("advantages", DataKind.SAMPLES)
        return self._of_targets(self._advantages_M, documents)

    @property
    def answer_ends(self) -> dict[str, int]:
        """The tokens that end its trained answers, with their ids."""
        return dict(self.report.get("answer_ends", {}))

    @property
    def is_weighted(self) -> bool:
        """Whether some target has a weight other than 1."""
        return self._weights_M is not None

    def weights_of(self, documents: Iterable[int]) -> Tensor | None:
        """The weights of these documents, token by token; None where the data has none. Shapes: [S], fp32."""
        return None if self._weights_M is None else self._of_targets(self._weights_M, documents)

    def _of_targets(self, values_M: NDArray[np.float32], documents: Iterable[int]) -> Tensor:
        starts = self._target_starts
        if len(values_M) != starts[-1]:
            raise InvalidData(
                f"the prepared dataset has {len(values_M)} numbers for {starts[-1]} supervised tokens; prepare the "
                "dataset again"
            )
        # The empty one gives no documents a type and a shape.
        spans = [values_M[:0], *(values_M[starts[document] : starts[document + 1]] for document in documents)]
        return torch.from_numpy(np.concatenate(spans))

    def _lacks(self, what: str, kind: DataKind) -> InvalidData:
        return InvalidData(
            f"the dataset was prepared as {self.kind}, which has no {what}; use a dataset of kind {kind}"
        )

    @cached_property
    def _target_starts(self) -> NDArray[np.int64]:
        return np.concatenate([[0], np.cumsum(self.num_targets_of_documents)])

    @cached_property
    def num_targets_of_documents(self) -> NDArray[np.int64]:
        """How many tokens of each document are trained on. Reads the whole mask once. Shapes: [D]."""
        firsts = self._document_starts[:-1]
        # A document's first token is nobody's label, whatever its mask says.
        counts: NDArray[np.int64] = np.add.reduceat(self._trained_N != 0, firsts, dtype=np.int64)
        counts -= self._trained_N[firsts] != 0
        return counts

    def prompts(self, *, shorter_than: int) -> Iterator[DocumentPrompt]:
        """The documents with a prompt before their last trained tokens, in the file's order. Those of `shorter_than`
        tokens or more are left out: they may have been cut.
        """
        for document in np.flatnonzero(self.document_lengths < shorter_than):
            begin, end = int(self._document_starts[document]), int(self._document_starts[document + 1])
            trained_T = self._trained_N[begin:end] != 0
            places = np.flatnonzero(trained_T)
            if not len(places):
                continue
            last = int(places[-1])
            before = np.flatnonzero(~trained_T[:last])
            first = int(before[-1]) + 1 if len(before) else 0
            if first:
                ids = self._input_ids_N[begin:end].tolist()
                yield DocumentPrompt(
                    document=int(document), ids=tuple(ids[:first]), answer_ids=tuple(ids[first : last + 1])
                )

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


@dataclass(frozen=True, kw_only=True)
class DocumentPrompt:
    """A document as a question and its answer: the tokens before the last run of trained ones, and that run."""

    document: int
    ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


class StepPlan:
    """Which documents make up step i, for every i of a run.

    Each epoch is its own seeded order: documents are packed into rows of at most `sequence_length` tokens, the rows
    follow a permutation and are grouped into steps of at most `tokens_per_step` real tokens (a single longer row makes
    a step of its own). The last step of an epoch is smaller; nothing is dropped or repeated within an epoch. With
    `max_steps` epochs follow each other until the steps are reached; a fraction of `epochs` takes that share of the
    last epoch's steps, at least one.

    `packing=False` gives every document its own row; `packing_limit` is the most tokens of a row with more than one
    document. With `group_size` 2 the documents 2g and 2g + 1 are a pair (chosen and rejected): they are always in the
    same step, one after the other, in one row where it holds both. Shuffling moves pairs; a pair that is longer than a
    step makes a step of its own. `shuffle=False` keeps the order of the file: for evaluation. `packing_efficiency` is
    the share of an epoch's rows that would hold tokens if every row were padded to its limit.
    Thread: not thread-safe; a plan caches the epoch it is in.
    """

    # Raised whenever the same arguments would give another order: a checkpoint continues only in the order that it
    # began in.
    ORDER = 2

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
        group_size: int = 1,
    ) -> None:
        assert sequence_length > 0 and tokens_per_step > 0, "sequence_length and tokens_per_step are positive"
        assert seed >= 0, "seed is not negative"
        assert (epochs is None) != (max_steps is None), "give epochs or max_steps, not both"
        assert (epochs or max_steps or 0) > 0, "epochs and max_steps are positive"
        lengths = dataset.document_lengths
        longest = int(lengths.max())
        if longest > sequence_length:
            raise InvalidData(
                f"the dataset was prepared with documents of up to {longest} tokens, train.sequence_length is "
                f"{sequence_length}; prepare the dataset again with this sequence_length"
            )
        self.dataset, self._tokens_per_step, self._seed, self._shuffle = dataset, tokens_per_step, seed, shuffle
        # A row longer than a whole step would overrun it, so rows are never packed beyond it.
        row_limit = min(sequence_length, tokens_per_step, packing_limit or sequence_length)
        if len(lengths) % group_size:
            raise InvalidData(
                f"the dataset was prepared with {len(lengths)} documents, which are no groups of {group_size}; prepare "
                "the dataset again"
            )
        # What is packed and permuted are groups; the rows that they are in are taken apart again by `documents_of`.
        self._group_size, self._row_limit, self._packs = group_size, row_limit, packing
        self._rows, group_lengths = rows_of_groups(lengths, group_size=group_size, packing=packing, limit=row_limit)
        self.num_rows = self._rows.num_rows
        self.packing_efficiency = dataset.num_tokens / (self.num_rows * max(row_limit, int(group_lengths.max())))
        self._steps = EpochSteps(self._rows, tokens_per_step=tokens_per_step, seed=seed, shuffle=shuffle)
        self.num_steps = max_steps if max_steps is not None else self._steps.number(epochs or 0)

    @property
    def identity(self) -> str:
        """What decides which documents are in which row, and which rows in which step, of a dataset."""
        seed = self._seed if self._shuffle else None
        rows = f"rows {self._row_limit} {self._packs} groups {self._group_size}"
        return f"order {self.ORDER} {rows} steps {self._tokens_per_step} seed {seed}"

    def step(self, i: int) -> list[MicroBatch]:
        """Return the micro-batches of step i (from 0); the same in any order of calls and in any process."""
        return [self.dataset.micro_batch(documents) for documents in self.documents_of(i)]

    def documents_of(self, i: int) -> list[list[int]]:
        """Return the document numbers of step i, row by row."""
        epoch, within = self._locate(i)
        return self._documents(epoch, within)

    def first_epoch(self) -> Iterator[list[list[int]]]:
        """The document numbers of each step of the first epoch, row by row: every document once, also where the run
        ends before."""
        for within in range(self._steps.within(0)):
            yield self._documents(0, within)

    def _documents(self, epoch: int, within: int) -> list[list[int]]:
        rows = self._steps.rows_of(epoch, within)
        keys = permutation_keys(self._seed, epoch, DOCUMENTS) if self._shuffle else None
        found = self._rows.documents_of(rows, keys)
        return found if self._group_size == 1 else self._ungrouped(found)

    def _ungrouped(self, rows: list[list[int]]) -> list[list[int]]:
        """The documents of rows of groups; a row that the limit does not allow, which is one group, becomes a row per
        document."""
        parts: list[list[int]] = []
        for groups in rows:
            documents = [self._group_size * group + member for group in groups for member in range(self._group_size)]
            fits = int(self.dataset.document_lengths[documents].sum()) <= self._row_limit
            parts += [documents] if self._packs and fits else [[document] for document in documents]
        return parts

    def digest(self) -> str:
        """What names the order of the documents: the sha256 of those of some steps, row by row. Of plans with as many
        steps only, as it depends on their number where the first epoch is not run to its end.

        Steps are looked at, and not `ORDER`: what gives the same order is the same. Of the later epochs, every one is
        ordered in the same way; some are looked at, because a change may begin behind the first: the second, third,
        fifth, ninth and so on, so that the epochs of a long run on little data cost no time.
        """
        per_epoch = self._steps.within(0)
        num_steps = min(self.num_steps, per_epoch)
        chosen = sorted(
            {*range(min(num_steps, _DIGESTED_STEPS)), *range(0, num_steps, -(-num_steps // _DIGESTED_STEPS))}
        )
        digest = hashlib.sha256(str(num_steps).encode())
        for step in chosen:
            digest.update(json.dumps(self.documents_of(step)).encode())
        # Epochs have about as many steps. The last one is looked at too.
        last = -(-self.num_steps // per_epoch) - 1
        for epoch in sorted({last, *(2**k for k in range(last.bit_length()))} - {0}):
            num_steps = self._steps.within(epoch)
            for step in sorted({0, num_steps // 2, num_steps - 1}):
                digest.update(json.dumps(self._documents(epoch, step)).encode())
        return digest.hexdigest()

    def epoch_of(self, i: int) -> float:
        """Epochs done once step i is done: 0.25 after a quarter of the first epoch's steps, 1.0 at its end."""
        epoch, within = self._locate(i)
        return epoch + (within + 1) / self._steps.within(epoch)

    def _locate(self, i: int) -> tuple[int, int]:
        assert 0 <= i < self.num_steps, f"step {i} is outside 0..{self.num_steps - 1}"
        return self._steps.locate(i)

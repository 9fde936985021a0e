"""How much data a job goes over, in tokens and in steps: counted once it is prepared, before that estimated from its
files. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from horizon_server.spec import TrainSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Text of most languages that models are trained on, with its share of JSON.
_BYTES_PER_TOKEN = 4
# What text in a compressed file grows to, as gzip, zstd and Parquet shrink most of it.
_COMPRESSED, _EXPANSION = (".gz", ".zst", ".parquet"), 3
# Rows that many short documents are packed into are about this full.
_FULL = 0.98
# More documents, those of each epoch by themselves, are not counted one by one: the daemon answers a plan in a second.
_MOST_COUNTED = 2_000_000
_MOST_EPOCHS = 16


@dataclass(frozen=True, kw_only=True)
class DataSize:
    """Tokens of all documents, trained and evaluated, and the steps that the trained ones make; None where those were
    not asked for."""

    num_tokens: int
    is_estimated: bool = False
    num_steps: int | None = None
    may_have_weights: bool = True
    """Whether some target that is trained on may count more than another, which prepared data says."""

    @classmethod
    def estimated(
        cls,
        *,
        num_bytes: int,
        num_rows: int,
        documents_per_row: int,
        sequence_length: int,
        train: TrainSpec | None = None,
        is_split: bool = False,
    ) -> Self:
        """Estimate the tokens of files: four bytes each, half of a row in all of its documents, and none above the
        sequence length.

        With `train` the steps too. Of texts (`is_split`) all tokens are read, whatever the length of a row.
        """
        tokens = num_bytes * (1 + documents_per_row) // (2 * _BYTES_PER_TOKEN)
        num_documents = num_rows * documents_per_row
        if is_split:
            num_documents = max(num_rows, -(-tokens // sequence_length))
        elif num_rows:
            tokens = min(tokens, num_documents * sequence_length)
        steps = None if train is None else _estimated_steps(tokens, num_documents // documents_per_row, train)
        return cls(num_tokens=tokens, is_estimated=True, num_steps=steps)

    @classmethod
    def total(cls, sizes: Iterable[DataSize]) -> DataSize:
        """Add up the data of several files; the steps are those of the first, which is trained on."""
        found = list(sizes)
        return cls(
            num_tokens=sum(size.num_tokens for size in found),
            is_estimated=any(size.is_estimated for size in found),
            num_steps=found[0].num_steps if found else None,
            may_have_weights=found[0].may_have_weights if found else True,
        )


def expanded_bytes(files: Iterable[tuple[str, int]]) -> int:
    """Return about how much text files hold, given by name and size."""
    return sum(size * (_EXPANSION if name.lower().endswith(_COMPRESSED) else 1) for name, size in files)


def counted_steps(lengths_D: NDArray[np.int64], train: TrainSpec, *, group_size: int) -> int | None:
    """Return how many steps documents of these lengths make, as the worker makes them; None where `train` counts none
    itself.

    Right for a model that keeps packed documents apart, which only a trial shows. Of many epochs, or of millions of
    documents, it is right within the steps that differ from epoch to epoch.
    """
    # NumPy takes a tenth of a second, which a daemon that plans nothing need not wait for.
    from horizon_server.store.row_packing import EpochSteps, rows_of_groups

    if train.epochs is None or not len(lengths_D):
        return None
    if len(lengths_D) > _MOST_COUNTED:
        return _estimated_steps(int(lengths_D.sum()), len(lengths_D) // group_size, train)
    limit = min(train.sequence_length, train.tokens_per_step)
    rows, _ = rows_of_groups(lengths_D, group_size=group_size, packing=train.packing != "false", limit=limit)
    steps = EpochSteps(rows, tokens_per_step=train.tokens_per_step, seed=train.seed)
    most_epochs = min(_MOST_EPOCHS, _MOST_COUNTED // len(lengths_D))
    if train.epochs <= most_epochs:
        return steps.number(train.epochs)
    return math.ceil(train.epochs * steps.number(most_epochs) / most_epochs)


def _estimated_steps(num_tokens: int, num_groups: int, train: TrainSpec) -> int | None:
    """Return about how many steps that many tokens make in groups (documents, or pairs) of equal length."""
    if train.epochs is None or num_tokens <= 0 or num_groups <= 0:
        return None
    limit, of_group = min(train.sequence_length, train.tokens_per_step), max(1.0, num_tokens / num_groups)
    row = of_group
    if train.packing != "false" and of_group < limit:
        in_row = int(limit / of_group)
        row = of_group * in_row if in_row < 4 else _FULL * limit
    # Rows of about one length fill a step in whole numbers; of many short ones the last leaves half of its length free.
    of_step = max(
        row,
        train.tokens_per_step - row / 2 if row < train.tokens_per_step / 8 else row * int(train.tokens_per_step / row),
    )
    return math.ceil(train.epochs * max(1, math.ceil(num_tokens / of_step)))

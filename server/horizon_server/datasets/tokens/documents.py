"""What rows become: documents of tokens, and the answers of `kto` that are joined with other prompts.

Shapes: a document of T tokens has M targets.
"""

from __future__ import annotations

import array
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from horizon_server.datasets.tokens.codec import TextCodec
from horizon_server.errors import InvalidData
from horizon_server.store.prepared import MISMATCHED, DocumentColumns

# Token ids, 4 bytes each: `array.array("i")`.
Ids = array.array


@dataclass(frozen=True, kw_only=True)
class Document:
    """Tokens that are trained together; `trained[t]` is 1 where token t is a target.

    `old_logprobs` and `advantages` of recorded samples have one number, of 4 bytes, for each target. `weights` has one
    for each token, of which those of targets count; None is 1 for all.
    """

    ids: Ids[int]
    trained: bytes
    old_logprobs: array.array[float] | None = None
    advantages: array.array[float] | None = None
    weights: array.array[float] | None = None

    @property
    def target_weights(self) -> array.array[float] | None:
        """The weight of each target; None where all are 1."""
        if self.weights is None:
            return None
        found = array.array("f", itertools.compress(self.weights[1:], self.trained[1:]))
        return found if any(weight != 1 for weight in found) else None

    @property
    def num_targets(self) -> int:
        """Targets; the first token is never one, as nothing precedes it."""
        return self.trained.count(1, 1)

    def beginning(self, length: int) -> Document:
        """Return the first `length` tokens, with the numbers of the targets among them."""
        if len(self.ids) <= length:
            return self
        trained = self.trained[:length]
        num_targets = trained.count(1, 1)
        return Document(
            ids=self.ids[:length],
            trained=trained,
            old_logprobs=self.old_logprobs[:num_targets] if self.old_logprobs is not None else None,
            advantages=self.advantages[:num_targets] if self.advantages is not None else None,
            weights=self.weights[:length] if self.weights is not None else None,
        )


class LabelledAnswer(NamedTuple):
    """A row of `kto`: the tokens of a prompt, those of its completion, of which all are targets, and the label."""

    prompt: Ids[int]
    completion: Ids[int]
    label: int


def answer_document(prompt: Ids[int], completion: Ids[int], length: int) -> Document:
    """Return a prompt with a completion that is trained, cut at `length` tokens."""
    whole = Document(ids=prompt + completion, trained=bytes(len(prompt)) + b"\1" * len(completion))
    return whole.beginning(length)


def closing_token(document: Document, codec: TextCodec) -> int | None:
    """Return the special token that closes the last trained part of a document; None where a word of the text does.

    White space behind it does not count: of pairs, templates have the line break after the end of a turn trained as
    well.
    """
    at = document.trained.rfind(1)
    while at > 0 and document.trained[at] and codec.is_blank(document.ids[at]):
        at -= 1
    # The first token is never a target.
    closes = at > 0 and document.trained[at] and document.ids[at] in codec.special_ids
    return document.ids[at] if closes else None


class AnswerEnds:
    """Finds the tokens that end trained answers: special ones that close at least a tenth of them.

    Fewer are ends of nothing: a text may spell out any token, and recorded samples may stop anywhere.
    """

    MIN_SHARE = 0.1

    def __init__(self) -> None:
        self._closed_by: Counter[int | None] = Counter()

    def add(self, closed_by: Mapping[int | None, int]) -> None:
        """Count answers by the special token that closes them, or None."""
        self._closed_by.update(closed_by)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The ends, lowest first."""
        enough = self.MIN_SHARE * self._closed_by.total()
        return tuple(sorted(end for end, count in self._closed_by.items() if end is not None and count >= enough))


def common_beginning(prompt: Sequence[int], wholes: Sequence[Sequence[int]]) -> int:
    """Return how many tokens of the prompt all of these begin with."""
    length = len(prompt)
    for whole in wholes:
        # Nearly always the prompt is a beginning as it is, which one comparison finds.
        if whole[:length] != prompt[:length]:
            pairs = zip(prompt[:length], whole, strict=False)
            length = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return length


class MismatchedAnswers:
    """Follows every row of `kto` with a second document: the same prompt with the completion of the next row.

    The last row takes the completion of the first. KTO estimates its KL term with these documents. Rows come in the
    order in which they are prepared; one is held back until the next comes.

    Source: Ethayarajh et al. (arXiv 2402.01306), section 4.1. TRL rotates within each batch, and to the other side.
    """

    def __init__(self, sequence_length: int) -> None:
        self._length = sequence_length
        self._first: LabelledAnswer | None = None
        self._last: LabelledAnswer | None = None

    def add(self, rows: Iterable[LabelledAnswer]) -> DocumentColumns:
        """Return the documents of the rows whose next one is there now."""
        columns = DocumentColumns()
        for row in rows:
            if self._last is None:
                self._first = row
            else:
                self._join(columns, self._last, row)
            self._last = row
        return columns

    def finish(self) -> DocumentColumns:
        """Return the documents of the last row. Raises: InvalidData where there was one row only."""
        columns = DocumentColumns()
        if self._first is None or self._last is None:
            return columns
        if self._first is self._last:
            raise InvalidData(
                "kto needs at least two rows to train on, and two where rows are held out: the completion of one is "
                "joined with the prompt of another"
            )
        self._join(columns, self._last, self._first)
        return columns

    def _join(self, columns: DocumentColumns, row: LabelledAnswer, other: LabelledAnswer) -> None:
        for completion, label in ((row.completion, row.label), (other.completion, MISMATCHED)):
            document = answer_document(row.prompt, completion, self._length)
            columns.add(document.ids, document.trained, document.num_targets, label=label)

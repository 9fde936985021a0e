"""Rows to documents: token ids, and which of them are trained. What a job trains and what a preview shows both come from here.

Truncation happens here, and the message for a row that cannot be used is made here.
"""

from __future__ import annotations

import array
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from horizon_formats.files import Row, place_in
from horizon_formats.formats import DatasetFormat
from horizon_formats.problems import FieldViolation
from horizon_formats.row_checks import UNTRAINED, check_row
from horizon_server.datasets.recipe import PrepareOptions
from horizon_server.datasets.tokens.chat_template import Span
from horizon_server.datasets.tokens.codec import TextCodec
from horizon_server.datasets.tokens.documents import Document, Ids, blocks_of, split
from horizon_server.datasets.tokens.normalise import NormalRow, Tokens, is_held_out, normalise, row_content
from horizon_server.datasets.tokens.rendering import RenderedRow, RowRenderer, token_mask
from horizon_server.datasets.tokens.sandbox import processor_time_limit
from horizon_server.errors import InvalidData, InvalidModel

_MAX_TEMPLATE_S = 30
"""Processor time of the chat template for one batch of rows. Templates take about a tenth of a millisecond for a row."""

_CHATS = (DatasetFormat.MESSAGES, DatasetFormat.SHAREGPT, DatasetFormat.ALPACA)


@dataclass(frozen=True, kw_only=True)
class TokenizedRow:
    """What became of one row: documents, or why there are none.

    `violations` are defects of the row. `left_out` is set where the row is fine but has nothing trained within the job's
    `sequence_length`. `num_cut_tokens` were beyond it.
    """

    documents: Sequence[Document] = ()
    num_cut_tokens: int = 0
    violations: Sequence[FieldViolation] = ()
    left_out: FieldViolation | None = None
    held_out: bool = False
    """Whether the row is on the evaluation side of `eval_fraction`."""


@dataclass(frozen=True, kw_only=True)
class TextSpan:
    """Text whose tokens are all trained, or all not."""

    text: str
    trained: bool


@dataclass(frozen=True, kw_only=True)
class ShownRow:
    """A row as the model will see it. The texts of `spans` laid end to end are what it reads, up to where the row is cut.

    A row that cannot be used has `violations` and, where it could be rendered, spans all the same.
    """

    number: int
    spans: tuple[TextSpan, ...] = ()
    num_tokens: int = 0
    num_trained_tokens: int = 0
    num_cut_tokens: int = 0
    num_documents: int = 0
    violations: tuple[FieldViolation, ...] = ()


class _Part(NamedTuple):
    """Consecutive tokens of a row, and the text they were made from where there is one."""

    ids: Ids[int]
    trained: bytes
    text: str = ""
    starts: Sequence[int] = ()


class _ReadRow(NamedTuple):
    """A row that was checked and rendered (tokens are not), or what is wrong with it."""

    normal: NormalRow | None = None
    rendered: RenderedRow | None = None
    violations: Sequence[FieldViolation] = ()

    @property
    def masked_texts(self) -> list[str]:
        """The texts of which some characters are not trained."""
        return [text.text for text in self.rendered.texts if not text.trained_throughout] if self.rendered else []


class RowTokenizer:
    """Turns rows of one format into documents of at most `sequence_length` tokens."""

    def __init__(self, codec: TextCodec, options: PrepareOptions, dataset_format: DatasetFormat) -> None:
        """Raises: InvalidData for chats and a model without a chat template."""
        self._codec = codec
        self._options = options
        self._format = dataset_format
        self._renderer = RowRenderer(codec.chat_template, options)
        if dataset_format in _CHATS and codec.chat_template is None:
            raise InvalidData(
                f"the dataset holds {dataset_format}, but the model has no chat template; add chat_template.jinja to the model "
                "or use a prompt-completion dataset"
            )
        self._end = [] if codec.eos_id is None else [codec.eos_id]

    def tokenize(self, rows: Sequence[Row]) -> Iterator[TokenizedRow]:
        """Yield for each row its documents, or why there are none.

        Raises: InvalidModel where the tokenizer belongs to another model, or the template does not end.
        """
        read = self._read_all(rows)
        encodings = iter(self._codec.encode_all([text for item in read for text in item.masked_texts]))
        for row, item in zip(rows, read, strict=True):
            own = iter([next(encodings) for _ in item.masked_texts])
            yield self._tokenized(row, item, own)

    def _tokenized(self, row: Row, item: _ReadRow, encodings: Iterator[Any]) -> TokenizedRow:
        if item.normal is None:
            return TokenizedRow(violations=item.violations)
        try:
            fitted = self._fit(row, _joined(self._parts(item, lambda _: next(encodings), with_starts=False)))
        except InvalidData as error:
            return TokenizedRow(violations=[_unusable(row, error)])
        if not self._options.eval_fraction:
            return fitted
        return replace(fitted, held_out=is_held_out(row_content(item.normal), self._options.eval_fraction))

    def show(self, row: Row) -> ShownRow:
        """Return the row as `tokenize` hands it to training, for people to read."""
        (item,) = self._read_all([row])
        if item.normal is None:
            return ShownRow(number=row.number, violations=tuple(item.violations))
        try:
            parts = self._parts(item, self._codec.encode, with_starts=True)
        except InvalidData as error:
            return ShownRow(number=row.number, violations=(_unusable(row, error),))
        whole = _joined(parts)
        fitted = self._fit(row, whole)
        problems = [*fitted.violations, *([fitted.left_out] if fitted.left_out else [])]
        mask = b"".join(b"\0" + piece.trained[1:] for piece in self._pieces(whole))
        return ShownRow(
            number=row.number,
            spans=tuple(_merged(self._spans(parts, mask))),
            num_tokens=len(mask),
            num_trained_tokens=mask.count(1),
            num_cut_tokens=len(whole.ids) - len(mask),
            num_documents=len(fitted.documents),
            violations=tuple(problems),
        )

    def _read_all(self, rows: Sequence[Row]) -> list[_ReadRow]:
        places = dict.fromkeys(place_in(row.file, row.number, row.unit) for row in (rows[0], rows[-1]))
        endless = InvalidModel(
            f"the model's chat template took more than {_MAX_TEMPLATE_S} s of processor time for {' to '.join(places)}; it may never end"
        )
        with processor_time_limit(_MAX_TEMPLATE_S, endless):
            return [self._read(row) for row in rows]

    def _read(self, row: Row) -> _ReadRow:
        problems = check_row(row, self._format, self._options.field_map)
        if problems:
            return _ReadRow(violations=problems)
        normal = normalise(row.columns, self._format, self._options.field_map)
        if isinstance(normal, Tokens):
            return _ReadRow(normal=normal)
        try:
            return _ReadRow(normal=normal, rendered=self._renderer.render(normal))
        except InvalidData as error:
            return _ReadRow(violations=[_unusable(row, error)])

    def _parts(self, item: _ReadRow, encode: Callable[[str], Any], *, with_starts: bool) -> list[_Part]:
        """Return the tokens of a row in parts that are laid end to end."""
        if isinstance(item.normal, Tokens):
            return [self._given_tokens(item.normal)]
        assert item.rendered is not None, "everything but tokens is rendered"
        parts: list[_Part] = []
        for text in item.rendered.texts:
            if text.trained_throughout:
                parts += self._throughout(text.text, with_starts=with_starts)
            else:
                parts.append(_masked(text.text, encode(text.text), text.spans, with_starts=with_starts))
        for part in parts:
            self._codec.check_ids(part.ids)
        if not item.rendered.bare:
            return parts
        leading, trailing = array.array("i", self._codec.leading_ids), array.array("i", self._end)
        return [
            _Part(ids=leading, trained=bytes(len(leading))),
            *parts,
            _Part(ids=trailing, trained=b"\1" * len(trailing)),
        ]

    def _throughout(self, text: str, *, with_starts: bool) -> Iterator[_Part]:
        for block in blocks_of(text):
            if with_starts:
                yield _masked(block, self._codec.encode(block), [(0, len(block))], with_starts=True)
            else:
                ids = array.array("i", self._codec.encode_ids(block))
                yield _Part(ids=ids, trained=b"\1" * len(ids))

    def _given_tokens(self, tokens: Tokens) -> _Part:
        size = self._codec.vocab_size
        highest = max(tokens.input_ids, default=0)
        if size is not None and highest >= size:
            raise InvalidData(f"input_ids holds {highest}, but the model's vocab_size is {size}")
        trained = bytes(label != UNTRAINED for label in tokens.labels)
        return _Part(ids=array.array("i", tokens.input_ids), trained=trained)

    def _fit(self, row: Row, whole: Document) -> TokenizedRow:
        if not whole.num_targets:
            problem = "has no trained token; check its text, roles and weights, and train.train_on"
            return TokenizedRow(violations=[row.refusal(problem)])
        if len(whole.ids) <= self._options.sequence_length:
            return TokenizedRow(documents=(whole,))
        kept = [piece for piece in self._pieces(whole) if piece.num_targets]
        if kept:
            return TokenizedRow(documents=kept, num_cut_tokens=len(whole.ids) - sum(len(piece.ids) for piece in kept))
        problem = (
            f"has {len(whole.ids)} tokens, and within sequence_length {self._options.sequence_length} none is trained; raise "
            "train.sequence_length or shorten the row"
        )
        return TokenizedRow(left_out=row.refusal(problem))

    def _pieces(self, whole: Document) -> list[Document]:
        limit = self._options.sequence_length
        if len(whole.ids) <= limit:
            return [whole]
        if self._options.method == "pretrain" or self._format is DatasetFormat.TEXT:
            return split(whole, limit)
        return [Document(ids=whole.ids[:limit], trained=whole.trained[:limit])]

    def _spans(self, parts: Sequence[_Part], mask: bytes) -> Iterator[TextSpan]:
        """Yield the text of the masked tokens, in runs of equal mask."""
        at = 0
        for part in parts:
            here = mask[at : at + len(part.ids)]
            for begin, end in _runs(here):
                yield TextSpan(text=self._text_of(part, begin, end), trained=here[begin] == 1)
            at += len(part.ids)

    def _text_of(self, part: _Part, begin: int, end: int) -> str:
        if not part.starts:
            return self._codec.decode(part.ids[begin:end])
        until = part.starts[end] if end < len(part.starts) else len(part.text)
        return part.text[part.starts[begin] if begin else 0 : until]


def _masked(text: str, encoding: Any, spans: Sequence[Span], *, with_starts: bool) -> _Part:
    return _Part(
        ids=array.array("i", encoding.ids),
        trained=bytes(token_mask(text, encoding, spans)),
        text=text,
        starts=[start for start, _ in encoding.offsets] if with_starts else (),
    )


def _unusable(row: Row, error: InvalidData) -> FieldViolation:
    return row.refusal(f"cannot be used: {error.message:.400}")


def _joined(parts: Sequence[_Part]) -> Document:
    if len(parts) == 1:
        return Document(ids=parts[0].ids, trained=parts[0].trained)
    ids = array.array("i")
    for part in parts:
        ids += part.ids
    return Document(ids=ids, trained=b"".join(part.trained for part in parts))


def _merged(spans: Iterable[TextSpan]) -> Iterator[TextSpan]:
    for trained, run in itertools.groupby(spans, key=lambda span: span.trained):
        yield TextSpan(text="".join(span.text for span in run), trained=trained)


def _runs(mask: bytes) -> Iterator[tuple[int, int]]:
    begin = 0
    while begin < len(mask):
        end = mask.find(1 - mask[begin], begin)
        end = len(mask) if end < 0 else end
        yield begin, end
        begin = end

"""Rows to documents: token ids, and which of them are trained. What a job trains and what a preview shows both come
from here."""

from __future__ import annotations

import array
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from horizon_formats.checks import UNTRAINED, check_row
from horizon_formats.files import Row
from horizon_formats.formats import DatasetFormat
from horizon_formats.problems import FieldViolation
from horizon_server.datasets.preview import PreviewRow, PreviewSpan
from horizon_server.datasets.recipe import PrepareOptions
from horizon_server.datasets.tokens.chat_template import processor_time_limit
from horizon_server.datasets.tokens.codec import TextCodec
from horizon_server.datasets.tokens.documents import Document, Ids, LabelledAnswer, closing_token, common_beginning
from horizon_server.datasets.tokens.rendering import (
    Answers,
    Chat,
    NormalRow,
    Pair,
    RenderedAnswers,
    RenderedRow,
    RowRenderer,
    Sample,
    Tokens,
    is_held_out,
    normalise,
    row_content,
    token_mask,
    token_weights,
)
from horizon_server.errors import InvalidData, InvalidModel

# Processor time of the chat template for one batch of rows. Templates take about a tenth of a millisecond for a row.
_MAX_TEMPLATE_S = 30

# Kinds of which a part cannot stand for the whole, whatever the method.
_ANSWERED = (
    DatasetFormat.PREFERENCE,
    DatasetFormat.OPENAI_PREFERENCE,
    DatasetFormat.KTO,
    DatasetFormat.SAMPLES,
)
_CHATS = (DatasetFormat.MESSAGES, DatasetFormat.SHAREGPT, DatasetFormat.ALPACA)
# Characters of a block in which a long text is encoded.
_BLOCK_CHARACTERS = 64 * 1024


def split(whole: Document, length: int) -> list[Document]:
    """Cut a document into pieces of `length` tokens. No piece has one token only, unless that is all there is."""
    borders = [*range(0, len(whole.ids), length), len(whole.ids)]
    # A piece of one token has no target: it takes its neighbour's last.
    if len(borders) > 2 and borders[-1] - borders[-2] == 1:
        borders[-2] -= 1
    return [
        Document(
            ids=whole.ids[begin:end],
            trained=whole.trained[begin:end],
            weights=whole.weights[begin:end] if whole.weights is not None else None,
        )
        for begin, end in itertools.pairwise(borders)
    ]


def split_text(parts: Iterable[Iterable[int]], length: int) -> Iterator[list[Document]]:
    """Cut a list of tokens that comes in parts as `split` does the whole of it, all trained.

    Yields for each part the documents that are full with it, and after the last part the rest.
    """
    pending = array.array("i")
    for ids in parts:
        pending.extend(ids)
        full: list[Document] = []
        begin = 0
        # Two tokens are kept back, so that the last document can be given a second one.
        while len(pending) - begin >= length + 2:
            full.append(Document(ids=pending[begin : begin + length], trained=b"\1" * length))
            begin += length
        del pending[:begin]
        yield full
    if pending:
        yield split(Document(ids=pending, trained=b"\1" * len(pending)), length)


def text_blocks(pieces: Iterable[str], block_characters: int = _BLOCK_CHARACTERS) -> Iterator[str]:
    """Join the pieces of a text to blocks of about this size, cut where a tokenizer would cut too."""
    pending: list[str] = []
    size = 0
    for piece in pieces:
        pending.append(piece)
        size += len(piece)
        if size >= block_characters:
            text = "".join(pending)
            cut = _last_cut(text)
            yield text[:cut]
            pending, size = [text[cut:]], len(text) - cut
    if size:
        yield "".join(pending)


def _last_cut(text: str) -> int:
    # Before a line break that follows a letter: all tokenizers in use that split words start a new piece there.
    end = len(text)
    for _ in range(100):
        end = text.rfind("\n", 1, end)
        if end < 0:
            break
        if text[end - 1].isalpha():
            return end
    any_break = text.rfind("\n", 1)
    return any_break if any_break > 0 else len(text)


@dataclass(frozen=True, kw_only=True)
class TokenizedRow:
    """What became of one row: documents, or why there are none.

    `violations` are defects of the row. `left_out` is set where the row is fine but has nothing trained within the
    job's `sequence_length`. `num_cut_tokens` were beyond it. `held_out` rows are on the evaluation side of
    `eval_fraction`. `closed_by` has for each whole answer of the row the special token that closes it, or None.
    The documents of a `preference` are chosen and rejected. A row of `kto` has its `answer` too, for the document that
    is joined of two.
    """

    documents: Sequence[Document] = ()
    num_cut_tokens: int = 0
    violations: Sequence[FieldViolation] = ()
    left_out: FieldViolation | None = None
    held_out: bool = False
    answer: LabelledAnswer | None = None
    closed_by: Sequence[int | None] = ()


class _Part(NamedTuple):
    """Consecutive tokens of a row, and the text they were made from with its `tokenizers.Encoding`, where they are
    known.

    `weights` has one for each token, or is None: all are 1.
    """

    ids: Ids[int]
    trained: bytes
    text: str = ""
    encoding: Any = None
    weights: array.array[float] | None = None


class _ReadRow(NamedTuple):
    """A row that was checked and rendered (tokens are not), or what is wrong with it."""

    normal: NormalRow | None
    rendered: RenderedRow | RenderedAnswers | None
    violations: Sequence[FieldViolation]

    @property
    def masked_texts(self) -> list[str]:
        """The texts of which some characters are not trained, and which are encoded with the others' for that."""
        if isinstance(self.rendered, RenderedAnswers):
            return [self.rendered.prompt, *self.rendered.wholes]
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
                f"the dataset holds {dataset_format}, but the model has no chat template; add chat_template.jinja to "
                "the model "
                "or use a prompt-completion dataset"
            )

    def tokenize(self, rows: Sequence[Row]) -> Iterator[TokenizedRow]:
        """Yield for each row its documents, or why there are none.

        Raises: InvalidModel where the tokenizer belongs to another model, or the template does not end.
        """
        read = self._read(rows)
        masked = [item.masked_texts for item in read]
        encodings = iter(self._codec.encode_all([text for texts in masked for text in texts]))
        for row, item, texts in zip(rows, read, masked, strict=True):
            # All of the row's own are taken here: one that is refused half way leaves the rest of them unused.
            own = iter([next(encodings) for _ in texts])
            if item.normal is None:
                yield TokenizedRow(violations=item.violations)
                continue
            try:
                wholes = [self._whole(item, parts) for parts in self._documents(item, own)]
            except InvalidData as error:
                yield TokenizedRow(violations=[_unusable(row, error)])
                continue
            fitted = self._fit_all(row, item, wholes)
            fitted = replace(fitted, closed_by=self._closed_by(item, fitted))
            if self._options.eval_fraction:
                fitted = replace(fitted, held_out=is_held_out(row_content(item.normal), self._options.eval_fraction))
            yield fitted

    def show(self, row: Row) -> list[PreviewRow]:
        """Return the documents of a row as `tokenize` hands them to training, for people to read: one, or chosen and
        rejected.

        The texts of the spans of a document laid end to end are what the model reads, up to where it is cut. A row that
        cannot be used has problems and, where it could be rendered, spans all the same.
        """
        shown = PreviewRow(file=row.file, unit=row.unit, number=row.number)
        (item,) = self._read([row])
        if item.normal is None:
            return [replace(shown, problems=tuple(violation.description for violation in item.violations))]
        try:
            documents = self._documents(item, map(self._codec.encode, item.masked_texts), shown=True)
        except InvalidData as error:
            return [replace(shown, problems=(_unusable(row, error).description,))]
        wholes = [self._whole(item, parts) for parts in documents]
        fitted = self._fit_all(row, item, wholes)
        problems = [*fitted.violations, *([fitted.left_out] if fitted.left_out else [])]
        rows = []
        for part, parts, whole in zip(_part_names(item.normal), documents, wholes, strict=True):
            mask = b"".join(b"\0" + piece.trained[1:] for piece in self._pieces(whole))
            rows.append(
                replace(
                    shown,
                    part=part,
                    spans=tuple(self._spans(parts, mask)),
                    num_tokens=len(mask),
                    num_trained_tokens=mask.count(1),
                    num_cut_tokens=len(whole.ids) - len(mask),
                    num_documents=len(fitted.documents) // len(wholes),
                    problems=tuple(problem.description for problem in problems),
                )
            )
        return rows

    def _read(self, rows: Sequence[Row]) -> list[_ReadRow]:
        read: list[_ReadRow] = []
        places = dict.fromkeys(row.place for row in (rows[0], rows[-1]))
        endless = InvalidModel(
            f"the model's chat template took more than {_MAX_TEMPLATE_S} s of processor time for "
            f"{' to '.join(places)}; it may never end"
        )
        with processor_time_limit(_MAX_TEMPLATE_S, endless):
            for row in rows:
                normal: NormalRow | None = None
                rendered = None
                violations = check_row(row, self._format, self._options.field_map)
                if not violations:
                    normal = normalise(row.columns, self._format, self._options.field_map)
                    try:
                        rendered = self._render(normal)
                    except InvalidData as error:
                        normal, violations = None, [_unusable(row, error)]
                read.append(_ReadRow(normal, rendered, violations))
        return read

    def _render(self, normal: NormalRow) -> RenderedRow | RenderedAnswers | None:
        if isinstance(normal, Tokens | Sample):
            return None
        return self._renderer.render_answers(normal) if isinstance(normal, Answers) else self._renderer.render(normal)

    def _documents(self, item: _ReadRow, encodings: Iterator[Any], *, shown: bool = False) -> list[list[_Part]]:
        """Return the parts of each of a row's documents, whole; `encodings` are those of its masked texts."""
        if isinstance(item.rendered, RenderedAnswers):
            return self._answers(item.rendered, encodings)
        return [self._parts(item, encodings, shown=shown)]

    def _answers(self, rendered: RenderedAnswers, encodings: Iterator[Any]) -> list[list[_Part]]:
        """Return the parts of each answer with its prompt; the answer alone is trained, from where its tokens leave the
        prompt's.

        As TRL does it: the tokens are those of the whole text, and where a token joins the end of the prompt with the
        beginning of an answer, both answers begin with it.
        """
        leading = array.array("i", self._codec.leading_ids if rendered.bare else ())
        prompt = array.array("i", next(encodings).ids)
        encoded = [
            (text, encoding, array.array("i", encoding.ids))
            for text, encoding in zip(rendered.wholes, encodings, strict=True)
        ]
        length = common_beginning(prompt, [ids for _, _, ids in encoded])
        documents = []
        for text, encoding, ids in encoded:
            self._codec.check_ids(ids)
            # An answer that spells out the end-of-text token has it already.
            is_closed = not rendered.bare or ids[-1:].tolist() == self._codec.trailing_ids
            trailing = array.array("i", () if is_closed else self._codec.trailing_ids)
            documents.append(
                [
                    _Part(ids=leading, trained=bytes(len(leading))),
                    _Part(ids, bytes(length) + b"\1" * (len(ids) - length), text, encoding),
                    _Part(ids=trailing, trained=b"\1" * len(trailing)),
                ]
            )
        return documents

    def _parts(self, item: _ReadRow, encodings: Iterator[Any], *, shown: bool = False) -> list[_Part]:
        """Return the tokens of a row in parts that are laid end to end; `encodings` are those of its masked texts."""
        if isinstance(item.normal, Tokens | Sample):
            size = self._codec.vocab_size
            highest = max(item.normal.input_ids, default=0)
            if size is not None and highest >= size:
                field = "tokens" if isinstance(item.normal, Sample) else "input_ids"
                raise InvalidData(
                    f"{field} holds {highest}, but the model's vocab_size is {size}; use the tokenizer of this model"
                )
            if isinstance(item.normal, Sample):
                return [_Part(ids=array.array("i", item.normal.input_ids), trained=bytes(item.normal.mask))]
            trained = bytes(label != UNTRAINED for label in item.normal.labels)
            return [_Part(ids=array.array("i", item.normal.input_ids), trained=trained)]
        assert isinstance(item.rendered, RenderedRow), "everything but tokens is rendered"
        parts: list[_Part] = []
        for text in item.rendered.texts:
            if not text.trained_throughout:
                encoding = next(encodings)
                trained = bytes(token_mask(text.text, encoding, text.spans))
                weights = token_weights(text, encoding)
                parts.append(_Part(array.array("i", encoding.ids), trained, text.text, encoding, weights))
                continue
            for block in _blocks(text.text):
                # Ids alone are encoded faster, and no mask is needed to know what is trained.
                encoding = self._codec.encode(block) if shown else None
                ids = array.array("i", encoding.ids if encoding is not None else self._codec.encode_ids(block))
                parts.append(_Part(ids, b"\1" * len(ids), block, encoding))
        for part in parts:
            self._codec.check_ids(part.ids)
        if not item.rendered.bare:
            return parts
        leading, trailing = array.array("i", self._codec.leading_ids), array.array("i", self._codec.trailing_ids)
        # What closes an answer counts as the answer does.
        weights = array.array("f", item.rendered.texts[-1].weights[-1:] * len(trailing)) or None
        return [
            _Part(ids=leading, trained=bytes(len(leading))),
            *parts,
            _Part(ids=trailing, trained=b"\1" * len(trailing), weights=weights),
        ]

    def _whole(self, item: _ReadRow, parts: Sequence[_Part]) -> Document:
        """Return a document before it is cut."""
        document = _joined(parts)
        if not isinstance(item.normal, Sample):
            return document
        logprobs, advantages = (array.array("f", values) for values in (item.normal.logprobs, item.normal.advantages))
        return replace(document, old_logprobs=logprobs, advantages=advantages)

    def _fit_all(self, row: Row, item: _ReadRow, wholes: Sequence[Document]) -> TokenizedRow:
        """Cut the documents of a row. Those that belong together are cut alike: they are all kept, or all left out."""
        if not isinstance(item.normal, Answers | Sample):
            (whole,) = wholes
            return self._fit(row, whole)
        if not all(whole.num_targets for whole in wholes):
            return TokenizedRow(violations=[row.refusal("has an answer without a token to learn; check its text")])
        limit = self._options.sequence_length
        kept = [whole.beginning(limit) for whole in wholes]
        num_prompt_tokens = wholes[0].trained.index(1)
        if not all(document.num_targets for document in kept):
            problem = (
                f"has {num_prompt_tokens} tokens before the first that is trained, so within sequence_length {limit} "
                "none is; raise "
                "train.sequence_length or shorten the prompt"
            )
            return TokenizedRow(left_out=row.refusal(problem))
        answer = None
        if isinstance(item.normal, Answers) and item.normal.label is not None:
            prompt, completion = wholes[0].ids[:num_prompt_tokens], wholes[0].ids[num_prompt_tokens:]
            if not prompt:
                return TokenizedRow(violations=[row.refusal("has a prompt without a token; kto needs a prompt")])
            # Of what is joined with another prompt no more than this can fit either.
            answer = LabelledAnswer(prompt, completion[:limit], item.normal.label)
        num_cut_tokens = sum(len(whole.ids) - len(document.ids) for whole, document in zip(wholes, kept, strict=True))
        return TokenizedRow(documents=kept, num_cut_tokens=num_cut_tokens, answer=answer)

    def _closed_by(self, item: _ReadRow, fitted: TokenizedRow) -> Sequence[int | None]:
        # What was cut has lost its end, and a text is no answer.
        if not self._has_answer(item.normal) or fitted.num_cut_tokens:
            return ()
        return [closing_token(document, self._codec) for document in fitted.documents]

    def _has_answer(self, normal: NormalRow | None) -> bool:
        if isinstance(normal, Chat):
            # Where every token is trained, the last part of it is the chat's last turn.
            return not self._options.trains_everything or normal.messages[-1]["role"] == "assistant"
        if isinstance(normal, Tokens):
            # With a label for every token it is a text.
            return UNTRAINED in normal.labels
        return isinstance(normal, Pair | Answers | Sample)

    def _fit(self, row: Row, whole: Document) -> TokenizedRow:
        if not whole.num_targets:
            problem = "has no trained token; check its text, roles and weights, and train.train_on"
            return TokenizedRow(violations=[row.refusal(problem)])
        if len(whole.ids) <= self._options.sequence_length:
            return TokenizedRow(documents=(whole,))
        kept = [piece for piece in self._pieces(whole) if piece.num_targets]
        if kept:
            return TokenizedRow(documents=kept, num_cut_tokens=len(whole.ids) - sum(len(piece.ids) for piece in kept))
        # Left out, not refused: it is too long for this job only.
        problem = (
            f"has {len(whole.ids)} tokens, and within sequence_length {self._options.sequence_length} none is trained; "
            "raise "
            "train.sequence_length or shorten the row"
        )
        return TokenizedRow(left_out=row.refusal(problem))

    def _pieces(self, whole: Document) -> list[Document]:
        limit = self._options.sequence_length
        if len(whole.ids) <= limit:
            return [whole]
        # What follows the cut of a chat has lost the turns that it answers; a text can be read from anywhere.
        is_cut = self._format in _ANSWERED or (
            self._options.method != "pretrain" and self._format is not DatasetFormat.TEXT
        )
        return [whole.beginning(limit)] if is_cut else split(whole, limit)

    def _spans(self, parts: Sequence[_Part], mask: bytes) -> Iterator[PreviewSpan]:
        """Yield the text of the masked tokens, in runs of equal mask and weight."""
        # 0 where a token is not trained.
        texts: list[tuple[float, str]] = []
        at = 0
        for part in parts:
            own = itertools.repeat(1.0) if part.weights is None else part.weights
            here = [
                weight if trained else 0.0 for trained, weight in zip(mask[at : at + len(part.ids)], own, strict=False)
            ]
            at += len(part.ids)
            offsets = part.encoding.offsets if part.encoding else []
            begin = 0
            for weight, run in itertools.groupby(here):
                end = begin + sum(1 for _ in run)
                if offsets:
                    # A token's text reaches to the start of the next, so that nothing between two tokens is lost.
                    until = offsets[end][0] if end < len(offsets) else len(part.text)
                    text = part.text[offsets[begin][0] if begin else 0 : until]
                else:
                    text = self._codec.decode(part.ids[begin:end])
                texts.append((weight, text))
                begin = end
        for weight, same in itertools.groupby(texts, key=lambda item: item[0]):
            # As the row has it: 4 bytes hold seven digits of it.
            shown = None if weight in (0, 1) else float(f"{weight:.7g}")
            yield PreviewSpan(text="".join(text for _, text in same), trained=weight != 0, weight=shown)


def _blocks(text: str) -> Iterable[str]:
    """Return a text in blocks, so that the memory of the tokenizer does not follow its length."""
    if len(text) <= _BLOCK_CHARACTERS:
        return [text]
    return text_blocks(text[at : at + _BLOCK_CHARACTERS] for at in range(0, len(text), _BLOCK_CHARACTERS))


def _unusable(row: Row, error: InvalidData) -> FieldViolation:
    return row.refusal(f"cannot be used: {error.message:.400}")


def _joined(parts: Sequence[_Part]) -> Document:
    if len(parts) == 1:
        return Document(ids=parts[0].ids, trained=parts[0].trained, weights=parts[0].weights)
    ids, weights = array.array("i"), array.array("f")
    for part in parts:
        ids += part.ids
        weights += array.array("f", [1.0]) * len(part.ids) if part.weights is None else part.weights
    is_weighted = any(part.weights is not None for part in parts)
    return Document(ids=ids, trained=b"".join(part.trained for part in parts), weights=weights if is_weighted else None)


def _part_names(normal: NormalRow) -> tuple[str, ...]:
    """Return what the documents of a row are called where people read them; nothing where there is nothing to say."""
    if isinstance(normal, Answers):
        if normal.label is None:
            return "chosen", "rejected"
        return ("desirable" if normal.label else "undesirable",)
    if isinstance(normal, Sample):
        low, high = min(normal.advantages), max(normal.advantages)
        return (f"advantage {low:g}" if low == high else f"advantages {low:g} to {high:g}",)
    return ("",)

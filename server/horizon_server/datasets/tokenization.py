"""Rows to documents: token ids, and which of them are trained.

Owns the loss masks, truncation and the splitting of long texts. Must not know files or folders.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from horizon_server.datasets.chat_template import ChatTemplate, Span
from horizon_server.datasets.formats import DatasetFormat
from horizon_server.datasets.message_checks import is_trainable
from horizon_server.datasets.normalise import Chat, Text, Tokens, normalise
from horizon_server.datasets.preparation import PrepareOptions
from horizon_server.datasets.row_checks import UNTRAINED, check_row
from horizon_server.datasets.rows import Row
from horizon_server.datasets.text_codec import EncodedText, TextCodec
from horizon_server.errors import FieldViolation, InvalidData

# A long text is encoded in blocks of about this many characters, cut where a tokenizer would cut too.
TEXT_BLOCK_CHARACTERS = 64 * 1024

_CHATS = (DatasetFormat.MESSAGES, DatasetFormat.SHAREGPT, DatasetFormat.ALPACA)


@dataclass(frozen=True, kw_only=True)
class Document:
    """Tokens that are trained together; `trained[t]` is 1 where token t is a target."""

    ids: Sequence[int]
    trained: bytes
    truncated: bool = False

    @property
    def num_targets(self) -> int:
        """Targets; the first token is never one, as nothing precedes it."""
        return sum(self.trained[1:])


@dataclass(frozen=True, kw_only=True)
class TokenizedRow:
    """What became of one row: documents, or what is wrong with it."""

    documents: Sequence[Document] = ()
    violations: Sequence[FieldViolation] = ()


@dataclass(frozen=True, kw_only=True)
class _RenderedRow:
    """Texts that are encoded apart and laid end to end, and the trained characters of each."""

    parts: list[tuple[str, list[Span]]]
    leading_ids: list[int]
    trailing_ids: list[int]


class RowTokenizer:
    """Turns rows of one format into documents of at most `sequence_length` tokens."""

    def __init__(self, codec: TextCodec, options: PrepareOptions, dataset_format: DatasetFormat) -> None:
        self._codec = codec
        self._options = options
        self._format = dataset_format
        self._train_all = options.method == "pretrain" or options.train_on == "all"
        self._end = [] if codec.eos_id is None else [codec.eos_id]
        if dataset_format in _CHATS and codec.chat_template is None:
            raise InvalidData(
                f"the dataset holds {dataset_format}, but the model has no chat template; add chat_template.jinja to the model or use a "
                "prompt-completion dataset"
            )

    def tokenize(self, rows: Sequence[Row]) -> Iterator[TokenizedRow]:
        """Yield for each row its documents, or what is wrong with it."""
        rendered = [self._render(row) for row in rows]
        texts = [text for item in rendered if isinstance(item, _RenderedRow) for text, _ in item.parts]
        encoded = iter(self._codec.encode(texts))
        for row, item in zip(rows, rendered, strict=True):
            if isinstance(item, list):
                yield TokenizedRow(violations=item)
                continue
            whole = item if isinstance(item, Document) else self._assemble(item, [next(encoded) for _ in item.parts])
            self._codec.check_ids(whole.ids)
            yield self._fit(row, whole)

    def _render(self, row: Row) -> _RenderedRow | Document | list[FieldViolation]:
        problems = check_row(row, self._format, self._options.field_map)
        if problems:
            return problems
        try:
            return self._render_checked(row)
        except InvalidData as error:
            return [row.refusal(f"cannot be rendered: {error.message:.400}")]

    def _render_checked(self, row: Row) -> _RenderedRow | Document:
        content = normalise(row.columns, self._format, self._options.field_map)
        template = self._codec.chat_template
        if isinstance(content, Tokens):
            trained = bytes(self._train_all or label != UNTRAINED for label in content.labels)
            return Document(ids=content.input_ids, trained=trained)
        if isinstance(content, Text):
            return _RenderedRow(
                parts=[(content.text, [(0, len(content.text))])],
                leading_ids=self._codec.leading_ids,
                trailing_ids=self._end,
            )
        if isinstance(content, Chat):
            assert template is not None
            return self._render_chat(template, content)
        if template is not None:
            user, reply = (
                {"role": "user", "content": content.prompt},
                {"role": "assistant", "content": content.completion},
            )
            return self._render_chat(template, Chat(messages=[user, reply]))
        # Encoded apart: at generation time the prompt ends where the model starts.
        prompt_spans = [(0, len(content.prompt))] if self._train_all else []
        parts: list[tuple[str, list[Span]]] = [
            (content.prompt, prompt_spans),
            (content.completion, [(0, len(content.completion))]),
        ]
        return _RenderedRow(parts=parts, leading_ids=self._codec.leading_ids, trailing_ids=self._end)

    def _render_chat(self, template: ChatTemplate, chat: Chat) -> _RenderedRow:
        messages = chat.messages
        if self._train_all:
            text = template.render(messages)
            return _RenderedRow(parts=[(text, [(0, len(text))])], leading_ids=[], trailing_ids=[])
        text, found = template.assistant_spans(messages)
        replies = [(message, span) for message, span in zip(messages, found, strict=True) if span is not None]
        if self._options.train_on == "last-assistant":
            replies = replies[-1:]
        spans = [span for message, span in replies if is_trainable(message)]
        return _RenderedRow(parts=[(text, spans)], leading_ids=[], trailing_ids=[])

    def _assemble(self, row: _RenderedRow, encoded: Sequence[EncodedText]) -> Document:
        ids = list(row.leading_ids)
        trained = bytearray(len(ids))
        for (_, spans), part in zip(row.parts, encoded, strict=True):
            ids += part.ids
            trained += _mask(part.starts, spans)
        ids += row.trailing_ids
        trained += b"\1" * len(row.trailing_ids)
        return Document(ids=ids, trained=bytes(trained))

    def _fit(self, row: Row, whole: Document) -> TokenizedRow:
        if not whole.num_targets:
            problem = "has no trainable token; check its text, roles and weights, and train.train_on"
            return TokenizedRow(violations=[row.refusal(problem)])
        limit = self._options.sequence_length
        if self._format is DatasetFormat.TEXT:
            splitter = TextSplitter(limit)
            return TokenizedRow(documents=[*splitter.add(whole.ids), *splitter.finish()])
        if len(whole.ids) <= limit:
            return TokenizedRow(documents=[whole])
        cut = Document(ids=whole.ids[:limit], trained=whole.trained[:limit], truncated=True)
        if not cut.num_targets:
            problem = (
                f"has {len(whole.ids)} tokens, and within sequence_length {limit} none is trained; "
                "raise train.sequence_length or shorten the row"
            )
            return TokenizedRow(violations=[row.refusal(problem)])
        return TokenizedRow(documents=[cut])


class TextSplitter:
    """Cuts a growing list of tokens into documents of `sequence_length`, all trained. No document has one token only."""

    def __init__(self, sequence_length: int) -> None:
        self._sequence_length = sequence_length
        self._pending: list[int] = []

    def add(self, ids: Iterable[int]) -> Iterator[Document]:
        """Take more tokens and yield the documents that are full."""
        self._pending += ids
        begin, size = 0, self._sequence_length
        # Two tokens stay behind, so that the last document can be given a second one.
        while len(self._pending) - begin >= size + 2:
            yield _trained_throughout(self._pending[begin : begin + size])
            begin += size
        del self._pending[:begin]

    def finish(self) -> Iterator[Document]:
        """Yield the rest."""
        size = self._sequence_length
        if len(self._pending) > size:
            size -= 1
        for begin in range(0, len(self._pending), size):
            yield _trained_throughout(self._pending[begin : begin + size])
        self._pending = []


def text_blocks(pieces: Iterable[str], block_characters: int = TEXT_BLOCK_CHARACTERS) -> Iterator[str]:
    """Join the pieces of a text to blocks that encode, one by one, to the tokens of the whole.

    The cut is before a line break that follows a letter: all tokenizers in use that split words start a new piece there.
    """
    pending: list[str] = []
    size = 0
    for piece in pieces:
        pending.append(piece)
        size += len(piece)
        if size < block_characters:
            continue
        text = "".join(pending)
        cut = _last_cut(text)
        yield text[:cut]
        pending, size = [text[cut:]], len(text) - cut
    if size:
        yield "".join(pending)


def _last_cut(text: str) -> int:
    end = len(text)
    for _ in range(100):
        end = text.rfind("\n", 1, end)
        if end < 0:
            break
        if text[end - 1].isalpha():
            return end
    any_break = text.rfind("\n", 1)
    return any_break if any_break > 0 else len(text)


def _mask(starts: Sequence[int], spans: Sequence[Span]) -> bytes:
    mask = bytearray(len(starts))
    remaining = iter(sorted(spans))
    begin, end = next(remaining, (0, -1))
    for index, start in enumerate(starts):
        while start >= end >= 0:
            begin, end = next(remaining, (0, -1))
        mask[index] = begin <= start < end
    return bytes(mask)


def _trained_throughout(ids: list[int]) -> Document:
    return Document(ids=ids, trained=b"\1" * len(ids))

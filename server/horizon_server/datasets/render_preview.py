"""The child that renders a preview: one request in, some rows out.

The chat template that it runs came with a model and is not trusted: the daemon bounds this process, see `services.previews`. Must not
know jobs or databases.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from horizon_server.children.entry import EventWriter, serve
from horizon_server.datasets.containers import Container
from horizon_server.datasets.data_file import DataFile, Row
from horizon_server.datasets.documents import Document, TextSplitter
from horizon_server.datasets.formats import columns_of
from horizon_server.datasets.preparation import PrepareOptions
from horizon_server.datasets.preview import (
    MAX_CHARACTERS,
    MAX_PROBLEMS,
    MAX_ROW_CHARACTERS,
    MAX_SPANS,
    PreviewRequest,
    PreviewRow,
    PreviewSpan,
)
from horizon_server.datasets.rows import read_rows, read_text, resolve_format
from horizon_server.datasets.text_blocks import text_blocks
from horizon_server.datasets.text_codec import TextCodec
from horizon_server.datasets.tokenization import RowTokenizer, ShownRow, TextSpan
from horizon_server.errors import HorizonError

_LONGEST_MESSAGE = 2000


def work(plain: Any, _: EventWriter) -> list[dict[str, Any]]:
    """Return the rows as plain data."""
    request = PreviewRequest.from_mapping(plain)
    try:
        return [dataclasses.asdict(row) for row in render(request)]
    except HorizonError as error:
        message = error.message.replace(str(request.model_dir), "the model's folder")
        raise type(error)(message[:_LONGEST_MESSAGE]) from error


def render(request: PreviewRequest) -> tuple[PreviewRow, ...]:
    """Return the rows asked for, each cut to a size that can be shown.

    Raises: InvalidData, InvalidModel where the dataset cannot be rendered for the model at all.
    """
    codec = TextCodec.from_folder(request.model_dir)
    shows = ((file, show) for file in request.dataset_files for show in _shows(file, codec, request.prepare_options))
    first = request.options.offset
    room = _Room()
    wanted = itertools.islice(shows, first, first + request.options.num_rows)
    return tuple(room.clip(file, *show()) for file, show in wanted)


Show = Callable[[], tuple[str, ShownRow]]
"""Renders one row: what its number counts, and the row. Rows that are passed over are never rendered."""


def _shows(file: DataFile, codec: TextCodec, options: PrepareOptions) -> Iterator[Show]:
    dataset_format, container = resolve_format(file, options.format, options.field_map)
    if container is Container.PLAIN_TEXT:
        for number, document in enumerate(_pieces(file, codec, options.sequence_length), start=1):
            yield partial(_show_piece, codec, number, document)
        return
    tokenizer = RowTokenizer(codec, options, dataset_format)
    for row in read_rows(file, columns_of(dataset_format, options.field_map)):
        yield partial(_show_row, tokenizer, row)


def _show_row(tokenizer: RowTokenizer, row: Row) -> tuple[str, ShownRow]:
    return row.unit, tokenizer.show(row)


def _show_piece(codec: TextCodec, number: int, document: Document) -> tuple[str, ShownRow]:
    """Show a piece of a plain text as trained: all of it but the first token, which nothing precedes."""
    texts = (codec.decode(document.ids[:1]), codec.decode(document.ids[1:]))
    spans = tuple(TextSpan(text=text, trained=trained) for text, trained in zip(texts, (False, True), strict=True))
    row = ShownRow(
        number=number,
        spans=spans,
        num_tokens=len(document.ids),
        num_trained_tokens=document.num_targets,
        num_documents=1,
    )
    return "piece", row


def _pieces(file: DataFile, codec: TextCodec, sequence_length: int) -> Iterator[Document]:
    splitter = TextSplitter(sequence_length)
    yield from splitter.add(codec.leading_ids)
    for block in text_blocks(piece.text for piece in read_text(file)):
        yield from splitter.add(codec.encode_ids(block))
    yield from splitter.add([] if codec.eos_id is None else [codec.eos_id])
    yield from splitter.finish()


class _Room:
    """How much may still be shown."""

    def __init__(self) -> None:
        self._characters = MAX_CHARACTERS

    def clip(self, file: DataFile, unit: str, row: ShownRow) -> PreviewRow:
        """Return the row with as much text as there is room for."""
        left = before = min(self._characters, MAX_ROW_CHARACTERS)
        spans: list[PreviewSpan] = []
        for span in row.spans[:MAX_SPANS]:
            text = span.text[:left].encode("utf-8", "replace").decode("utf-8")
            left -= len(text)
            spans += [PreviewSpan(text=text, trained=span.trained)] if text else []
        self._characters -= before - left
        return PreviewRow(
            file=file.name,
            unit=unit,
            number=row.number,
            spans=tuple(spans),
            num_tokens=row.num_tokens,
            num_trained_tokens=row.num_trained_tokens,
            num_cut_tokens=row.num_cut_tokens,
            num_documents=row.num_documents,
            clipped=before - left < sum(len(span.text) for span in row.spans),
            problems=tuple(violation.description for violation in row.violations[:MAX_PROBLEMS]),
        )


if __name__ == "__main__":
    sys.exit(serve(work, who="the preview"))

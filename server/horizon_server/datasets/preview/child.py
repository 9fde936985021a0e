"""The child that renders a preview: one request in, some rows out.

The chat template that it runs came with a model and is not trusted: the daemon limits memory, processor time, files and time.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator
from typing import Any

from horizon_formats.file_check import read_rows, resolve_format
from horizon_formats.files import Container, DataFile, Skip
from horizon_formats.formats import columns_of
from horizon_formats.rows import read_text
from horizon_server.children.entry import EventWriter, serve
from horizon_server.datasets.preview.request import (
    MAX_CHARACTERS,
    MAX_PROBLEMS,
    MAX_ROW_CHARACTERS,
    MAX_SPANS,
    PreviewRequest,
    PreviewRow,
    PreviewSpan,
)
from horizon_server.datasets.reading import server_errors
from horizon_server.datasets.tokens.codec import TextCodec
from horizon_server.datasets.tokens.documents import Document, TextSplitter, text_blocks
from horizon_server.datasets.tokens.tokenization import RowTokenizer, ShownRow, TextSpan
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
    room = _Room()
    with server_errors():
        codec = TextCodec.from_folder(request.model_dir)
        shown = itertools.islice(_shown(request, codec), request.options.num_rows)
        return tuple(room.clip(file, unit, row) for file, unit, row in shown)


def _shown(request: PreviewRequest, codec: TextCodec) -> Iterator[tuple[DataFile, str, ShownRow]]:
    """Yield the rows of all files after the offset, each with its file and what its number counts."""
    options = request.prepare_options
    skip = Skip(left=request.options.offset)
    for file in request.dataset_files:
        dataset_format, container = resolve_format(file, options.format, options.field_map)
        if container is Container.PLAIN_TEXT:
            for number, document in enumerate(_pieces(file, codec, options.sequence_length), start=1):
                if skip.left:
                    skip.left -= 1
                else:
                    yield file, "piece", _show_piece(codec, number, document)
        else:
            tokenizer = RowTokenizer(codec, options, dataset_format)
            for row in read_rows(file, columns_of(dataset_format, options.field_map), skip):
                yield file, row.unit, tokenizer.show(row)


def _show_piece(codec: TextCodec, number: int, document: Document) -> ShownRow:
    """Show a piece of a plain text as trained: all of it but the first token, which nothing precedes."""
    texts = (codec.decode(document.ids[:1]), codec.decode(document.ids[1:]))
    spans = tuple(TextSpan(text=text, trained=trained) for text, trained in zip(texts, (False, True), strict=True))
    return ShownRow(
        number=number,
        spans=spans,
        num_tokens=len(document.ids),
        num_trained_tokens=document.num_targets,
        num_documents=1,
    )


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

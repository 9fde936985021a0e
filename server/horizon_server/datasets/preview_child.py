"""The child that renders a preview: one request in, some rows out."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator
from typing import Any

from horizon_formats.checks import resolve_format
from horizon_formats.files import Container, Skip
from horizon_formats.formats import DatasetFormat, columns_of
from horizon_formats.rows import read_rows, read_text
from horizon_server.children.entry import EventWriter, serve
from horizon_server.codec import from_plain, to_plain
from horizon_server.datasets.preview import (
    MAX_CHARACTERS,
    MAX_PROBLEMS,
    MAX_ROW_CHARACTERS,
    MAX_SPANS,
    PreviewRequest,
    PreviewRow,
    PreviewSpan,
)
from horizon_server.datasets.reading import server_errors
from horizon_server.datasets.recipe import PrepareOptions
from horizon_server.datasets.tokens.codec import TextCodec
from horizon_server.datasets.tokens.tokenization import RowTokenizer, split_text, text_blocks
from horizon_server.errors import HorizonError

# An error quotes the template's own words, which may be long.
_LONGEST_MESSAGE = 2000


def work(plain: Any, _: EventWriter) -> Any:
    """Return the rows as plain data."""
    request = from_plain(PreviewRequest, plain)
    try:
        return to_plain(render(request))
    except HorizonError as error:
        message = error.with_names({request.model_dir: "the model's folder"}).message
        raise type(error)(message[:_LONGEST_MESSAGE]) from error


def render(request: PreviewRequest) -> tuple[PreviewRow, ...]:
    """Return the rows asked for, each cut to a size that can be shown.

    Raises: InvalidData, InvalidModel where the dataset cannot be rendered for the model at all.
    """
    rows: list[PreviewRow] = []
    room = MAX_CHARACTERS
    with server_errors():
        codec = TextCodec.from_folder(request.model_dir)
        for row in itertools.chain.from_iterable(itertools.islice(_rows(request, codec), request.options.num_rows)):
            left = allowed = min(room, MAX_ROW_CHARACTERS)
            spans: list[PreviewSpan] = []
            for span in row.spans[:MAX_SPANS]:
                # The wire carries UTF-8 only, and a template may print half a surrogate pair.
                text = span.text[:left].encode("utf-8", "replace").decode("utf-8")
                left -= len(text)
                spans += [dataclasses.replace(span, text=text)] if text else []
            room -= allowed - left
            clipped = allowed - left < sum(len(span.text) for span in row.spans)
            problems = row.problems[:MAX_PROBLEMS]
            rows.append(dataclasses.replace(row, spans=tuple(spans), clipped=clipped, problems=problems))
    return tuple(rows)


def _rows(request: PreviewRequest, codec: TextCodec) -> Iterator[list[PreviewRow]]:
    """Yield the rows of all files after the offset, whole, each as the documents that it is."""
    shown = request.options
    options = PrepareOptions(
        format=DatasetFormat(request.format),
        field_map=request.field_map,
        method=shown.method,
        sequence_length=shown.sequence_length,
        train_on=shown.train_on,
    )
    skip = Skip(left=shown.offset)
    for file in request.dataset_files:
        dataset_format, container = resolve_format(file, options.format, options.field_map)
        if container is not Container.PLAIN_TEXT:
            tokenizer = RowTokenizer(codec, options, dataset_format)
            yield from map(tokenizer.show, read_rows(file, columns_of(dataset_format, options.field_map), skip))
            continue
        # A plain text has no rows: its pieces are shown as they are trained.
        blocks = map(codec.encode_ids, text_blocks(piece.text for piece in read_text(file)))
        parts = split_text(itertools.chain([codec.leading_ids], blocks, [codec.trailing_ids]), options.sequence_length)
        for number, piece in enumerate(itertools.chain.from_iterable(parts), start=1):
            if skip.left:
                skip.left -= 1
                continue
            # All of it is trained but the first token, which nothing precedes.
            texts = ((codec.decode(piece.ids[:1]), False), (codec.decode(piece.ids[1:]), True))
            shown_piece = PreviewRow(
                file=file.name,
                unit="piece",
                number=number,
                spans=tuple(PreviewSpan(text=text, trained=trained) for text, trained in texts),
                num_tokens=len(piece.ids),
                num_trained_tokens=piece.num_targets,
                num_documents=1,
            )
            yield [shown_piece]


if __name__ == "__main__":
    sys.exit(serve(work, who="the preview"))

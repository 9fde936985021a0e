"""The rendering child of a preview: one request in, some rows out.

`python -m horizon_server.datasets.render_preview --events-fd N REQUEST.json` writes the rows to the request's answer file and how it ended
to descriptor N. The chat template that it runs came with a model and is trusted by nobody: this process bounds its own memory,
processor time and files, and the daemon bounds how long it lives. Must not know jobs or databases.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from horizon_server.datasets.containers import Container
from horizon_server.datasets.data_file import DataFile, Row
from horizon_server.datasets.tokens.documents import Document, TextSplitter
from horizon_formats.formats import columns_of
from horizon_server.datasets.recipe import PrepareOptions
from horizon_server.datasets.preview.request import (
    MAX_CHARACTERS,
    MAX_PROBLEMS,
    MAX_ROW_CHARACTERS,
    MAX_SPANS,
    PreviewRequest,
    PreviewRow,
    PreviewSpan,
    rows_to_json,
)
from horizon_server.datasets.rows import read_rows, read_text, resolve_format
from horizon_server.datasets.tokens.documents import text_blocks
from horizon_server.datasets.tokens.codec import TextCodec
from horizon_server.datasets.tokens.tokenization import RowTokenizer, ShownRow, TextSpan
from horizon_server.errors import HorizonError
from horizon_server.events import AttemptEnded, encode

MAX_MEMORY_BYTES = 4 * 2**30
MAX_PROCESSOR_S = 60
_MAX_FILE_BYTES = 64 * 2**20
_LONGEST_SENTENCE = 2000


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve one request and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m horizon_server.datasets.render_preview", description=__doc__)
    parser.add_argument("request", type=Path, help="file with the request")
    parser.add_argument("--events-fd", type=int, default=1, help="descriptor to say the end to")
    options = parser.parse_args(arguments)
    _bound_this_process()
    request = PreviewRequest.from_json(options.request.read_bytes())
    ended = _answer(request)
    os.write(options.events_fd, encode(ended).encode() + b"\n")
    return 0 if ended.outcome == "succeeded" else 1


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


def _answer(request: PreviewRequest) -> AttemptEnded:
    try:
        request.answer_file.write_text(rows_to_json(render(request)), "utf-8")
    except HorizonError as error:
        sentence = error.message.replace(str(request.model_dir), "the model's folder")
        return AttemptEnded(outcome="failed", reason=error.reason, message=sentence[:_LONGEST_SENTENCE])
    except MemoryError:
        sentence = f"rendering these rows takes more than {MAX_MEMORY_BYTES // 2**30} GiB of memory; is the chat template right?"
        return AttemptEnded(outcome="failed", reason="INVALID_MODEL", message=sentence)
    except OSError as error:
        sentence = f"a file of the dataset or the model could not be read: {error.strerror}"
        return AttemptEnded(outcome="failed", reason="IO_ERROR", message=sentence)
    return AttemptEnded(outcome="succeeded")


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


def _bound_this_process() -> None:
    """Memory is counted without that of mapped files, which libraries take in plenty and do not use up."""
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_PROCESSOR_S, MAX_PROCESSOR_S))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MAX_FILE_BYTES, _MAX_FILE_BYTES))


if __name__ == "__main__":
    sys.exit(main())

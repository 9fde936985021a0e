"""The preparation child: one request in, one prepared folder out, progress on the way.

`python -m horizon_server.datasets.prepare --events-fd N [REQUEST.json]` reads the request from the file or from stdin and writes events
to descriptor N (stdout without it): progress with rows done and total and at last the report, then how it ended, with a detail for
every bad row. Exit code 0 or 1. Must not know jobs or databases.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from horizon_server.datasets.document_writer import DocumentWriter
from horizon_server.datasets.formats import check_field_map
from horizon_server.datasets.preparation import PrepareReport, PrepareRequest
from horizon_server.datasets.rows import Container, DataFile, Row, read_rows, read_text, resolve_format
from horizon_server.datasets.text_codec import TextCodec
from horizon_server.datasets.tokenization import Document, RowTokenizer, TextSplitter, text_blocks
from horizon_server.datasets.violations import ViolationTally
from horizon_server.errors import FieldViolation, HorizonError, InvalidData
from horizon_server.events import AttemptEnded, PrepareProgress, encode

OnProgress = Callable[[int], None]
"""Called with the number of rows done."""

_ROWS_AT_ONCE = 256
_BYTES_AT_ONCE = 4 * 1024 * 1024
_TEXT_BLOCKS_AT_ONCE = 8
_PROGRESS_EVERY_S = 0.25


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve one request and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m horizon_server.datasets.prepare", description=__doc__)
    parser.add_argument("request", nargs="?", type=Path, help="file with the request; stdin without it")
    parser.add_argument("--events-fd", type=int, default=1, help="descriptor to write events to")
    options = parser.parse_args(arguments)
    # An orderly end, so that half-written files are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    events = _EventLines(options.events_fd)
    try:
        text = options.request.read_bytes() if options.request else sys.stdin.buffer.read()
        request = PrepareRequest.from_json(text)
        report = prepare(request, on_progress=lambda done: events.progress(done, request.num_rows))
    except HorizonError as error:
        details = tuple(violation.description for violation in error.violations)
        events.write(AttemptEnded(outcome="failed", reason=error.reason, message=error.message, details=details))
        return 1
    except BrokenPipeError:
        return 1  # the daemon that asked is gone
    except OSError as error:
        events.write(AttemptEnded(outcome="failed", reason="IO_ERROR", message=str(error)))
        return 1
    events.write(PrepareProgress(done_rows=report.rows, total_rows=report.rows, report=report.to_mapping()))
    events.write(AttemptEnded(outcome="succeeded"))
    return 0


def prepare(request: PrepareRequest, *, on_progress: OnProgress) -> PrepareReport:
    """Tokenise every row into `request.output_dir` and return what came out.

    Raises: InvalidData with every bad row (the first 100 and their number), InvalidModel for an unusable tokenizer, DiskFull,
    NotAvailableYet for formats of later versions.
    """
    check_field_map(request.options.format, request.options.field_map)
    codec = TextCodec.from_folder(request.model_dir)
    tally = ViolationTally()
    rows = truncated = 0
    with DocumentWriter(request.output_dir) as writer:
        for file in request.dataset_files:
            for num_rows, documents, violations in _prepare_file(file, codec, request):
                rows += num_rows
                tally.add(_of_file(file, violations) if len(request.dataset_files) > 1 else violations)
                for document in documents:
                    truncated += document.truncated
                    writer.add(document)
                on_progress(rows)
        names = ", ".join(file.name for file in request.dataset_files)
        tally.refuse(names)
        if not writer.num_trained_tokens:
            raise InvalidData(f"{names} gives no trainable token; the dataset must hold at least one row to learn from")
        report = PrepareReport(
            rows=rows,
            documents=writer.num_documents,
            tokens=writer.num_tokens,
            trained_tokens=writer.num_trained_tokens,
            truncated_rows=truncated,
            longest_document=writer.longest_document,
            sequence_length=request.options.sequence_length,
        )
        writer.publish(report.to_mapping())
    return report


Prepared = tuple[int, list[Document], list[FieldViolation]]
"""Rows read since the last one, their documents, and what is wrong with them."""


def _prepare_file(file: DataFile, codec: TextCodec, request: PrepareRequest) -> Iterator[Prepared]:
    options = request.options
    dataset_format, container = resolve_format(file, options.format, options.field_map)
    if container is Container.PLAIN_TEXT:
        yield from _prepare_text(file, codec, options.sequence_length)
        return
    check_field_map(dataset_format, options.field_map)
    tokenizer = RowTokenizer(codec, options, dataset_format)
    for batch in _batches(read_rows(file)):
        documents: list[Document] = []
        violations: list[FieldViolation] = []
        for row in tokenizer.tokenize(batch):
            documents += row.documents
            violations += row.violations
        yield len(batch), documents, violations


def _prepare_text(file: DataFile, codec: TextCodec, sequence_length: int) -> Iterator[Prepared]:
    splitter = TextSplitter(sequence_length)
    violations: list[FieldViolation] = []

    def readable() -> Iterator[str]:
        for piece in read_text(file):
            violations.extend([piece.violation] if piece.violation else [])
            yield piece.text

    yield 0, list(splitter.add(codec.leading_ids)), []
    blocks = text_blocks(readable())
    while some := list(itertools.islice(blocks, _TEXT_BLOCKS_AT_ONCE)):
        documents: list[Document] = []
        for encoded in codec.encode(some):
            codec.check_ids(encoded.ids)
            documents += splitter.add(encoded.ids)
        num_rows = sum(1 for block in some for line in block.split("\n") if line.strip())
        yield num_rows, documents, violations[:]
        violations.clear()
    last = [] if codec.eos_id is None else [codec.eos_id]
    yield 0, [*splitter.add(last), *splitter.finish()], violations


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Group rows so that neither many nor long ones are held at once."""
    batch: list[Row] = []
    num_bytes = 0
    for row in rows:
        batch.append(row)
        num_bytes += row.num_bytes
        if len(batch) >= _ROWS_AT_ONCE or num_bytes >= _BYTES_AT_ONCE:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _of_file(file: DataFile, violations: Iterable[FieldViolation]) -> list[FieldViolation]:
    return [
        FieldViolation(field=f"{file.name}.{item.field}", description=f"{file.name}: {item.description}")
        for item in violations
    ]


class _EventLines:
    """JSON lines on a descriptor; progress is thinned out."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._next_progress_s = 0.0

    def progress(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if now_s < self._next_progress_s:
            return
        self._next_progress_s = now_s + _PROGRESS_EVERY_S
        self.write(PrepareProgress(done_rows=done, total_rows=total))

    def write(self, event: PrepareProgress | AttemptEnded) -> None:
        line = memoryview(encode(event).encode() + b"\n")
        while line:
            line = line[os.write(self._descriptor, line) :]


if __name__ == "__main__":
    sys.exit(main())

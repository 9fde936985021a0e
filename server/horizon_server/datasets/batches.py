"""Data files as batches of tokens, in the order of their rows, made by several processes.

Owns how many rows are held at once, so that memory is bounded whatever the size of a file. Must not know folders or events.
"""

from __future__ import annotations

import array
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from horizon_server.datasets.containers import Container
from horizon_server.datasets.data_file import DataFile, Row
from horizon_server.datasets.documents import Document, TextSplitter
from horizon_server.datasets.formats import check_field_map, columns_of
from horizon_server.datasets.held_out import is_held_out
from horizon_server.datasets.json_rows import JsonLine, parse_json_lines, split_json_lines
from horizon_server.datasets.ordered_map import ordered_map
from horizon_server.datasets.preparation import PrepareOptions
from horizon_server.datasets.rows import read_rows, read_text, resolve_format
from horizon_server.datasets.text_blocks import text_blocks
from horizon_server.datasets.text_codec import TextCodec
from horizon_server.datasets.token_batch import TokenBatch
from horizon_server.datasets.tokenization import RowTokenizer
from horizon_server.errors import FieldViolation

RowOrLine = TypeVar("RowOrLine", Row, JsonLine)

_ROWS_AT_ONCE = 64
_BYTES_AT_ONCE = 512 * 1024
_FORKED_FROM_BYTES = 1024 * 1024
"""A smaller file is done before other processes have started."""


class Batches:
    """Reads and tokenises files."""

    def __init__(self, codec: TextCodec, options: PrepareOptions, *, num_processes: int) -> None:
        self._codec = codec
        self._options = options
        self._num_processes = num_processes

    def of_files(self, files: Sequence[DataFile]) -> Iterator[TokenBatch]:
        """Yield what becomes of every row; with several files each violation names its file.

        Raises: InvalidData where a file cannot be read as rows, WorkerDied when a process is killed.
        """
        for file in files:
            for batch in self._of_file(file):
                if len(files) > 1:
                    batch.violations = _named(file, batch.violations)
                    batch.left_out = _named(file, batch.left_out)
                yield batch

    def _of_file(self, file: DataFile) -> Iterator[TokenBatch]:
        options = self._options
        dataset_format, container = resolve_format(file, options.format, options.field_map)
        if container is Container.PLAIN_TEXT:
            yield from self._of_text(file)
            return
        check_field_map(dataset_format, options.field_map)
        tokenizer = RowTokenizer(self._codec, options, dataset_format)

        def tokenized(rows: Sequence[Row]) -> TokenBatch:
            return TokenBatch().add_rows(tokenizer.tokenize(rows))

        def parsed_and_tokenized(lines: Sequence[JsonLine]) -> TokenBatch:
            return tokenized(list(parse_json_lines(lines)))

        num_processes = self._processes_for(file)
        if container is Container.JSON_LINES:
            # Parsed where they are tokenised: a line is cheaper to send than the row it holds.
            yield from ordered_map(parsed_and_tokenized, _grouped(split_json_lines(file)), num_processes=num_processes)
            return
        rows = read_rows(file, columns_of(dataset_format, options.field_map))
        yield from ordered_map(tokenized, _grouped(rows), num_processes=num_processes)

    def _of_text(self, file: DataFile) -> Iterator[TokenBatch]:
        violations: list[FieldViolation] = []

        def readable() -> Iterator[str]:
            for piece in read_text(file):
                violations.extend([piece.violation] if piece.violation else [])
                yield piece.text

        splitter = TextSplitter(self._options.sequence_length)
        batch = self._batch(splitter.add(self._codec.leading_ids))
        blocks = ordered_map(self._encoded_block, text_blocks(readable()), num_processes=self._processes_for(file))
        for num_rows, ids in blocks:
            yield batch
            batch = self._batch(splitter.add(ids))
            batch.num_rows, batch.violations = num_rows, violations[:]
            violations.clear()
        yield batch
        end = [] if self._codec.eos_id is None else [self._codec.eos_id]
        last = self._batch([*splitter.add(end), *splitter.finish()])
        last.violations = violations
        yield last

    def _encoded_block(self, block: str) -> tuple[int, array.array[int]]:
        """Return the number of rows of a plain text, which are its lines that are not blank, and their tokens."""
        ids = array.array("i", self._codec.encode_ids(block))
        self._codec.check_ids(ids)
        return sum(1 for line in block.split("\n") if line.strip()), ids

    def _batch(self, documents: Iterable[Document]) -> TokenBatch:
        """Return documents of a plain text: its lines are no rows to choose from, so its pieces are held out or not."""
        batch = TokenBatch()
        for document in documents:
            if document.num_targets:
                held_out = is_held_out(document.ids.tobytes(), self._options.eval_fraction)
                (batch.evaluation if held_out else batch.train).add(document)
            else:
                problem = "the text is one token only; nothing precedes it, so there is nothing to learn"
                batch.left_out.append(FieldViolation(field="text", description=problem))
        return batch

    def _processes_for(self, file: DataFile) -> int:
        return self._num_processes if file.path.stat().st_size >= _FORKED_FROM_BYTES else 1


def _grouped(rows: Iterable[RowOrLine]) -> Iterator[list[RowOrLine]]:
    """Group rows so that neither many nor long ones are held at once."""
    batch: list[RowOrLine] = []
    num_bytes = 0
    for row in rows:
        batch.append(row)
        num_bytes += row.num_bytes
        if len(batch) >= _ROWS_AT_ONCE or num_bytes >= _BYTES_AT_ONCE:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _named(file: DataFile, violations: Iterable[FieldViolation]) -> list[FieldViolation]:
    return [
        FieldViolation(field=f"{file.name}.{item.field}", description=f"{file.name}: {item.description}")
        for item in violations
    ]

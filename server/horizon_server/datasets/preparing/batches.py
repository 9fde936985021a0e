"""Data files as batches of tokens, in the order of their rows, made by several processes.

Few rows are held at once, so that memory is bounded whatever the size of a file.
"""

from __future__ import annotations

import array
import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any, TypeVar

from horizon_formats.file_check import read_rows, resolve_format
from horizon_formats.files import Container, DataFile, Row
from horizon_formats.formats import check_field_map, columns_of
from horizon_formats.problems import FieldViolation
from horizon_formats.rows import JsonLine, parse_json_lines, read_text, split_json_lines
from horizon_server.children.entry import end_with_parent
from horizon_server.datasets.recipe import PrepareOptions
from horizon_server.datasets.tokens.codec import TextCodec
from horizon_server.datasets.tokens.documents import Document, TextSplitter, text_blocks
from horizon_server.datasets.tokens.normalise import is_held_out
from horizon_server.datasets.tokens.tokenization import RowTokenizer, TokenizedRow
from horizon_server.errors import WorkerDied
from horizon_server.store.prepared import DocumentColumns

RowOrLine = TypeVar("RowOrLine", Row, JsonLine)
Item = TypeVar("Item")
Result = TypeVar("Result")

# Small enough that a batch stays in a core's cache: larger ones were slower.
_ROWS_AT_ONCE = 64
_BYTES_AT_ONCE = 512 * 1024
_FORKED_FROM_BYTES = 1024 * 1024
"""A smaller file is done before other processes have started."""
_AHEAD_PER_PROCESS = 2
"""Items that are read ahead for each process: none of them waits, and memory stays bounded."""


@dataclass(kw_only=True)
class TokenBatch:
    """What became of some rows, in a form that is cheap to send between processes and to append to a file.

    Documents for training and evaluation, and the counts and messages of the report.
    """

    num_rows: int = 0
    train: DocumentColumns = field(default_factory=DocumentColumns)
    evaluation: DocumentColumns = field(default_factory=DocumentColumns)
    num_eval_rows: int = 0
    num_truncated_rows: int = 0
    num_cut_tokens: int = 0
    violations: list[FieldViolation] = field(default_factory=list)
    left_out: list[FieldViolation] = field(default_factory=list)

    def add_rows(self, rows: Iterable[TokenizedRow]) -> TokenBatch:
        """Append what became of some rows, and return the batch."""
        for row in rows:
            self.num_rows += 1
            self.violations += row.violations
            self.left_out += [row.left_out] if row.left_out else []
            self.num_truncated_rows += row.num_cut_tokens > 0
            self.num_cut_tokens += row.num_cut_tokens
            self.num_eval_rows += row.held_out and bool(row.documents)
            side = self.evaluation if row.held_out else self.train
            for document in row.documents:
                side.add(document.ids, document.trained, document.num_targets)
        return self


def token_batches(
    files: Iterable[DataFile], codec: TextCodec, options: PrepareOptions, *, num_processes: int
) -> Iterator[TokenBatch]:
    """Yield what becomes of every row of the files.

    Raises: InvalidFile where a file cannot be read as rows, WorkerDied when a process is killed.
    """
    for file in files:
        dataset_format, container = resolve_format(file, options.format, options.field_map)
        processes = num_processes if file.path.stat().st_size >= _FORKED_FROM_BYTES else 1
        if container is Container.PLAIN_TEXT:
            yield from _text_batches(file, codec, options, processes)
            continue
        check_field_map(dataset_format, options.field_map)
        tokenizer = RowTokenizer(codec, options, dataset_format)
        if container is Container.JSON_LINES:
            # Parsed where they are tokenised: a line is cheaper to send than the row it holds.
            def tokenized_lines(
                lines: Sequence[JsonLine], name: str = file.name, tokenizer: RowTokenizer = tokenizer
            ) -> TokenBatch:
                return TokenBatch().add_rows(tokenizer.tokenize(list(parse_json_lines(lines, name))))

            yield from ordered_map(tokenized_lines, _grouped(split_json_lines(file)), num_processes=processes)
        else:

            def tokenized_rows(rows: Sequence[Row], tokenizer: RowTokenizer = tokenizer) -> TokenBatch:
                return TokenBatch().add_rows(tokenizer.tokenize(rows))

            rows = read_rows(file, columns_of(dataset_format, options.field_map))
            yield from ordered_map(tokenized_rows, _grouped(rows), num_processes=processes)


def _text_batches(
    file: DataFile, codec: TextCodec, options: PrepareOptions, num_processes: int
) -> Iterator[TokenBatch]:
    violations: list[FieldViolation] = []

    def readable() -> Iterator[str]:
        for piece in read_text(file):
            violations.extend([piece.violation] if piece.violation else [])
            yield piece.text

    def encoded(block: str) -> tuple[int, array.array[int]]:
        """Return the number of rows of a plain text, which are its lines that are not blank, and their tokens."""
        ids = array.array("i", codec.encode_ids(block))
        codec.check_ids(ids)
        return sum(1 for line in block.split("\n") if line.strip()), ids

    def batch_of(documents: Iterable[Document], num_rows: int = 0) -> TokenBatch:
        """Return documents of a plain text: its lines are not rows to choose from, so its pieces are held out or not."""
        batch = TokenBatch(num_rows=num_rows, violations=violations[:])
        violations.clear()
        for document in documents:
            if not document.num_targets:
                problem = "the text is one token only; nothing precedes it, so there is nothing to learn"
                batch.left_out.append(FieldViolation(field=file.name, description=f"{file.name}: {problem}"))
                continue
            held_out = is_held_out(document.ids.tobytes(), options.eval_fraction)
            side = batch.evaluation if held_out else batch.train
            side.add(document.ids, document.trained, document.num_targets)
        return batch

    splitter = TextSplitter(options.sequence_length)
    yield batch_of(splitter.add(codec.leading_ids))
    for num_rows, ids in ordered_map(encoded, text_blocks(readable()), num_processes=num_processes):
        yield batch_of(splitter.add(ids), num_rows)
    end = [] if codec.eos_id is None else [codec.eos_id]
    yield batch_of([*splitter.add(end), *splitter.finish()])


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


_function: Callable[[Any], Any] | None = None


def ordered_map(function: Callable[[Item], Result], items: Iterable[Item], *, num_processes: int) -> Iterator[Result]:
    """Yield `function(item)` for each item in order; one process is the caller's own.

    The others are forked, so that they share what the function has loaded. Raises: WorkerDied when one of them is killed.
    Thread: to be called while this is the only one.
    """
    if num_processes == 1:
        yield from map(function, items)
        return
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(num_processes, mp_context=context, initializer=_adopt, initargs=(function,))
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(_apply, item))
            if len(pending) > _AHEAD_PER_PROCESS * num_processes:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise WorkerDied(
            "a process of the data preparation was killed, by hand or by the kernel for lack of memory"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _adopt(function: Callable[[Any], Any]) -> None:
    # A pool's workers can reach only what is global to them.
    global _function
    _function = function
    # The parent ends its processes; its own handler would run in them with its cleanup.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Where the parent is killed, nothing else ends them.
    end_with_parent()


def _apply(item: Any) -> Any:
    assert _function is not None, "the pool's initializer has run"
    return _function(item)

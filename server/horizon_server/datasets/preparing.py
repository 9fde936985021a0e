"""The child that prepares data: one request in, one prepared folder out, progress on the way."""

from __future__ import annotations

import array
import dataclasses
import itertools
import multiprocessing
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from horizon_formats.checks import resolve_format
from horizon_formats.files import Container, DataFile, Row
from horizon_formats.formats import DataKind, DatasetFormat, check_field_map, columns_of, kind_of
from horizon_formats.problems import FieldViolation, ViolationTally
from horizon_formats.rows import JsonLine, parse_json_lines, read_rows, read_text, split_json_lines
from horizon_server.children.entry import EventWriter, end_with_parent, serve
from horizon_server.codec import from_plain
from horizon_server.datasets.reading import server_errors
from horizon_server.datasets.recipe import PrepareOptions, PrepareReport, PrepareRequest
from horizon_server.datasets.tokens.codec import TextCodec
from horizon_server.datasets.tokens.documents import AnswerEnds, LabelledAnswer, MismatchedAnswers
from horizon_server.datasets.tokens.rendering import is_held_out
from horizon_server.datasets.tokens.tokenization import RowTokenizer, split_text, text_blocks
from horizon_server.errors import InvalidData, WorkerDied
from horizon_server.events import PrepareProgress
from horizon_server.store.cpus import available_cpus
from horizon_server.store.prepared import DocumentColumns, PreparedFolder

Item = TypeVar("Item")
Result = TypeVar("Result")

_PROGRESS_EVERY_S = 0.25
# One process reads and writes for all; it cannot keep more than about this many busy.
_MAX_PROCESSES = 16
# Small enough that a batch stays in a core's cache: larger ones were slower.
_ROWS_AT_ONCE = 64
_BYTES_AT_ONCE = 512 * 1024
# A smaller file is done before other processes have started.
_FORKED_FROM_BYTES = 1024 * 1024
# Items that are read ahead for each process: none of them waits, and memory stays bounded.
_AHEAD_PER_PROCESS = 2


def work(plain: Any, events: EventWriter) -> dict[str, Any]:
    """Prepare the folder that the request describes; returns the counts of the report."""
    # An orderly end, so that partial files are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    num_processes = plain.pop("num_processes", None) or min(available_cpus(), _MAX_PROCESSES)
    request = from_plain(PrepareRequest, plain)
    next_progress_s = 0.0

    def on_progress(done: int) -> None:
        nonlocal next_progress_s
        now_s = time.monotonic()
        if now_s >= next_progress_s:
            next_progress_s = now_s + _PROGRESS_EVERY_S
            events.send(PrepareProgress(done_rows=done, total_rows=request.num_rows))

    report = dataclasses.asdict(prepare(request, on_progress=on_progress, num_processes=num_processes))
    # Without the messages: the daemon reads them from the folder's report.
    return {name: value for name, value in report.items() if isinstance(value, int)}


def prepare(request: PrepareRequest, *, on_progress: Callable[[int], None], num_processes: int = 1) -> PrepareReport:
    """Tokenise every row into `request.output_dir` and return what came out: the same bytes for any number of
    processes.

    Calls `on_progress` with the number of rows done.
    Raises: InvalidData with every bad row (the first 100 and their number), or where a side of `eval_fraction` is
    empty; InvalidModel for an unusable tokenizer; DiskFull.
    """
    options = request.options
    bad, left_out = ViolationTally(), ViolationTally()
    rows = eval_rows = truncated_rows = cut_tokens = 0
    with server_errors(), ExitStack() as stack:
        check_field_map(options.format, options.field_map)
        kind = _kind(request)
        with_evaluation = options.eval_fraction > 0
        folder = stack.enter_context(PreparedFolder(request.output_dir, with_evaluation=with_evaluation, kind=kind))
        train, held_out = MismatchedAnswers(options.sequence_length), MismatchedAnswers(options.sequence_length)
        codec, ends = TextCodec.from_folder(request.model_dir), AnswerEnds()
        for batch in _token_batches(request.dataset_files, codec, options, num_processes):
            rows += batch.num_rows
            eval_rows += batch.num_eval_rows
            truncated_rows += batch.num_truncated_rows
            cut_tokens += batch.num_cut_tokens
            bad.add(batch.violations)
            left_out.add(batch.left_out)
            ends.add(batch.closed_by)
            folder.train.add(batch.train if kind is not DataKind.KTO else train.add(batch.train_answers))
            if folder.evaluation is not None:
                evaluated = batch.evaluation if kind is not DataKind.KTO else held_out.add(batch.evaluation_answers)
                folder.evaluation.add(evaluated)
            on_progress(rows)
        bad.refuse()
        folder.train.add(train.finish())
        if folder.evaluation is not None:
            folder.evaluation.add(held_out.finish())
        _refuse_empty_sides(folder, request, left_out)
        report = PrepareReport(
            rows=rows,
            documents=folder.train.num_documents,
            tokens=folder.train.num_tokens,
            trained_tokens=folder.train.num_targets,
            truncated_rows=truncated_rows,
            truncated_tokens=cut_tokens,
            error_rows=left_out.total,
            eval_rows=eval_rows,
            eval_documents=folder.evaluation.num_documents if folder.evaluation else 0,
            eval_tokens=folder.evaluation.num_tokens if folder.evaluation else 0,
            eval_trained_tokens=folder.evaluation.num_targets if folder.evaluation else 0,
            longest_document=max(side.longest_document for side in (folder.train, folder.evaluation) if side),
            sequence_length=options.sequence_length,
            errors=tuple(violation.description for violation in left_out.kept),
            kind=kind.value,
            answer_ends={codec.token_text(token): token for token in ends.tokens},
        )
        # Joining the planes of a large dataset takes minutes; without progress the parent could take it for a hang.
        folder.publish(dataclasses.asdict(report), on_bytes=lambda: on_progress(rows))
    return report


def _kind(request: PrepareRequest) -> DataKind:
    """Return what the files hold. Raises: InvalidData where they differ, which only files that were not checked can."""
    options = request.options
    if options.format is not DatasetFormat.AUTO:
        return options.kind
    found = [resolve_format(file, options.format, options.field_map)[0] for file in request.dataset_files]
    kinds = list(dict.fromkeys(map(kind_of, found)))
    if len(kinds) > 1:
        raise InvalidData(f"the files of one dataset must hold one kind of data, but these hold {' and '.join(kinds)}")
    return kinds[0]


def _refuse_empty_sides(folder: PreparedFolder, request: PrepareRequest, left_out: ViolationTally) -> None:
    sides = {"training": folder.train, "evaluation": folder.evaluation}
    empty = [name for name, planes in sides.items() if planes and not planes.num_documents]
    names = ", ".join(file.name for file in request.dataset_files)
    if empty and (len(empty) == 2 or folder.evaluation is None):
        # The rows that were left out are the reason, where there are any.
        left_out.refuse()
        raise InvalidData(f"{names} gives no trained token; the dataset must hold at least one row to learn from")
    if empty:
        raise InvalidData(
            f"eval_fraction {request.options.eval_fraction:g} leaves no row of {names} for {empty[0]}; use another "
            "fraction, or push an "
            "eval_dataset"
        )


@dataclass(kw_only=True)
class _TokenBatch:
    """What became of some rows, in a form that is cheap to send between processes and to append to a file."""

    num_rows: int = 0
    train: DocumentColumns = field(default_factory=DocumentColumns)
    evaluation: DocumentColumns = field(default_factory=DocumentColumns)
    # Of `kto`, instead of documents: what each is joined with comes with the next row, which another process may have.
    train_answers: list[LabelledAnswer] = field(default_factory=list)
    evaluation_answers: list[LabelledAnswer] = field(default_factory=list)
    num_eval_rows: int = 0
    num_truncated_rows: int = 0
    num_cut_tokens: int = 0
    closed_by: Counter[int | None] = field(default_factory=Counter)
    violations: list[FieldViolation] = field(default_factory=list)
    left_out: list[FieldViolation] = field(default_factory=list)


def _token_batches(
    files: Iterable[DataFile], codec: TextCodec, options: PrepareOptions, num_processes: int
) -> Iterator[_TokenBatch]:
    """Yield what becomes of every row of the files. Raises: InvalidFile where one cannot be read as rows,
    WorkerDied."""
    for file in files:
        dataset_format, container = resolve_format(file, options.format, options.field_map)
        processes = num_processes if file.path.stat().st_size >= _FORKED_FROM_BYTES else 1
        if container is Container.PLAIN_TEXT:
            yield from _text_batches(file, codec, options, processes)
            continue
        check_field_map(dataset_format, options.field_map)
        items: Iterable[Row | JsonLine]
        parse: Callable[[Any], Iterable[Row]]
        if container is Container.JSON_LINES:
            # Parsed where they are tokenised: a line is cheaper to send than the row it holds.
            items, parse = split_json_lines(file), partial(parse_json_lines, file=file.name)
        else:
            items, parse = read_rows(file, columns_of(dataset_format, options.field_map)), iter
        tokenized = partial(_tokenized, RowTokenizer(codec, options, dataset_format), parse)
        yield from ordered_map(tokenized, _grouped(items), num_processes=processes)


def _tokenized(tokenizer: RowTokenizer, parse: Callable[[Any], Iterable[Row]], group: Sequence[Any]) -> _TokenBatch:
    batch = _TokenBatch(num_rows=len(group))
    for row in tokenizer.tokenize(list(parse(group))):
        batch.violations += row.violations
        batch.left_out += [row.left_out] if row.left_out else []
        batch.num_truncated_rows += row.num_cut_tokens > 0
        batch.num_cut_tokens += row.num_cut_tokens
        batch.num_eval_rows += row.held_out and bool(row.documents)
        if not row.held_out:
            batch.closed_by.update(row.closed_by)
        if row.answer is not None:
            (batch.evaluation_answers if row.held_out else batch.train_answers).append(row.answer)
            continue
        side = batch.evaluation if row.held_out else batch.train
        for document in row.documents:
            side.add(
                document.ids,
                document.trained,
                document.num_targets,
                old_logprobs=document.old_logprobs,
                advantages=document.advantages,
                weights=document.target_weights,
            )
    return batch


def _grouped(items: Iterable[Row | JsonLine]) -> Iterator[list[Row | JsonLine]]:
    """Group rows so that neither many nor long ones are held at once."""
    group: list[Row | JsonLine] = []
    num_bytes = 0
    for item in items:
        group.append(item)
        num_bytes += item.num_bytes
        if len(group) >= _ROWS_AT_ONCE or num_bytes >= _BYTES_AT_ONCE:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


def _text_batches(
    file: DataFile, codec: TextCodec, options: PrepareOptions, num_processes: int
) -> Iterator[_TokenBatch]:
    batch = _TokenBatch()

    def readable() -> Iterator[str]:
        for piece in read_text(file):
            batch.violations += [piece.violation] if piece.violation else []
            yield piece.text

    def encoded(block: str) -> tuple[int, array.array[int]]:
        """Return the number of rows of a plain text, which are its lines that are not blank, and their tokens."""
        ids = array.array("i", codec.encode_ids(block))
        codec.check_ids(ids)
        return sum(1 for line in block.split("\n") if line.strip()), ids

    def blocks() -> Iterator[array.array[int]]:
        for num_rows, ids in ordered_map(encoded, text_blocks(readable()), num_processes=num_processes):
            batch.num_rows += num_rows
            yield ids

    parts = itertools.chain([codec.leading_ids], blocks(), [codec.trailing_ids])
    for documents in split_text(parts, options.sequence_length):
        for document in documents:
            if not document.num_targets:
                problem = "the text is one token only; nothing precedes it, so there is nothing to learn"
                batch.left_out.append(FieldViolation(field=file.name, description=f"{file.name}: {problem}"))
                continue
            # The lines of a text are not rows to choose from, so its pieces are held out or not.
            held_out = is_held_out(document.ids.tobytes(), options.eval_fraction)
            side = batch.evaluation if held_out else batch.train
            side.add(document.ids, document.trained, document.num_targets)
        yield batch
        batch = _TokenBatch()


_function: Callable[[Any], Any] | None = None


def ordered_map(function: Callable[[Item], Result], items: Iterable[Item], *, num_processes: int) -> Iterator[Result]:
    """Yield `function(item)` for each item in order; a single process is the caller's own.

    Raises: WorkerDied when one of them is killed. Thread: to be called while this is the only one.
    """
    if num_processes == 1:
        yield from map(function, items)
        return
    # Processes, as threads would wait for the sixth of the work that is Python (ADR 0005); forked, so that they share
    # what the function has loaded.
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


if __name__ == "__main__":
    sys.exit(serve(work, who="the data preparation", is_loading=True))

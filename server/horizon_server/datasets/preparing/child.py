"""The preparation child: one request in, one prepared folder out, progress on the way.

`python -m horizon_server.datasets.preparing.child --events-fd N [REQUEST.json]` reads the request from the file or from stdin and writes
events to descriptor N (stdout without it): progress with rows done and total and at last the report, then how it ended, with a detail for
every bad row. Exit code 0 or 1.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from horizon_formats.formats import check_field_map
from horizon_formats.problems import ViolationTally
from horizon_server.datasets.preparing.batches import token_batches
from horizon_server.datasets.reading import server_errors
from horizon_server.datasets.recipe import PrepareReport, PrepareRequest
from horizon_server.datasets.tokens.codec import TextCodec
from horizon_server.datasets.tokens.sandbox import MAX_MEMORY_BYTES, limit_memory
from horizon_server.errors import HorizonError, InvalidData
from horizon_server.events import AttemptEnded, PrepareProgress, encode
from horizon_server.store.cpus import available_cpus
from horizon_server.store.prepared import PreparedFolder

OnProgress = Callable[[int], None]
"""Called with the number of rows done."""

_PROGRESS_EVERY_S = 0.25
_MAX_PROCESSES = 16
"""One process reads and writes for all; it cannot keep more than about this many busy."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve one request and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m horizon_server.datasets.preparing.child", description=__doc__)
    parser.add_argument("request", nargs="?", type=Path, help="file with the request; stdin without it")
    parser.add_argument("--events-fd", type=int, default=1, help="descriptor to write events to")
    parser.add_argument(
        "--processes",
        type=int,
        default=min(available_cpus(), _MAX_PROCESSES),
        help="number of processes that tokenise; default: one per core",
    )
    options = parser.parse_args(arguments)
    # An orderly end, so that partially written files are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    limit_memory()
    events = _EventLines(options.events_fd)
    try:
        text = options.request.read_bytes() if options.request else sys.stdin.buffer.read()
        request = PrepareRequest.from_json(text)
        report = prepare(
            request,
            on_progress=lambda done: events.progress(done, request.num_rows),
            num_processes=options.processes,
        )
    except HorizonError as error:
        details = tuple(violation.description for violation in error.violations)
        events.write(AttemptEnded(outcome="failed", reason=error.reason, message=error.message, details=details))
        return 1
    except MemoryError:
        message = f"a row takes more than {MAX_MEMORY_BYTES // 2**30} GiB of memory to render; is the model's chat template right?"
        events.write(AttemptEnded(outcome="failed", reason=InvalidData.reason, message=message))
        return 1
    except BrokenPipeError:
        return 1  # the daemon that asked is gone
    except OSError as error:
        events.write(AttemptEnded(outcome="failed", reason="IO_ERROR", message=str(error)))
        return 1
    events.write(PrepareProgress(done_rows=report.rows, total_rows=report.rows, report=report.counts()))
    events.write(AttemptEnded(outcome="succeeded"))
    return 0


def prepare(request: PrepareRequest, *, on_progress: OnProgress, num_processes: int = 1) -> PrepareReport:
    """Tokenise every row into `request.output_dir` and return what came out: the same bytes for any number of processes.

    Raises: InvalidData with every bad row (the first 100 and their number), or where a side of `eval_fraction` is empty; InvalidModel
    for an unusable tokenizer; DiskFull.
    """
    options = request.options
    names = ", ".join(file.name for file in request.dataset_files)
    bad, left_out = ViolationTally(), ViolationTally()
    rows = eval_rows = truncated_rows = cut_tokens = 0
    with server_errors(), PreparedFolder(request.output_dir, with_evaluation=options.eval_fraction > 0) as folder:
        check_field_map(options.format, options.field_map)
        codec = TextCodec.from_folder(request.model_dir)
        for batch in token_batches(request.dataset_files, codec, options, num_processes=num_processes):
            rows += batch.num_rows
            eval_rows += batch.num_eval_rows
            truncated_rows += batch.num_truncated_rows
            cut_tokens += batch.num_cut_tokens
            bad.add(batch.violations)
            left_out.add(batch.left_out)
            folder.train.add(batch.train)
            if folder.evaluation is not None:
                folder.evaluation.add(batch.evaluation)
            on_progress(rows)
        bad.refuse()
        _refuse_empty_sides(folder, names, options.eval_fraction, left_out)
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
            longest_document=folder.train.longest_document,
            sequence_length=options.sequence_length,
            errors=tuple(violation.description for violation in left_out.kept),
        )
        # Joining the planes of a large dataset takes minutes; without progress the parent could take it for a hang.
        folder.publish(report.to_mapping(), on_bytes=lambda: on_progress(rows))
    return report


def _refuse_empty_sides(folder: PreparedFolder, names: str, eval_fraction: float, left_out: ViolationTally) -> None:
    has_training = folder.train.num_documents > 0
    has_evaluation = folder.evaluation is None or folder.evaluation.num_documents > 0
    if has_training and has_evaluation:
        return
    if not has_training and (folder.evaluation is None or not has_evaluation):
        left_out.refuse()
        raise InvalidData(f"{names} gives no trained token; the dataset must hold at least one row to learn from")
    empty = "evaluation" if has_training else "training"
    raise InvalidData(
        f"eval_fraction {eval_fraction:g} leaves no row of {names} for {empty}; use another fraction, or push an eval_dataset"
    )


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

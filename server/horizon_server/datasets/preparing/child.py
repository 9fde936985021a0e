"""The child that prepares data: one request in, one prepared folder out, progress on the way."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from horizon_formats.formats import check_field_map
from horizon_formats.problems import ViolationTally
from horizon_server.children.entry import EventWriter, serve
from horizon_server.datasets.preparing.batches import token_batches
from horizon_server.datasets.reading import server_errors
from horizon_server.datasets.recipe import PrepareReport, PrepareRequest
from horizon_server.datasets.tokens.codec import TextCodec
from horizon_server.errors import InvalidData
from horizon_server.events import PrepareProgress
from horizon_server.store.cpus import available_cpus
from horizon_server.store.prepared import PreparedFolder

OnProgress = Callable[[int], None]
"""Called with the number of rows done."""

_PROGRESS_EVERY_S = 0.25
_MAX_PROCESSES = 16
"""One process reads and writes for all; it cannot keep more than about this many busy."""


def work(plain: Any, events: EventWriter) -> dict[str, Any]:
    """Prepare the folder that the request describes; returns the counts of the report."""
    # An orderly end, so that partial files are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    num_processes = plain.pop("num_processes", None) or min(available_cpus(), _MAX_PROCESSES)
    request = PrepareRequest.from_mapping(plain)
    next_progress_s = 0.0

    def on_progress(done: int) -> None:
        nonlocal next_progress_s
        now_s = time.monotonic()
        if now_s >= next_progress_s:
            next_progress_s = now_s + _PROGRESS_EVERY_S
            events.send(PrepareProgress(done_rows=done, total_rows=request.num_rows))

    return prepare(request, on_progress=on_progress, num_processes=num_processes).counts()


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


if __name__ == "__main__":
    sys.exit(serve(work, who="the data preparation"))

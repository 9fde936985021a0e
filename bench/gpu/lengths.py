"""Stage: rows of many different lengths, single documents and packed. What is compiled or chosen for each length shows
as a first step that is slower than the second over the same rows; some of the lengths are odd multiples of 64, which
masked attention has got wrong."""

from __future__ import annotations

from bench.gpu.engine import job_trainer, set_up
from bench.gpu.report import Report
from bench.gpu.shapes import SIZES
from bench.gpu.steps import choose_model, opened
from bench.gpu.task import Task
from bench.models import rows_of
from horizon_server.figures import StepFigures

_STEP_LENGTH = 16


def run(task: Task, report: Report) -> None:
    """A row for each kind."""
    sizes, clock, model = SIZES[task.device], task.clock(), choose_model(task)
    vocab_size = model.template.vocab_size
    kinds = {kind: rows_of(vocab_size, documents) for kind, documents in _kinds(task).items()}
    report.table(
        f"First and second step over {sizes.num_lengths} rows of as many lengths",
        {
            "rows": "",
            "tokens": ",d",
            "first s": ".3f",
            "second s": ".3f",
            "first/second": ".2f",
            "loss": ".4f",
            "note": "",
        },
    )
    found = set_up(task, model, kinds["packed"])
    with opened(task, model) as (store, device):
        trainer = job_trainer(model, store, device, found)
        try:
            # Of lengths that do not come again, so that only what depends on the length is left for the first step.
            short = sizes.shortest_length // 2
            trainer.train_step(rows_of(vocab_size, [(short,), (short // 2, short // 2 + 1)]))
            last_s = 0.0
            for kind, rows in kinds.items():
                if not clock.allows(2 * last_s):
                    report.row(rows=kind, note="no time left")
                    continue
                first = trainer.train_step(rows)
                # Now, in case that the second one does not end in time.
                report.note(rows=kind, first_s=first.duration_s)
                second = trainer.train_step(rows)
                last_s = first.duration_s + second.duration_s
                report.row(rows=kind, **_cells(first, second))
        finally:
            trainer.close()


def _kinds(task: Task) -> dict[str, list[tuple[int, ...]]]:
    sizes, step = SIZES[task.device], _STEP_LENGTH if task.device == "cuda" else 1
    lengths = [sizes.shortest_length + step * index for index in range(sizes.num_lengths)]
    return {
        "one document each": [(length,) for length in lengths],
        # Two thirds and one third, each in lengths of its own.
        "packed": [(length - length // 3, length // 3) for length in lengths],
    }


def _cells(first: StepFigures, second: StepFigures) -> dict[str, object]:
    return {
        "tokens": first.num_tokens,
        "first_s": first.duration_s,
        "second_s": second.duration_s,
        "first/second": first.duration_s / second.duration_s,
        "loss": second.loss,
        "note": ", ".join(filter(None, (first.skipped, second.skipped))),
    }

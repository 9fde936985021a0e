"""How jobs, plans and lists look in a notebook, and a bar of progress for it; on paper, lists as tables.

    from horizon_client.notebook import NotebookReporter

    client.datasets.push("train.jsonl", name="notes", reporter=NotebookReporter())
    client.jobs.wait("first", reporter=NotebookReporter())

Only `NotebookReporter` needs IPython, which a notebook has.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from html import escape
from typing import TYPE_CHECKING, Any, TypeVar

from horizon_client.reporter import Progress, Reporter

if TYPE_CHECKING:
    from horizon_client.resources import Job, JobEvent, MemoryPlan, PlannedJob

ItemT = TypeVar("ItemT")

_INTERVAL_S = 0.2
_COLUMNS = {
    "Job": ("job_id", "name", "owner", "state", "step", "num_steps", "create_time"),
    "QueueEntry": ("job_id", "name", "owner", "state", "position", "step", "num_steps"),
    "Dataset": ("name", "owner", "state", "num_rows", "size_bytes", "create_time"),
    "Model": ("name", "owner", "state", "size_bytes", "create_time"),
    "Checkpoint": ("step", "eval_loss", "size_bytes", "last", "best", "create_time"),
}
"""What a list shows of each kind."""


class Listing(list[ItemT]):
    """A list of records that `print` and a notebook show as a table."""

    def _cells(self) -> tuple[Sequence[str], list[list[str]]]:
        kinds = {type(item).__name__ for item in self}
        kind = kinds.pop() if len(kinds) == 1 else ""
        names = [name for name in _COLUMNS.get(kind, ()) if hasattr(self[0], name)]
        return names, [[_text(getattr(item, name)) for name in names] for item in self]

    def __str__(self) -> str:
        names, rows = self._cells()
        if not names:
            return list.__repr__(self)
        widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
        lines = [[name.upper() for name in names], *rows]
        return "\n".join(
            "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        )

    def _repr_html_(self) -> str | None:
        names, rows = self._cells()
        return table_html("", names, rows) if names else None


class NotebookReporter(Reporter):
    """Shows a transfer, or a job that is waited for, as a bar below the cell in which it was made.

    Thread: as `Reporter`; the cell's output may be updated from any thread.
    """

    def __init__(self) -> None:
        from IPython.display import HTML, display  # a notebook has it, and nothing else needs it

        self._html = HTML
        self._shown: Any = display(HTML(""), display_id=True)
        self._notices: list[str] = []
        self._bar = ""
        self._next_at = 0.0

    def progress(self, progress: Progress) -> None:
        """Move the bar of a transfer."""
        total, done = progress.total_bytes, progress.done_bytes
        amount = f"{done / 2**20:,.1f} of {total / 2**20:,.1f} MiB" if total else ""
        self._draw(f"{progress.phase} {progress.name} {amount}", done / total if total else None, done >= total)

    def event(self, event: JobEvent) -> None:
        """Move the bar of a job."""
        if event.kind == "step":
            of_all = f" of {event.num_steps:,}" if event.num_steps else ""
            text = f"step {event.step:,}{of_all}  loss {event.loss:.4f}"
            share = event.step / event.num_steps if event.num_steps else None
            self._draw(f"{text}  {event.tokens_per_second:,.0f} tokens/s", share, event.step == event.num_steps)
        elif event.kind == "eval":
            self.notice(f"step {event.step:,}: eval loss {event.eval_loss:.4f}")
        elif event.kind == "state":
            self.notice(f"{event.state}{f': {event.message}' if event.message else ''}")

    def notice(self, message: str) -> None:
        """Show a message above the bar."""
        self._notices = [*self._notices[-4:], message]
        self._update()

    def _draw(self, text: str, share: float | None, is_end: bool) -> None:
        self._bar = bar_html(text, share)
        if is_end or time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + _INTERVAL_S
            self._update()

    def _update(self) -> None:
        lines = "".join(f"<div>{escape(notice)}</div>" for notice in self._notices)
        self._shown.update(self._html(lines + self._bar))


def bar_html(text: str, share: float | None) -> str:
    """Return a bar with a text beside it; one without a share has no known end."""
    value = "" if share is None else f' value="{min(max(share, 0.0), 1.0):.4f}"'
    return f'<div><progress max="1"{value}></progress> <span>{escape(text)}</span></div>'


def table_html(caption: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with a line of text above it."""
    head = "".join(f"<th>{escape(header)}</th>" for header in headers)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    above = f"<div>{escape(caption)}</div>" if caption else ""
    return f"{above}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def job_html(job: Job) -> str:
    """Return a job as a heading, the bar of its steps and the figures that a person asks for first."""
    step = job.last_step
    facts = [
        ("id", job.job_id),
        ("owner", job.owner),
        ("model", job.model),
        ("dataset", job.dataset),
        ("loss", f"{step.loss:.4f}" if step else ""),
        ("eval loss", f"{job.last_eval.eval_loss:.4f} (step {job.last_eval.step:,})" if job.last_eval else ""),
        ("speed", f"{step.tokens_per_second:,.0f} tokens/s" if step else ""),
        ("why", job.outlook.why if job.outlook else job.message),
    ]
    head = f"<b>{escape(job.name)}</b> {escape(job.state)}"
    text = f"step {job.step:,} of {job.num_steps:,}" if job.num_steps else f"step {job.step:,}"
    text = text if job.num_steps or job.step else "not started"
    bar = bar_html(text, job.step / job.num_steps if job.num_steps else 0.0)
    return f"<div>{head}</div>{bar}{table_html('', (), [fact for fact in facts if fact[1]])}"


def plan_html(planned: PlannedJob) -> str:
    """Return a planned job as what decides: whether it fits, what it takes, and how long."""
    return f"<div><b>{escape(planned.spec.get('name', ''))}</b></div>{memory_html(planned.plan)}"


def memory_html(plan: MemoryPlan) -> str:
    """Return a plan as a table of its memory, with its verdict above."""
    verdict = "it fits" if plan.fits else f"it does not fit: {plan.message}"
    if plan.prediction is not None:
        verdict += f"; {plan.prediction.tokens_per_second:,.0f} tokens/s predicted"
    parts = sorted({*plan.host_bytes, *plan.device_bytes})
    rows = [[part, _gib(plan.host_bytes.get(part)), _gib(plan.device_bytes.get(part))] for part in parts]
    rows.append(["total", _gib(plan.host_total_bytes), _gib(plan.device_total_bytes)])
    return table_html(verdict, ("component", "host", "device"), rows)


def _gib(num_bytes: int | None) -> str:
    return "" if not num_bytes else f"{num_bytes / 2**30:,.2f} GiB"


def _text(value: object) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, datetime):
        return f"{value.astimezone():%Y-%m-%d %H:%M:%S}"
    return f"{value:.4f}" if isinstance(value, float) else str(value)

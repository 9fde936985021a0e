"""What tools answer: rows and facts as the command line shows them, cut where they would be long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from horizon_client.cli.compare import job_figures
from horizon_client.cli.job_views import JOB_VIEW, OUTLOOK_COLUMNS
from horizon_client.cli.output import View, clean, to_plain

if TYPE_CHECKING:
    from horizon_client.resources import Job

Answer: TypeAlias = dict[str, Any]
ItemT = TypeVar("ItemT")

MOST_LISTED = 100
MOST_LINES = 500
MOST_LINE_CHARACTERS = 2000
MOST_TEXT_CHARACTERS = 40_000

JOB_LIST_VIEW: View[Job] = View(
    columns=[*JOB_VIEW.columns, *OUTLOOK_COLUMNS], details=JOB_VIEW.details, name=JOB_VIEW.name
)


def rows(view: View[ItemT], items: Sequence[ItemT]) -> list[dict[str, str]]:
    """Return the cells of a table by their columns; those that have nothing to say are left out."""
    named = [(header.lower().replace(" ", "_") or "marks", cell) for header, cell in view.columns]
    return [{name: text for name, cell in named if (text := clean(cell(item))) not in ("", "-")} for item in items]


def listed(name: str, view: View[ItemT], found: Sequence[ItemT], limit: int, more: str) -> Answer:
    """Return the first `limit` of a list; where it is longer, `more` says how to see the rest."""
    answer: Answer = {name: rows(view, found[:limit])}
    if len(found) > limit:
        answer["note"] = f"cut after {limit}: {more}"
    return answer


def facts(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return the lines of a page by their labels; several of one label become one text."""
    found: dict[str, str] = {}
    for label, value in pairs:
        text = clean(value)
        found[label] = f"{found[label]}\n{text}" if label in found else text
    return found


def job_answer(job: Job) -> Answer:
    """Return what is known of a job, in words, and its figures as numbers."""
    return {"facts": facts(JOB_VIEW.details(job)), "figures": to_plain(job_figures(job))}


def last_lines(text: str, limit: int) -> Answer:
    """Return the last lines of a text, each with its beginning."""
    lines = text.splitlines()
    kept = [cut(line, MOST_LINE_CHARACTERS) for line in lines[-limit:]]
    while sum(map(len, kept)) > MOST_TEXT_CHARACTERS:
        kept = kept[1:]
    answer: Answer = {"lines": kept}
    if len(kept) < len(lines):
        answer["note"] = f"the last {len(kept)} of {len(lines):,} lines"
    return answer


def cut(text: str, most: int) -> str:
    """Return a text, or its beginning and how much is missing."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text) - most:,} more characters)"

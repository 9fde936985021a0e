"""A preview for people: rows as the model reads them, with the trained part marked, answers that are compared side by
side."""

from __future__ import annotations

import itertools
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import click

from horizon_client.cli.output import clean, uses_colour

if TYPE_CHECKING:
    from horizon_client.resources import DatasetPreview, PreviewRow, PreviewSpan

# A narrower terminal shows answers one after the other.
_MIN_WIDTH = 100
_GAP = "  "
_SUPERVISED = ("preference", "kto", "samples")
_MARKS = ("[[", "]]")


def preview_page(name: str, preview: DatasetPreview) -> str:
    """Return the rows of dataset `name`, with the trained part in colour, or between [[ and ]] without colour."""
    is_terminal = sys.stdout.isatty()
    in_colour = uses_colour()
    width = shutil.get_terminal_size().columns if is_terminal else 0
    # Of answers and samples the same is trained whatever the options say.
    options = "" if preview.format in _SUPERVISED else f"method {preview.method}, train_on {preview.train_on}, "
    lines = [
        f"{clean(name)}: {preview.num_rows:,} rows, {clean(preview.format)}; {options}sequence_length "
        f"{preview.sequence_length}",
        "trained text is green" if in_colour else "trained text is between [[ and ]]",
    ]
    if any(span.weight is not None for row in preview.rows for span in row.spans):
        lines[-1] += "; the number after * is its weight, where that is not 1"
    # The documents of one row follow each other.
    for _, documents in itertools.groupby(preview.rows, key=place_of):
        row = list(documents)
        if len(row) == 2 and width >= _MIN_WIDTH:
            lines += [
                "",
                f"--- {clean(place_of(row[0]))} ---",
                *_side_by_side(row, (width - len(_GAP)) // 2, in_colour),
            ]
            continue
        for document in row:
            text = "".join(_marked(_printable(span), span.trained, in_colour, span.weight) for span in document.spans)
            part = f", {clean(document.part)}" if document.part else ""
            lines += ["", f"--- {clean(place_of(document))}{part}: {_counts(document)} ---", text, *_remarks(document)]
    if not preview.rows:
        lines.append("no rows: the offset is after the last row")
    return "\n".join(lines)


def place_of(row: PreviewRow) -> str:
    """Return where a row is, for people."""
    return f"{row.file} {row.unit} {row.number}"


def _counts(row: PreviewRow) -> str:
    counts = f"{row.num_tokens:,} tokens, {row.num_trained_tokens:,} trained"
    return counts + (f", in {row.num_documents} documents" if row.num_documents > 1 else "")


def _remarks(row: PreviewRow) -> list[str]:
    """What is not shown, and what is not trained and why."""
    lines = ["... the row is longer; only its beginning is shown"] if row.clipped else []
    if row.num_cut_tokens:
        lines.append(f"... {row.num_cut_tokens:,} more tokens are beyond the sequence length: not trained, not shown")
    return lines + [clean(f"not trained: {problem}") for problem in row.problems]


def _side_by_side(row: Sequence[PreviewRow], width: int, in_colour: bool) -> list[str]:
    # Without colour a line that is trained is between marks.
    room = width if in_colour else width - len("".join(_MARKS))
    columns = []
    for document in row:
        text = [(character, span.trained) for span in document.spans for character in _printable(span).expandtabs(4)]
        heading = [(character, False) for character in f"{clean(document.part)}: {_counts(document)}\n"]
        remarks = [(character, False) for line in _remarks(document) for character in f"\n{line}"]
        columns.append(_wrapped([*heading, *text, *remarks], room))
    lines = []
    for left, right in itertools.zip_longest(*columns, fillvalue=()):
        padding = " " * (width - sum(map(_width_of, left)) - (0 if in_colour else _mark_width(left)))
        lines.append((_joined(left, in_colour) + padding + _GAP + _joined(right, in_colour)).rstrip())
    return lines


Marked = Sequence[tuple[str, bool]]


def _wrapped(text: Iterable[tuple[str, bool]], width: int) -> list[Marked]:
    """Cut a text into lines of at most `width` columns."""
    lines: list[list[tuple[str, bool]]] = [[]]
    used = 0
    for marked in text:
        if marked[0] == "\n":
            lines.append([])
            used = 0
            continue
        if used + _width_of(marked) > width:
            lines.append([])
            used = 0
        lines[-1].append(marked)
        used += _width_of(marked)
    return list(lines)


def _joined(line: Marked, in_colour: bool) -> str:
    runs = itertools.groupby(line, key=lambda marked: marked[1])
    return "".join(_marked("".join(character for character, _ in run), trained, in_colour) for trained, run in runs)


def _mark_width(line: Marked) -> int:
    return sum(len("".join(_MARKS)) for trained, _ in itertools.groupby(line, key=lambda marked: marked[1]) if trained)


def _width_of(marked: tuple[str, bool]) -> int:
    if unicodedata.combining(marked[0]):
        return 0
    return 2 if unicodedata.east_asian_width(marked[0]) in "WF" else 1


def _marked(text: str, trained: bool, in_colour: bool, weight: float | None = None) -> str:
    if not trained:
        return text
    marked = click.style(text, fg="green") if in_colour else text.join(_MARKS)
    return marked if weight is None else f"{marked}*{weight:g}"


def _printable(span: PreviewSpan) -> str:
    # Without control characters, so that a row cannot control the terminal; line breaks and tabs are part of its text.
    return "".join(c for c in span.text if c in "\n\t" or unicodedata.category(c) != "Cc")
